"""What the scheduler's bookkeeping costs per step: many running requests, a dry engine.

    python -m vtoken.vllm_plugin.bench [--requests 256] [--context 4096] [POLICY ...]

Every request has a budget of its whole context and loses 16 tokens every 16 steps, spread evenly
over the steps; `none` has a budget that is never reached, `native` is vLLM alone. Times are CPU
time of the thread (others on the machine do not count), the lowest of several stretches of steps:

    hooks    begin_step, execute, finalize and take_scores, as called by the scheduler
    step     a whole step of the dry engine; less `native`'s it says what the hooks cost in all
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.engine.dry import DryEngine, DrySettings

POLICIES = ("native", "none", "streaming-llm", "random", "h2o")
HOOKS = ("begin_step", "execute", "finalize", "take_scores")
NEVER_REACHED_TOKENS = 10**6
INTERVAL_TOKENS = 16
STRETCH_STEPS = 32


def make_config(policy: str, context: int) -> VTokenConfig | None:
    """vToken's settings for one row of the table; None for vLLM alone."""
    if policy == "native":
        return None
    if policy == "none":
        return VTokenConfig(policy="random", kv_budget_tokens=NEVER_REACHED_TOKENS)
    return VTokenConfig(
        policy=policy, kv_budget_tokens=context, eviction_interval_tokens=INTERVAL_TOKENS
    )


def start_engine(policy: str, num_requests: int, context: int, **changes) -> DryEngine:
    """An engine in the steady state: all requests decode, evictions spread over the steps."""
    draws = np.random.default_rng(0).random(1 << 20).astype(np.float32)

    def scores(req_id: str, step_seq: int, ids: np.ndarray) -> np.ndarray:
        at = step_seq * 7919 % 100_000
        return draws[at : at + len(ids)]

    settings = DrySettings(
        num_kv_blocks=num_requests * (context // 16 + 300),
        max_model_len=context + 4096,
        max_num_seqs=num_requests,
        max_num_batched_tokens=8 * context,
        **changes,
    )
    engine = DryEngine(settings, make_config(policy, context), score_source=scores)
    for i in range(num_requests):
        prompt = [5 + i % 97] * (context - 40 + i % INTERVAL_TOKENS)
        engine.add(f"r{i}", prompt, 4000)
    for _ in range(60 + num_requests // 8):
        engine.step()
    assert len(engine.scheduler.running) == num_requests, "the pool does not hold all requests"
    return engine


class HookClock:
    """CPU seconds spent in each hook since the last `reset`."""

    def __init__(self, hooks) -> None:
        self.spent_s = dict.fromkeys(HOOKS, 0.0)
        for name in HOOKS if hooks is not None else ():
            setattr(hooks, name, self._timed(name, getattr(hooks, name)))

    def _timed(self, name: str, call: Callable) -> Callable:
        spent_s = self.spent_s

        def timed(*args):
            start = time.thread_time()
            try:
                return call(*args)
            finally:
                spent_s[name] += time.thread_time() - start

        return timed

    def reset(self) -> None:
        self.spent_s.update(dict.fromkeys(self.spent_s, 0.0))


def measure(engine: DryEngine, num_stretches: int) -> dict[str, float]:
    """Milliseconds per step, the lowest of the stretches.

    Returns:
        `step_ms`, `wall_ms`, and in a second pass `hooks_ms` and one entry per hook;
        `events` evictions per step.
    """
    best = {"step_ms": np.inf, "wall_ms": np.inf, "hooks_ms": np.inf}
    before, steps = engine.counters.eviction_events, num_stretches * STRETCH_STEPS
    for _ in range(num_stretches):
        cpu, wall = time.thread_time(), time.perf_counter()
        for _ in range(STRETCH_STEPS):
            engine.step()
        best["step_ms"] = min(best["step_ms"], 1e3 * (time.thread_time() - cpu) / STRETCH_STEPS)
        best["wall_ms"] = min(best["wall_ms"], 1e3 * (time.perf_counter() - wall) / STRETCH_STEPS)
    best["events"] = (engine.counters.eviction_events - before) / steps
    clock = HookClock(engine.hooks)
    for _ in range(num_stretches):
        clock.reset()
        for _ in range(STRETCH_STEPS):
            engine.step()
        parts = {name: 1e3 * s / STRETCH_STEPS for name, s in clock.spent_s.items()}
        if sum(parts.values()) < best["hooks_ms"]:
            best |= parts | {"hooks_ms": sum(parts.values())}
    return best


def profile(engine: DryEngine) -> None:
    """Print where a stretch of steps spends its time."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(STRETCH_STEPS):
        engine.step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("policies", nargs="*", default=list(POLICIES))
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--stretches", type=int, default=8)
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    for policy in args.policies:
        engine = start_engine(
            policy, args.requests, args.context, enable_prefix_caching=args.prefix_caching
        )
        row = measure(engine, args.stretches)
        parts = " ".join(f"{name} {row[name]:.3f}" for name in HOOKS if name in row)
        print(
            f"{policy:14s} {args.requests} x {args.context}: hooks {row['hooks_ms']:.3f} ms/step "
            f"({parts}); step {row['step_ms']:.3f} ms CPU, {row['wall_ms']:.3f} ms wall; "
            f"{row['events']:.1f} evictions/step"
        )
        if args.profile:
            profile(engine)


if __name__ == "__main__":
    main()

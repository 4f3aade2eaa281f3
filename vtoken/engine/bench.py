"""What the scheduler's bookkeeping costs per step: many running requests, a dry engine.

    python -m vtoken.engine.bench [--requests 256 ...] [--context 4096 ...] [POLICY ...]

Every request has a budget of its whole context and loses 16 tokens every 16 steps, spread evenly
over the steps; `none` has a budget that is never reached, `native` is vLLM alone.

    hooks    begin, on_allocate, finish and take_report, as called by the scheduler
    step     a whole step of the dry engine; less `native`'s it says what the hooks cost in all
    us each  hooks per eviction: flat over `--requests 64 128 256 512` where the cost is linear, and
             over `--context 4096 16384` where it does not grow with the context

Other work on the machine only ever adds time. The steps repeat themselves with the interval, so
each of the interval's 16 steps counts with the fastest of its repetitions, and the mean of the 16
is shown. Wall time, for reading a thread's CPU clock may take longer than a hook does; the CPU
time of whole stretches is given beside it.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from itertools import product

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.core.ops import TableOps
from vtoken.core.scalar_ops import ScalarOps
from vtoken.engine.dry import DryEngine, DrySettings

POLICIES = ("native", "none", "streaming-llm", "random", "h2o")
HOOKS = ("begin", "on_allocate", "finish", "take_report")
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


def start_engine(
    policy: str, num_requests: int, context: int, *, ops: TableOps | None = None, **changes
) -> DryEngine:
    """An engine in the steady state: all requests decode, evictions spread over the steps.

    Args:
        ops: what is done to many tables at once, where it is not to be what the plugin takes.
    """
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
    if ops is not None and engine.hooks is not None:
        engine.scheduler.vtoken_reconfigure(engine.hooks.config, ops)
    for i in range(num_requests):
        prompt = [5 + i % 97] * (context - 40 + i % INTERVAL_TOKENS)
        engine.add(f"r{i}", prompt, 4000)
    for _ in range(60 + num_requests // 8):
        engine.step()
    assert len(engine.scheduler.running) == num_requests, "the pool does not hold all requests"
    return engine


class HookClock:
    """Seconds spent in each hook since the last `reset`."""

    def __init__(self, hooks) -> None:
        self.spent_s = dict.fromkeys(HOOKS, 0.0)
        for name in HOOKS if hooks is not None else ():
            setattr(hooks, name, self._timed(name, getattr(hooks, name)))

    def _timed(self, name: str, call: Callable) -> Callable:
        spent_s, clock = self.spent_s, time.perf_counter

        def timed(*args):
            start = clock()
            try:
                return call(*args)
            finally:
                spent_s[name] += clock() - start

        return timed

    def reset(self) -> None:
        self.spent_s.update(dict.fromkeys(self.spent_s, 0.0))


def fastest_ms(seconds: list[float]) -> float:
    """Milliseconds a step: the fastest repetition of each step of the interval, averaged."""
    return 1e3 * float(np.reshape(seconds, (-1, INTERVAL_TOKENS)).min(axis=0).mean())


def measure(engine: DryEngine, num_stretches: int) -> dict[str, float]:
    """Milliseconds per step.

    Returns:
        `step_ms`, `cpu_ms` (of the fastest stretch), `hooks_ms`, one entry per hook; `events`:
        evictions per step.
    """
    before, num_steps = engine.counters.eviction_events, num_stretches * STRETCH_STEPS
    steps, cpu = [], []
    for _ in range(num_stretches):
        cpu.append(-time.thread_time())
        for _ in range(STRETCH_STEPS):
            start = time.perf_counter()
            engine.step()
            steps.append(time.perf_counter() - start)
        cpu[-1] += time.thread_time()
    found = {"step_ms": fastest_ms(steps), "cpu_ms": 1e3 * min(cpu) / STRETCH_STEPS}
    found["events"] = (engine.counters.eviction_events - before) / num_steps
    clock = HookClock(engine.hooks)
    spent: dict[str, list[float]] = {name: [] for name in HOOKS}
    for _ in range(num_steps):
        clock.reset()
        engine.step()
        for name in HOOKS:
            spent[name].append(clock.spent_s[name])
    parts = {name: fastest_ms(seconds) for name, seconds in spent.items()}
    return found | parts | {"hooks_ms": sum(parts.values())}


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
    parser.add_argument("--requests", type=int, nargs="+", default=[256])
    parser.add_argument("--context", type=int, nargs="+", default=[4096])
    parser.add_argument("--stretches", type=int, default=8)
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--scalar", action="store_true", help="leave the compiled operations out")
    args = parser.parse_args()
    for policy, context, num_requests in product(args.policies, args.context, args.requests):
        engine = start_engine(
            policy, num_requests, context, ops=ScalarOps() if args.scalar else None,
            enable_prefix_caching=args.prefix_caching,
        )  # fmt: skip
        row = measure(engine, args.stretches)
        parts = " ".join(f"{name} {row[name]:.3f}" for name in HOOKS if name in row)
        each = f", {1e3 * row['hooks_ms'] / row['events']:.1f} us each" if row["events"] else ""
        print(
            f"{policy:14s} {num_requests} x {context}: hooks {row['hooks_ms']:.3f} ms/step "
            f"({parts}); step {row['step_ms']:.3f} ms, {row['cpu_ms']:.3f} ms CPU; "
            f"{row['events']:.1f} evictions/step{each}",
            flush=True,
        )
        if args.profile:
            profile(engine)


if __name__ == "__main__":
    main()

"""What the hooks cost per step while nothing is evicted: vLLM's scheduler with and without them.

    python -m vtoken.testing.bench_hooks [--requests 8] [--steps 2000]

Dry engines: no model, so a step is vLLM's scheduling and nothing else. The engines take turns in
short stretches and each one's fastest stretch counts, because other work on the machine only ever
adds time.
"""

from __future__ import annotations

import argparse
import time

from vtoken.config import VTokenConfig
from vtoken.engine.dry import DryEngine, DrySettings

STRETCH_STEPS = 50
PROMPT_TOKENS = 64
CONFIGS = {
    "native": None,
    "indirection": VTokenConfig(mode="indirection"),
    "vtoken, budget not reached": VTokenConfig(policy="random", kv_budget_tokens=100_000),
    "vtoken, evicting": VTokenConfig(policy="random", kv_budget_tokens=128),
}


def open_engine(config: VTokenConfig | None, num_requests: int, num_steps: int) -> DryEngine:
    """An engine with all requests past their prefill."""
    length = PROMPT_TOKENS + num_steps + 64
    settings = DrySettings(
        num_kv_blocks=num_requests * (length // 16 + 2),
        max_model_len=length,
        max_num_seqs=num_requests,
        max_num_batched_tokens=max(8192, num_requests * PROMPT_TOKENS),
    )
    engine = DryEngine(settings, config)
    for i in range(num_requests):
        engine.add(f"r{i}", [5 + i] * PROMPT_TOKENS, num_steps + 32)
    for _ in range(8):
        engine.step()
    assert len(engine.scheduler.running) == num_requests
    return engine


def measure(num_requests: int, num_steps: int) -> dict[str, float]:
    """Seconds per step of each configuration, fastest stretch."""
    engines = {n: open_engine(c, num_requests, num_steps) for n, c in CONFIGS.items()}
    best = dict.fromkeys(engines, float("inf"))
    for _ in range(num_steps // STRETCH_STEPS):
        for name, engine in engines.items():
            start = time.perf_counter()
            for _ in range(STRETCH_STEPS):
                engine.step()
            best[name] = min(best[name], (time.perf_counter() - start) / STRETCH_STEPS)
    evicted = {n: e.counters.evicted_tokens for n, e in engines.items()}
    assert evicted["vtoken, evicting"] and not evicted["vtoken, budget not reached"]
    return best


def main() -> None:
    """Print a line per configuration: milliseconds a step, and what is above native."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=8, help="running requests")
    parser.add_argument("--steps", type=int, default=2000, help="decode steps per engine")
    args = parser.parse_args()
    best = measure(args.requests, args.steps)
    print(f"{args.requests} requests, one token each a step; ms per step, and above native")
    for name, seconds in best.items():
        over = f"+{1e3 * (seconds - best['native']):.3f}" if name != "native" else ""
        print(f"  {name:<28} {1e3 * seconds:7.3f}  {over}")


if __name__ == "__main__":
    main()

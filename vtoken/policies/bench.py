"""Time one eviction of each policy: `python -m vtoken.policies.bench [--live-tokens 4096]`.

What a step pays for each request that evicts: building the view and asking the policy. Aims:
h2o under 100 us, streaming-llm under 10 us, at 4,096 live tokens and 16 victims.
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np

from vtoken.policies.base import Policy, RequestView, ScoreKind
from vtoken.policies.registry import BUILT_IN, make_policy

AIMS_US = {"h2o": 100.0, "streaming-llm": 10.0}


def one_eviction(policy: Policy, live_tokens: int, victims: int) -> Callable[[], np.ndarray]:
    """A call that builds a view of a half-evicted request and evicts from it."""
    gen = np.random.default_rng(0)
    length = 2 * live_tokens
    inner = np.arange(policy.sink_tokens, length - live_tokens // 2, dtype=np.int32)
    needs_scores = policy.score_kind is not ScoreKind.NONE
    dead = gen.choice(inner, length - live_tokens, replace=False)
    live_ids = np.setdiff1d(np.arange(length, dtype=np.int32), dead)
    scores = gen.random(live_tokens, np.float32) if needs_scores else None
    token_ids = gen.integers(0, 32_000, length, np.int32) if policy.needs_token_ids else None

    def evict() -> np.ndarray:
        view = RequestView(
            live_ids=live_ids,
            num_computed_tokens=length,
            num_prompt_tokens=length // 2,
            budget_tokens=live_tokens - victims,
            num_evict=victims,
            scores=scores,
            token_ids=token_ids,
        )
        return policy.evict(view)

    assert len(evict()) == victims, policy
    return evict


def time_us(call: Callable[[], object], number: int = 500, repeats: int = 9) -> tuple[float, float]:
    """(fastest, median) time of a call, in microseconds, over `repeats` runs of `number` calls."""
    runs = [t / number * 1e6 for t in timeit.repeat(call, number=number, repeat=repeats)]
    return min(runs), float(np.median(runs))


def main() -> None:
    parser = argparse.ArgumentParser(description="Time one eviction of each policy.")
    parser.add_argument("--live-tokens", type=int, default=4096)
    parser.add_argument("--victims", type=int, default=16)
    args = parser.parse_args()
    print(f"one eviction of {args.victims} tokens at {args.live_tokens:,} live tokens, in us")
    print(f"{'policy':15s}{'fastest':>9s}{'median':>9s}{'aim':>9s}")
    for name in BUILT_IN:
        more: dict[str, Any] = {}
        if name == "fastgen":
            more = {"special_ids": (0, 1, 2), "punctuation_ids": tuple(range(3, 200))}
        policy = make_policy(name, block_size=16, **more)
        fastest, median = time_us(one_eviction(policy, args.live_tokens, args.victims))
        aim = f"{AIMS_US[name]:9.0f}" if name in AIMS_US else ""
        print(f"{name:15s}{fastest:9.1f}{median:9.1f}{aim}")


if __name__ == "__main__":
    main()

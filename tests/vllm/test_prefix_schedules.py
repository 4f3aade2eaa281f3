"""Random schedules over shared prefixes: what the cache holds afterwards is what a cold one would."""

from __future__ import annotations

import os

import pytest
from broken_code import break_code
from one_engine import engine_for
from prefix_schedules import Sizes, check_schedule

from vtoken.config import VTokenConfig

pytestmark = pytest.mark.vllm

# A prefix takes two chunks: what is computed after an eviction between them is not to be shared.
SETTINGS = {
    "enable_prefix_caching": True, "num_kv_blocks": 28, "max_model_len": 256,
    "max_num_batched_tokens": 48,
}  # fmt: skip


def tiny_engine(**changes):
    config = VTokenConfig(policy="h2o", kv_budget_tokens=80)
    return engine_for(config, **(SETTINGS | changes))


def run_schedules(engine, seeds, sizes=None) -> list:
    checks = [check_schedule(engine, seed, sizes) for seed in seeds]
    evicted = sum(c.evicted_tokens for c in checks)
    hits = sum(c.num_hit_tokens for c in checks)
    blocks = sum(c.num_blocks for c in checks)
    bits = sum(c.num_bit_checks for c in checks)
    print(
        f"\n{len(checks)} schedules: {evicted:,} tokens evicted, "
        f"{sum(c.moved_tokens for c in checks):,} moved, {sum(c.preemptions for c in checks)} "
        f"preemptions; {hits:,} tokens hit by {len(checks)} x 3 probes, {blocks:,} blocks equal to "
        f"a cold engine's within {max(c.max_kv_diff for c in checks):.1e}, {bits:,} looks at bits; "
        f"log-probabilities within {max(c.max_logprob_diff for c in checks):.1e}, "
        f"{sum(c.near_ties for c in checks)} near-ties"
    )
    assert evicted > 20 * len(checks) and hits > 32 * len(checks) and blocks >= 2 * len(checks)
    assert bits > 100 * len(checks)
    assert sum(c.near_ties for c in checks) <= len(checks) // 20
    return checks


def test_warm_equals_cold():
    run_schedules(tiny_engine(), range(4))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_warm_equals_cold_200_times():
    checks = run_schedules(tiny_engine(), range(1000, 1200))
    assert {c.config.policy for c in checks} >= {"h2o", "random", "streaming-llm", "fastgen"}
    assert sum(c.preemptions for c in checks) > 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_warm_equals_cold_on_smollm2():
    engine = tiny_engine(model="smollm2-135m")
    num = int(os.environ.get("VTOKEN_SMOLLM2_SCHEDULES", "20"))
    sizes = Sizes(num_requests=4, max_output_tokens=24, probe_output_tokens=6, vocab_size=40000)
    run_schedules(engine, range(2000, 2000 + num), sizes)


@pytest.mark.parametrize("name", ["blocks keep their hash", "evicted requests are cached"])
def test_a_broken_cache_is_found(name, monkeypatch):
    break_code(monkeypatch, name)
    engine = tiny_engine()
    with pytest.raises(AssertionError, match="was written|holds other K and V|VTokenConfig"):
        for seed in range(6):
            check_schedule(engine, seed)
    engine.abort(list(engine.scheduler.requests))
    while engine.has_unfinished():
        engine.step()

"""Prompts that fill the pool to its last slot: they start, decode and finish."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vtoken.config import VTokenConfig
from vtoken.engine.dry import DrySettings
from vtoken.testing.engines import CheckedDryEngine

N = 4
MAX_STEPS = 400


def engine(num_blocks: int, chunk: int = 16, caching: bool = False, **config) -> CheckedDryEngine:
    pool = DrySettings(
        num_kv_blocks=num_blocks, block_size=N, max_model_len=256, max_num_seqs=8,
        max_num_batched_tokens=chunk, enable_prefix_caching=caching, num_kv_heads=1, head_size=8,
    )  # fmt: skip
    config = {"policy": "h2o", "kv_budget_tokens": 16, "eviction_interval_tokens": 4, **config}
    return CheckedDryEngine(pool, VTokenConfig.from_mapping(config))


def finish(e: CheckedDryEngine) -> int:
    """Steps until all requests are done; fails where they never are."""
    for step in range(MAX_STEPS):
        if not e.has_unfinished():
            return step
        e.step()
    raise AssertionError(f"not finished after {MAX_STEPS} steps")


@pytest.mark.parametrize("evict_when", ["always", "pressure"])
@pytest.mark.parametrize("prompt_tokens", range(34, 42))
def test_a_prompt_that_fills_the_pool_begins_to_decode(prompt_tokens, evict_when):
    """Its first tokens come before the scores without which nothing can be evicted."""
    e = engine(10, chunk=64, evict_when=evict_when)
    e.add("a", [5 + i % 7 for i in range(prompt_tokens)], 24)
    finish(e)
    assert e.counters.preemptions == 0 and e.counters.evicted_tokens > 0


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_room_is_kept_for_tokens_that_come_and_for_no_others(max_tokens):
    e = engine(10, chunk=64, kv_budget_tokens=40)
    e.add("a", [5 + i % 7 for i in range(40 - max_tokens)], max_tokens)
    assert finish(e) <= max_tokens + 1
    assert e.counters.preemptions == 0


@pytest.mark.parametrize("policy", ["h2o", "streaming-llm"])
@pytest.mark.parametrize("evict_when", ["always", "pressure"])
@pytest.mark.parametrize("chunk", [8, 64])
def test_a_request_whose_idle_hits_fill_the_pool_starts(chunk, evict_when, policy):
    """Blocks that it hits and nobody holds count as free until it takes them."""
    e = engine(10, chunk=chunk, caching=True, evict_when=evict_when, policy=policy)
    prompt = [5 + i % 7 for i in range(40)]
    e.add("a", prompt[:37], 1)
    finish(e)
    cached = sum(b.block_hash is not None for b in e.block_pool.blocks)
    e.add("b", prompt + [9] * 8, 12)
    finish(e)
    if chunk == 64:
        assert cached == 9 and e.num_hits > 0


def test_two_prompts_that_fill_the_pool_together_both_finish():
    e = engine(12, chunk=32)
    for name in "abc":
        e.add(name, [5 + i % 7 for i in range(30)], 20)
    finish(e)

"""Modes that must generate alike: indirection as native, naive as vtoken."""

from __future__ import annotations

import pytest
from one_engine import _open, engine_for, live_sets, prompts, run, traces
from replay import assert_live_sets

from vtoken.config import VTokenConfig
from vtoken.engine import EngineSettings, Observer, open_engine

pytestmark = pytest.mark.vllm

# Stock attention takes blocks of 32: native must run in the same ones.
SMALL_POOL = {
    "model": "tiny-llama", "block_size": 32, "num_kv_blocks": 40, "max_model_len": 512,
    "max_num_batched_tokens": 128, "max_num_seqs": 12, "enable_prefix_caching": False,
}  # fmt: skip


def tokens(done):
    return [f.output_token_ids for f in done]


def run_observed(engine, requests, max_tokens):
    observer = Observer(engine)
    try:
        done = run(engine, requests, max_tokens)
    finally:
        stats = observer.stop()
    return done, stats.preemptions


def test_indirection_generates_what_native_does():
    """12 requests x 96 tokens in a pool that makes vLLM preempt."""
    requests = prompts(12, length=50)
    while _open:
        _open.pop()[1].close()
    with open_engine(EngineSettings(**SMALL_POOL)) as native:
        assert native.hooks is None and type(native.scheduler).__module__.startswith("vllm.")
        expected, native_preemptions = run_observed(native, requests, 96)
    config = VTokenConfig(mode="indirection")
    engine = engine_for(config, **SMALL_POOL)
    done, preemptions = run_observed(engine, requests, 96)
    assert tokens(done) == tokens(expected)
    assert all(len(f.output_token_ids) == 96 for f in done)
    assert preemptions == native_preemptions > 0
    assert [f.logprobs for f in done] == [f.logprobs for f in expected]  # bit by bit
    assert engine.counters.evicted_tokens == engine.counters.moved_tokens == 0


@pytest.mark.parametrize("policy", ["random", "streaming-llm"])
def test_naive_generates_what_vtoken_does(policy):
    """Same evictions, other memory: while nobody is preempted the tokens are the same."""
    requests = prompts(6, length=60)
    seen = {}
    for mode in ("vtoken", "naive"):
        config = VTokenConfig(mode=mode, policy=policy, kv_budget_tokens=48, trace=True)
        engine = engine_for(config)
        done, preemptions = run_observed(engine, requests, 48)
        assert preemptions == 0
        assert assert_live_sets(engine, config, done) > 10
        sets = {name: live_sets(entries) for name, entries in traces(engine).items()}
        seen[mode] = (tokens(done), sets, engine.counters.evicted_tokens)
        moved, reused = engine.counters.moved_tokens, engine.counters.reused_slots
        assert (moved == reused == 0) if mode == "naive" else moved > 0
    assert seen["vtoken"] == seen["naive"]


def test_a_threshold_changes_memory_and_nothing_else():
    requests = prompts(4, length=60)
    seen = []
    for threshold in (0.0, 0.6):
        config = VTokenConfig(
            policy="random", kv_budget_tokens=48, fragmentation_threshold=threshold, trace=True
        )
        engine = engine_for(config)
        done = run(engine, requests, 48)
        sets = {name: live_sets(entries) for name, entries in traces(engine).items()}
        seen.append((tokens(done), sets))
        moved = engine.counters.moved_tokens
    assert seen[0] == seen[1]
    assert moved == 0  # half of the slots are live: below the threshold all along

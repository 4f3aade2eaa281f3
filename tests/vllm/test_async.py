"""Asynchronous scheduling, forced on a CPU: two steps in flight, and nothing else changes."""

from __future__ import annotations

import pytest
from one_engine import engine_for, live_sets, prompts, run, traces
from replay import against_reference, assert_equals_reference, assert_live_sets

from vtoken.config import VTokenConfig
from vtoken.vllm_plugin.scheduler import VTokenAsyncScheduler, VTokenScheduler

pytestmark = pytest.mark.vllm

CONFIGS = {
    "random": VTokenConfig(policy="random", kv_budget_tokens=48, trace=True),
    "holes": VTokenConfig(
        policy="random", kv_budget_tokens=48, fragmentation_threshold=0.5, trace=True
    ),
    "naive": VTokenConfig(mode="naive", policy="random", kv_budget_tokens=48, trace=True),
    "streaming": VTokenConfig(
        policy="streaming-llm", eviction_ratio=0.5, eviction_interval_tokens=3, trace=True
    ),
    "h2o": VTokenConfig(policy="h2o", kv_budget_tokens=48, trace=True),
    "indirection": VTokenConfig(mode="indirection", trace=True),
}


@pytest.fixture(scope="module")
def runs(hf_model):
    """{(name, asynchronous): (tokens, live sets)}; every asynchronous run is checked on the way."""
    found = {}
    for asynchronous in (True, None):
        for name, config in CONFIGS.items():
            engine = engine_for(config, async_scheduling=asynchronous, max_num_batched_tokens=512)
            kind = VTokenAsyncScheduler if asynchronous else VTokenScheduler
            assert type(engine.scheduler) is kind
            assert engine.core.batch_queue_size == (2 if asynchronous else 1)
            assert engine.runner.use_async_scheduling == bool(asynchronous)
            done = run(engine, prompts(4, length=60), 48)
            if asynchronous:
                assert_equals_reference(engine, hf_model("tiny-llama"), done)
                if name in ("random", "streaming"):
                    assert assert_live_sets(engine, config, done) > 8
            sets = {n: live_sets(entries) for n, entries in traces(engine).items()}
            found[name, bool(asynchronous)] = ([f.output_token_ids for f in done], sets)
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_async_equals_sync(runs, name):
    tokens, sets = runs[name, True]
    expected, expected_sets = runs[name, False]
    assert tokens == expected
    assert sets == expected_sets
    assert any(len(s) < i for i, s in sets["r0"].items()) == (name != "indirection")


@pytest.mark.parametrize("policy", ["h2o", "streaming-llm", "random"])
def test_pressure_in_flight(policy, hf_model):
    """Six requests in a pool for less than four; each token is what the reference says it is."""
    config = VTokenConfig(
        policy=policy,
        kv_budget_tokens=48,
        evict_when="pressure",
        low_watermark_frac=0.0,
        trace=True,
    )
    engine = engine_for(config, async_scheduling=True, max_num_batched_tokens=512, num_kv_blocks=30)
    done = run(engine, prompts(6, length=50), 40)
    needed = sum(-(-(len(f.prompt_token_ids) + 40) // 16) for f in done)
    assert needed > 1.5 * 30, "no pressure"
    assert engine.counters.preemptions == 0 < engine.counters.evicted_tokens
    assert_equals_reference(engine, hf_model("tiny-llama"), done)


def test_aborts_and_preemptions_in_flight(hf_model):
    """Requests leave while a step of theirs is on its way; the others are not disturbed."""
    engine = engine_for(CONFIGS["random"], async_scheduling=True, max_num_batched_tokens=512)
    requests = prompts(6, length=50)
    for name, prompt in requests.items():
        engine.add(name, prompt, 40, logprobs=True)
    done, steps = [], 0
    while engine.has_unfinished():
        steps += 1
        if steps == 9:
            engine.abort(["r1", "r4"])
        if steps == 15:
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        done += [f for f in engine.step()[1] if f.finish_reason != "abort"]
        assert not engine.check_invariants()
    assert engine.check_idle() == []
    assert sorted(f.req_id.split("-")[0] for f in done) == ["r0", "r2", "r3", "r5"]
    assert engine.counters.preemptions == 4
    # A token sampled before the preemption is replayed under its own epoch, or dropped with it.
    result = against_reference(engine, hf_model("tiny-llama"), done)
    assert result.tokens >= 4 * 40 - 8 and not result.mismatches

"""Every policy, packed and with holes, against a Hugging Face model that sees the same tokens.

The engine's trace says which ids were live when each token was computed; the reference attends to
exactly those. A wrong move, a wrong mask, a wrong position shows as another log-probability.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from one_engine import engine_for, live_sets, prompts, run, traces

from vtoken.config import VTokenConfig
from vtoken.errors import ConfigError, UnsupportedError
from vtoken.policies.base import ScoreKind
from vtoken.policies.registry import BUILT_IN, policy_class
from vtoken.verify.reference import ReferenceResult, compare

pytestmark = pytest.mark.vllm

# Float32 sums in another order reach 3e-5 here; one stale KV entry gives 1e-2 and more.
PRECISE = 1e-4
SCORE_DELAY = 2  # steps until a score can be used: so many tokens more
IS_SCORED = {n: policy_class(n).score_kind is not ScoreKind.NONE for n in BUILT_IN}


def check_reference(model, done, engine) -> ReferenceResult:
    """Every output token and its log-probability against the masked reference."""
    result = ReferenceResult()
    entries = traces(engine)
    for i, f in enumerate(done):
        result.add(
            compare(
                model, f.prompt_token_ids, f.output_token_ids, f.logprobs, entries[f"r{i}"]
            )
        )  # fmt: skip
    assert result.tokens == sum(len(f.output_token_ids) for f in done)
    assert result.max_abs_logprob_diff < PRECISE, result
    assert all(gap < PRECISE for *_, gap in result.mismatches), result.mismatches
    return result


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("policy", list(BUILT_IN))
def test_output_is_that_of_the_masked_reference(policy, threshold, hf_model):
    config = VTokenConfig(
        policy=policy, eviction_ratio=0.5, fragmentation_threshold=threshold, trace=True,
        eviction_interval_tokens=6,
    )  # fmt: skip
    engine = engine_for(config)
    done = run(engine, prompts(2), max_tokens=28)
    check_reference(hf_model("tiny-llama"), done, engine)
    counters = engine.counters
    assert counters.evicted_tokens > 90 and counters.eviction_events >= 5
    if threshold == 0.0:
        for e in engine.trace:  # capacity: at most one block above what the live tokens fill
            live = len(e.live_ids) + e.num_new_tokens
            assert e.num_blocks <= math.ceil(live / 16) + 1, (e.req_id, e.step_seq)
    if threshold == 0.6 and policy == "random":
        assert counters.reused_slots > 20, "holes are left, so new tokens go into them"
    if threshold == 0.0 and policy == "random":
        assert counters.moved_tokens > 0


@pytest.mark.parametrize("policy", ["random", "h2o", "knorm"])
def test_deferred_compaction_waits_for_the_threshold(policy):
    """Fewer moves, more blocks: what a threshold trades."""
    moved, blocks = {}, {}
    for threshold in (0.0, 0.3, 0.6):
        config = VTokenConfig(
            policy=policy, eviction_ratio=0.5, fragmentation_threshold=threshold, trace=True,
            eviction_interval_tokens=4,
        )  # fmt: skip
        engine = engine_for(config)
        run(engine, prompts(2), max_tokens=30)
        moved[threshold] = engine.counters.moved_tokens
        blocks[threshold] = sum(e.num_blocks for e in engine.trace)
    assert moved[0.0] > moved[0.3] >= moved[0.6]
    assert blocks[0.0] < blocks[0.3] <= blocks[0.6]


@pytest.mark.parametrize("policy", list(BUILT_IN))
def test_live_tokens_stay_within_budget_and_interval(policy):
    budget, interval = 48, 16
    config = VTokenConfig(policy=policy, kv_budget_tokens=budget, trace=True)
    engine = engine_for(config)
    run(engine, prompts(1), max_tokens=50)
    slack = SCORE_DELAY if IS_SCORED[policy] else 0
    decodes = [e for e in engine.trace if e.num_new_tokens == 1 and e.first_id > 94]
    assert max(len(e.live_ids) + 1 for e in decodes) <= budget + interval + slack
    assert min(len(e.live_ids) for e in decodes) == budget


@pytest.mark.parametrize("policy, mode", [*((n, "vtoken") for n in BUILT_IN), ("h2o", "naive")])
def test_a_budget_one_above_the_floor(policy, mode, hf_model):
    floor = VTokenConfig(policy=policy).make_policy(16).floor_tokens
    config = VTokenConfig(
        mode=mode, policy=policy, kv_budget_tokens=floor + 1, eviction_interval_tokens=1,
        trace=True,
    )  # fmt: skip
    engine = engine_for(config)
    done = run(engine, prompts(1), max_tokens=12)
    check_reference(hf_model("tiny-llama"), done, engine)
    last = [e for e in engine.trace if e.num_new_tokens == 1][-1]
    assert len(last.live_ids) <= floor + 2 + (SCORE_DELAY if IS_SCORED[policy] else 0)
    if floor > 1:  # a budget of 0 is no budget
        with pytest.raises(ConfigError, match=f"at least {floor} for {policy}"):
            VTokenConfig(policy=policy, kv_budget_tokens=floor - 1).make_budget(16)


@pytest.mark.parametrize("policy", list(BUILT_IN))
def test_short_prompts_and_outputs(policy, hf_model):
    """Shorter than sinks, window, budget; one output token; a block's edge."""
    config = VTokenConfig(policy=policy, kv_budget_tokens=40, trace=True)
    engine = engine_for(config)
    gen = np.random.default_rng(5)
    requests = {
        f"r{i}": gen.integers(10, 500, n).tolist() for i, n in enumerate((1, 2, 15, 16, 39))
    }
    done = run(engine, requests, max_tokens=1)
    assert [len(f.output_token_ids) for f in done] == [1] * 5
    assert engine.counters.evicted_tokens == 0
    done = run(engine_for(config), requests, max_tokens=45)
    check_reference(hf_model("tiny-llama"), done, engine)
    # 84, 61 and 60 tokens in the end: evicted at 56, 72 and 56, 56.
    assert engine.counters.eviction_events == 4


def test_a_prompt_of_one_token_more_than_the_budget_is_not_evicted_before_its_interval():
    config = VTokenConfig(policy="h2o", kv_budget_tokens=40, trace=True)
    engine = engine_for(config)
    run(engine, {"r0": list(range(10, 51))}, max_tokens=15)
    assert engine.counters.evicted_tokens == 0
    run(engine, {"r1": list(range(10, 51))}, max_tokens=20)
    assert engine.counters.evicted_tokens == 16


@pytest.mark.parametrize("policy", list(BUILT_IN))
def test_naive_and_vtoken_alike_under_replay(policy, tmp_path, hf_model):
    """Identical live sets at every logical length, and identical tokens."""
    path = str(tmp_path / "decisions.jsonl")
    common = {
        "policy": policy, "eviction_ratio": 0.5, "eviction_interval_tokens": 6, "trace": True,
    }  # fmt: skip
    engine = engine_for(VTokenConfig(mode="naive", record_decisions=path, **common))
    naive = run(engine, prompts(2), max_tokens=28)
    recorded = {name: live_sets(e) for name, e in traces(engine).items()}
    assert engine.counters.moved_tokens == 0 and engine.counters.evicted_tokens > 90
    for threshold in (0.0, 0.5):
        config = VTokenConfig(replay_decisions=path, fragmentation_threshold=threshold, **common)
        engine = engine_for(config)
        again = run(engine, prompts(2), max_tokens=28)
        assert {name: live_sets(e) for name, e in traces(engine).items()} == recorded
        assert [f.output_token_ids for f in again] == [f.output_token_ids for f in naive]
        gap = max(
            abs(a - b)
            for f, g in zip(again, naive, strict=True)
            for a, b in zip(f.logprobs, g.logprobs, strict=True)
        )
        assert gap < PRECISE


def test_replay_with_other_chunks(tmp_path, hf_model):
    """Chunks are cut at the recorded lengths: h2o decided with chunks of 64, followed in 16s."""
    path = str(tmp_path / "decisions.jsonl")
    common = {"policy": "h2o", "kv_budget_tokens": 30, "trace": True}
    engine = engine_for(VTokenConfig(mode="naive", record_decisions=path, **common))
    first = run(engine, prompts(2), max_tokens=20)
    recorded = {name: live_sets(e) for name, e in traces(engine).items()}
    engine = engine_for(VTokenConfig(replay_decisions=path, **common))
    engine.hooks.chunk_limits.append(lambda request, at, n: min(n, 13))
    again = run(engine, prompts(2), max_tokens=20)
    assert {name: live_sets(e) for name, e in traces(engine).items()} == recorded
    assert [f.output_token_ids for f in again] == [f.output_token_ids for f in first]
    check_reference(hf_model("tiny-llama"), again, engine)


@pytest.mark.parametrize("policy", [n for n in BUILT_IN if IS_SCORED[n]])
def test_a_scored_policy_is_refused_where_no_scores_can_be_had(policy, monkeypatch):
    from vtoken.vllm_plugin.support import check_config_supported, check_gpu_supported

    engine = engine_for(VTokenConfig(policy="random"))
    config = VTokenConfig(policy=policy)
    check_config_supported(engine.vllm_config, config, 16)
    with monkeypatch.context() as patch:
        patch.setattr(engine.vllm_config.parallel_config, "tensor_parallel_size", 2)
        with pytest.raises(UnsupportedError, match=f"{policy}.*not summed.*streaming-llm"):
            check_config_supported(engine.vllm_config, config, 16)
        check_config_supported(engine.vllm_config, VTokenConfig(policy="random"), 16)
    with pytest.raises(UnsupportedError, match=f"{policy}.*need attention scores.*streaming-llm"):
        check_gpu_supported(config, 16)
    check_gpu_supported(VTokenConfig(policy="streaming-llm"), 16)

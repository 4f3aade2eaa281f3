"""Scores that begin again: tokens from the prefix cache, and requests that were preempted.

Both start at zero and count this request's own queries of this life, which is what Hugging Face's
attention gives when only the rows that the engine computed are summed.
"""

from __future__ import annotations

import pytest
from hf_scores import HFScores
from one_engine import decisions, engine_for, prompts, run, traces
from test_scores import check_decisions, queries

from vtoken.config import VTokenConfig
from vtoken.policies.base import ScoreKind, score_window
from vtoken.policies.registry import policy_class
from vtoken.vllm_plugin import plugin
from vtoken.vllm_plugin.vocabulary import with_vocabulary

pytestmark = pytest.mark.vllm

SETTINGS = {"enable_prefix_caching": True, "num_kv_blocks": 22}


def check(engine, model, config, done, names) -> int:
    """Every decision of every life of these requests, recomputed; returns how many."""
    kind = policy_class(config.policy).score_kind
    count = 0
    for f, name in zip(done, names, strict=True):
        tokens = [*f.prompt_token_ids, *f.output_token_ids]
        entries = traces(engine)[name]
        for life in sorted({e.num_preemptions for e in entries}):
            part = [e for e in entries if e.num_preemptions == life]
            hf = HFScores(model, tokens, part, kind, queries(config))
            found, ties = check_decisions(engine, config, [f], [part], [hf])
            assert not ties, ties
            count += found
    return count


@pytest.mark.parametrize("policy", ["h2o", "knorm"])
def test_tokens_from_the_prefix_cache(policy, hf_model):
    """A request takes its prefix from earlier ones; what they attended to does not count."""
    config = VTokenConfig(policy=policy, eviction_ratio=0.4, eviction_interval_tokens=6, trace=True)
    engine = engine_for(config, **SETTINGS)
    prompt = prompts(1, length=95)["r0"]
    run(engine, {"first": prompt}, max_tokens=1)
    run(engine, {"second": prompt, "third": [*prompt, 5]}, max_tokens=20)
    for name in ("second", "third"):
        assert traces(engine)[name][0].first_id >= 64, "no hit: nothing is tested"
        for e in traces(engine)[name]:
            assert set(range(64)) <= set(e.live_ids.tolist()), "both hold it: nobody evicts it"
    alone = run(engine, {"fourth": prompt}, max_tokens=48)
    assert traces(engine)["fourth"][0].first_id >= 64
    assert len(decisions(traces(engine)["fourth"], 200)) >= 3
    assert check(engine, hf_model("tiny-llama"), config, alone, ["fourth"]) >= 3


def test_preempted_requests_count_anew(hf_model):
    config = VTokenConfig(
        mode="naive", policy="h2o", eviction_ratio=0.2, eviction_interval_tokens=6, trace=True
    )
    engine = engine_for(config, **SETTINGS)
    requests = prompts(3, length=80)
    done = run(engine, requests, max_tokens=50)
    assert engine.counters.preemptions > 0
    assert check(engine, hf_model("tiny-llama"), config, done, list(requests)) >= 6


def test_reconfiguring_forgets_cached_prefixes():
    """Their tokens have no scores under the new policy."""
    engine = engine_for(VTokenConfig(policy="random", trace=True), **SETTINGS)
    prompt = prompts(1)["r0"]
    run(engine, {"a": prompt}, max_tokens=1)
    engine = engine_for(VTokenConfig(policy="knorm", trace=True), **SETTINGS)
    run(engine, {"b": prompt}, max_tokens=1)
    assert engine.trace[0].first_id == 0


def test_fastgen_knows_the_models_vocabulary(monkeypatch):
    engine = engine_for(VTokenConfig(policy="fastgen"), **SETTINGS)
    policy = engine.hooks.budgets.common.policy
    tokenizer = engine.tokenizer
    assert set(tokenizer.all_special_ids) == set(policy.special_ids) != set()
    for text in (".", ",", "?"):
        (token_id,) = tokenizer.encode(text, add_special_tokens=False)
        assert token_id in policy.punctuation_ids
    (word,) = tokenizer.encode("the", add_special_tokens=False)
    assert word not in policy.punctuation_ids
    assert engine.config.policy_args == {}, "what the user set is what is reported"

    given = VTokenConfig(policy="fastgen", policy_args={"special_ids": [7]})
    full = with_vocabulary(given, engine.vllm_config.model_config)
    assert full.policy_args["special_ids"] == [7] and full.policy_args["punctuation_ids"]
    plain = VTokenConfig(policy="h2o")
    assert with_vocabulary(plain, engine.vllm_config.model_config) is plain

    # Where a server or LLM() finishes its config: all processes get the ids with it.
    mine = {"policy": "fastgen"}
    monkeypatch.setattr(engine.vllm_config, "additional_config", {"vtoken": mine})
    plugin.finish_config(engine.vllm_config)
    sent = engine.vllm_config.additional_config["vtoken"]["policy_args"]
    assert sent["special_ids"] == list(policy.special_ids) and mine == {"policy": "fastgen"}


def in_force(engine) -> dict[str, object]:
    step = engine.hooks
    return score_window(step.budgets.common.policy.score_kind, step.config.score_queries)


def test_score_kinds_are_what_the_engine_says():
    engine = engine_for(VTokenConfig(policy="snapkv", score_queries=8), **SETTINGS)
    assert in_force(engine) == {"score_kind": "window", "prompt_queries": 8}
    assert engine.runner.vtoken_attention.kind is ScoreKind.WINDOW
    engine = engine_for(VTokenConfig(policy="streaming-llm"), **SETTINGS)
    assert in_force(engine) == {"score_kind": "none", "prompt_queries": 0}

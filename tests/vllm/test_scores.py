"""Scores of the real engine, and what policies make of them, against Hugging Face's attention.

Live sets come from the engine's trace; scores and victims are computed anew from Hugging Face's
own attention weights and from policies written a second time (`policy_references`).
"""

from __future__ import annotations

from zlib import crc32

import numpy as np
import pytest
from hf_scores import HFScores
from one_engine import decisions, engine_for, prompts, run, traces
from policy_references import reference_victims

from vtoken.config import VTokenConfig
from vtoken.policies.base import ScoreKind
from vtoken.policies.registry import BUILT_IN, policy_class
from vtoken.recording.decisions import prompt_hash
from vtoken.recording.score_files import ScoreTrace
from vtoken.workloads.texts import TextCorpus, shipped_texts

pytestmark = pytest.mark.vllm

SCORED = [n for n in BUILT_IN if policy_class(n).score_kind is not ScoreKind.NONE]
KINDS = {policy_class(n).score_kind: n for n in SCORED}
CLOSE = 1e-5  # two scores that differ by less, relatively, may be ranked either way


def queries(config: VTokenConfig) -> int:
    return -1 if config.score_queries == "all" else config.score_queries


def references(model, config, done, entries):
    """HFScores of every request."""
    kind = policy_class(config.policy).score_kind
    return [
        HFScores(
            model, [*f.prompt_token_ids, *f.output_token_ids], e, kind, queries(config)
        )
        for f, e in zip(done, entries, strict=True)
    ]  # fmt: skip


def check_decisions(engine, config, done, entries, scores) -> tuple[int, list[str]]:
    """Hold every eviction of a run against the reference.

    Returns:
        How many evictions there were, and a line for each that differs by a near tie.
    """
    budget = engine.hooks.budgets.common
    count, ties = 0, []
    parameters = {
        k: tuple(v) for k, v in engine.hooks.config.policy_args.items() if k.endswith("_ids")
    }
    for f, trace, hf in zip(done, entries, scores, strict=True):
        tokens = [*f.prompt_token_ids, *f.output_token_ids]
        for step, length, victims, live in decisions(trace, len(tokens)):
            known = hf.by_step[step - 2]
            view = [float(known[i]) if i < len(known) else np.nan for i in live]
            expected = reference_victims(
                config.policy, live=live, L=length, prompt_len=len(f.prompt_token_ids),
                budget=int(budget.tokens(length)), scores=view, token_ids=tokens,
                seed=config.seed, prompt_hash=crc32(np.array(f.prompt_token_ids, np.int32).tobytes()),
                **parameters,
            )  # fmt: skip
            count += 1
            assert len(victims) == len(expected), (length, victims ^ expected)
            for wrong, right in zip(
                sorted(victims - expected), sorted(expected - victims), strict=False
            ):
                gap = abs(known[wrong] - known[right]) / max(known[wrong], known[right])
                line = f"{config.policy} at {length}: {wrong} for {right}, gap {gap:.1e}"
                assert gap < CLOSE, line
                ties.append(line)
    return count, ties


@pytest.mark.parametrize("score_queries", ["all", 32])
@pytest.mark.parametrize("policy", SCORED)
def test_victims_are_those_of_hugging_face_attention(policy, score_queries, hf_model):
    """Two prompts in chunks, then decode; every eviction is recomputed."""
    config = VTokenConfig(
        policy=policy, eviction_ratio=0.6, score_queries=score_queries, trace=True,
        eviction_interval_tokens=5,
    )  # fmt: skip
    engine = engine_for(config)
    done = run(engine, prompts(2), max_tokens=28)
    entries = [traces(engine)[n] for n in ("r0", "r1")]
    scores = references(hf_model("tiny-llama"), config, done, entries)
    count, ties = check_decisions(engine, config, done, entries, scores)
    assert count >= 6
    assert not ties, ties


@pytest.mark.parametrize("score_queries", ["all", 7])
@pytest.mark.parametrize("kind", list(KINDS))
def test_reported_scores_are_those_of_hugging_face(kind, score_queries, hf_model, tmp_path):
    """Every score that ever reached a policy, not only the order of a few."""
    path = str(tmp_path / "scores.jsonl")
    config = VTokenConfig(
        policy=KINDS[kind], kv_budget_tokens=50, score_queries=score_queries, trace=True,
        record_scores=path, eviction_interval_tokens=6,
    )  # fmt: skip
    engine = engine_for(config)
    done = run(engine, prompts(2, seed=1), max_tokens=30)
    entries = [traces(engine)[n] for n in ("r0", "r1")]
    trace = ScoreTrace(path, kind)
    compared = 0
    for f, steps, hf in zip(
        done, entries, references(hf_model("tiny-llama"), config, done, entries), strict=True
    ):
        prompt = prompt_hash(f.prompt_token_ids)
        ends = {e.first_id + e.num_new_tokens: e.step_seq for e in steps}
        for length in trace.lengths(prompt):
            want = hf.by_step[ends[length]]
            ids = np.flatnonzero(~np.isnan(want)).astype(np.int32)
            got = trace.scores(prompt, length, ids)
            if kind is ScoreKind.COUNT_ABOVE_THRESHOLD:
                assert hf.smallest_margin > 1e-6, "choose other prompts: a share equals the bar"
            np.testing.assert_allclose(got, want[ids], rtol=2e-5, atol=1e-7)
            compared += len(ids)
    assert compared > 500
    assert engine.hooks.budgets.common.policy.score_kind is kind


@pytest.mark.parametrize("score_queries", ["all", 32])
def test_h2o_on_smollm2(score_queries, hf_model, record_property):
    """The paper's policy on a trained model: 3 prompts, 96 tokens each."""
    config = VTokenConfig(
        policy="h2o", eviction_ratio=0.5, score_queries=score_queries, trace=True,
        eviction_interval_tokens=8,
    )  # fmt: skip
    engine = engine_for(config, model="smollm2-135m", num_kv_blocks=100, max_num_batched_tokens=96)
    corpus = TextCorpus(engine.tokenizer, shipped_texts())
    texts = {f"r{i}": corpus.cut(7 * i, 60 + 40 * i) for i in range(3)}
    done = run(engine, texts, max_tokens=96)
    entries = [traces(engine)[n] for n in texts]
    scores = references(hf_model("smollm2-135m"), config, done, entries)
    count, ties = check_decisions(engine, config, done, entries, scores)
    record_property("near_ties", ties)
    print(f"\nscore_queries={score_queries}: {count} evictions, near ties: {ties}")
    assert count >= 15

"""Hit rates on questions that share contexts: with evictions and `copy`, as without vToken."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vtoken.config import VTokenConfig
from vtoken.engine import EngineSettings, open_engine
from vtoken.engine.dry import DryEngine, DrySettings
from vtoken.experiments.bench.measure import measure
from vtoken.experiments.planning.dry_engines import random_scores
from vtoken.workloads import load_workload

pytestmark = pytest.mark.vllm

CONCURRENCY, OUTPUT_LEN = 8, 24


@pytest.fixture(scope="module")
def questions(test_data, model_path):
    """Ten questions on each of seven contexts of 4,000 to 6,000 tokens, one after the other."""
    from transformers import AutoTokenizer

    path = test_data / "longctx" / "squad_shared_context_qa.jsonl"
    if not path.is_file():
        pytest.skip(f"no {path}")
    tokenizer = AutoTokenizer.from_pretrained(str(model_path("smollm2-135m")))
    return load_workload(str(path), tokenizer, output_len=OUTPUT_LEN)


def hits(questions, config, concurrency: int) -> dict:
    longest = max(r.prompt_len + r.output_len for r in questions)
    settings = DrySettings(
        num_kv_blocks=3200, max_model_len=longest + 1, enable_prefix_caching=True,
        max_num_seqs=CONCURRENCY,
    )  # fmt: skip
    engine = DryEngine(settings, config, score_source=random_scores)
    values = measure(engine, questions, max_concurrency=concurrency, timed=False).values
    assert values["completed"] == len(questions) == 70
    return values


@pytest.mark.parametrize(
    ("policy", "concurrency"), [("random", 8), ("h2o", 8), ("streaming-llm", 8), ("random", 1)]
)
def test_copy_hits_as_often_as_native(questions, policy, concurrency):
    """One at a time, all that is hit are blocks of finished requests."""
    native = hits(questions, None, concurrency)
    assert native["prefix_hit_frac"] > 0.8
    ours = hits(questions, VTokenConfig(policy=policy, shared_prefix="copy"), concurrency)
    assert ours["vtoken_evicted_tokens"] > 500 and ours["vtoken_preemptions"] == 0
    print(f"\nhits: native {native['prefix_hit_frac']:.4f}, {policy} {ours['prefix_hit_frac']:.4f}")
    assert abs(ours["prefix_hit_frac"] / native["prefix_hit_frac"] - 1) <= 0.02


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_measured_sample(questions):
    """Six questions on one context on SmolLM2, one at a time, each evicting what it copied out."""
    sample = [
        r for r in questions if r.metadata["context_id"] == questions[0].metadata["context_id"]
    ]
    sample = sample[:6]
    longest = max(r.prompt_len + r.output_len for r in sample)
    config = VTokenConfig(policy="random", shared_prefix="copy")
    settings = EngineSettings(
        model="smollm2-135m", block_size=16, num_kv_blocks=1600, max_model_len=longest + 1,
        enable_prefix_caching=True, max_num_seqs=2, max_num_batched_tokens=8192,
    )  # fmt: skip
    with open_engine(settings, config) as engine:
        measured = measure(engine, sample, max_concurrency=1).values
        engine.reconfigure(VTokenConfig(mode="indirection"))
        engine.reset_prefix_cache()
        unreclaimed = measure(engine, sample, max_concurrency=1).values
    print(f"\nmeasured: {measured['prefix_hit_frac']:.4f}, {unreclaimed['prefix_hit_frac']:.4f}")
    assert measured["vtoken_evicted_tokens"] > 5_000
    assert abs(measured["prefix_hit_frac"] / unreclaimed["prefix_hit_frac"] - 1) <= 0.02

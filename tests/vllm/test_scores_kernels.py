"""The torch kernels and the C++ ones give the same run: tokens, decisions, live sets."""

from __future__ import annotations

import pytest
from one_engine import engine_for, live_sets, prompts, run, traces
from test_deferred import check_reference

from vtoken.config import VTokenConfig
from vtoken.kernels import available, load

pytestmark = pytest.mark.vllm

CASES = [("h2o", 0.0), ("h2o", 0.5), ("scissorhands", 0.3), ("snapkv", 0.0), ("tova", 0.5),
         ("knorm", 0.3), ("random", 0.5)]  # fmt: skip


@pytest.mark.parametrize("kernels", ["cpp", "torch"])
@pytest.mark.parametrize("policy, threshold", CASES)
def test_each_is_that_of_the_masked_reference(policy, threshold, kernels, hf_model):
    _need(kernels)
    engine = engine_for(_config(policy, threshold), kernels=kernels)
    assert engine.runner.vtoken_attention.kernels.name == kernels
    check_reference(hf_model("tiny-llama"), run(engine, prompts(2), max_tokens=20), engine)


@pytest.mark.parametrize("policy, threshold", CASES)
def test_both_decide_alike(policy, threshold):
    _need("cpp")
    sets, tokens = [], []
    for kernels in ("cpp", "torch"):
        engine = engine_for(_config(policy, threshold), kernels=kernels)
        done = run(engine, prompts(2), max_tokens=20)
        sets.append({name: live_sets(e) for name, e in traces(engine).items()})
        tokens.append([f.output_token_ids for f in done])
    assert sets[0] == sets[1] and tokens[0] == tokens[1]


@pytest.mark.parametrize("policy, threshold", [("h2o", 0.5), ("random", 0.5)])
def test_prompts_run_in_one_pass_and_alike_where_they_take_two(policy, threshold, monkeypatch):
    """Where vLLM has matrix tiles prompts stay with its kernel, and scores are a pass of ours."""
    _need("cpp")
    kernels = load("cpp")
    passes, call = [], kernels.attention

    def watched(plan, query, kv, out, **given):
        passes.append(out is not None)
        return call(plan, query, kv, out, **given)

    monkeypatch.setattr(kernels, "attention", watched)
    sets, tokens = [], []
    for prefill_kernel in ("ours", "stock"):
        engine = engine_for(_config(policy, threshold), kernels="cpp")
        attention = engine.runner.vtoken_attention
        assert attention.prefill_kernel == "ours"
        attention.prefill_kernel = prefill_kernel
        passes.clear()
        done = run(engine, prompts(2), max_tokens=20)
        # Scores alone: only of prompts that vLLM's kernel ran.
        assert (False in passes) == (prefill_kernel == "stock" and policy == "h2o")
        sets.append({name: live_sets(e) for name, e in traces(engine).items()})
        tokens.append([f.output_token_ids for f in done])
    assert sets[0] == sets[1] and tokens[0] == tokens[1]


def test_the_environment_chooses(monkeypatch):
    monkeypatch.setenv("VTOKEN_KERNELS", "torch")
    assert load().name == "torch"


def _need(kernels: str) -> None:
    if kernels == "cpp" and not available()[0]:
        pytest.skip(f"no C++ kernels here: {available()[1]}")


def _config(policy: str, threshold: float) -> VTokenConfig:
    return VTokenConfig(
        policy=policy, eviction_ratio=0.5, fragmentation_threshold=threshold, trace=True
    )

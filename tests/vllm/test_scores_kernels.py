"""The torch kernels and the C++ ones give the same run: tokens, decisions, live sets."""

from __future__ import annotations

import json
import os
import subprocess
import sys

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


# Hidden from us alone: torch, which vLLM lets compile some functions, cannot do without one.
WITHOUT_A_COMPILER = """
import json
from vtoken.kernels import build
build.find_compiler = lambda: None
from one_engine import engine_for, live_sets, prompts, run, traces
from test_scores_kernels import _config
for policy, threshold in {cases}:
    engine = engine_for(_config(policy, threshold))
    attention = engine.runner.vtoken_attention
    assert (attention.kernels.name, engine.hooks.evictor.ops.name) == ("torch", "scalar")
    done = run(engine, prompts(2), max_tokens=20)
    sets = {{name: list(live_sets(e).values()) for name, e in traces(engine).items()}}
    print("found", json.dumps([[f.output_token_ids for f in done], sets]))
"""


def test_without_a_compiler_an_engine_gives_the_same(tmp_path):
    """A process that finds none: stock attention, torch scores, tables in plain Python, one line of log."""
    _need("cpp")
    cases = [("h2o", 0.0), ("random", 0.5)]
    environment = os.environ | {
        "VTOKEN_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_COMPILER.format(cases=cases)],
        check=False, capture_output=True, text=True, env=environment, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    lines = [x.split(" ", 1) for x in ended.stdout.splitlines()]
    found = [json.loads(line[1]) for line in lines if line[0] == "found"]
    assert ended.stderr.count("no C++ compiler found") == 1
    for (policy, threshold), (tokens, sets) in zip(cases, found, strict=True):
        engine = engine_for(_config(policy, threshold), kernels="cpp")
        done = run(engine, prompts(2), max_tokens=20)
        assert tokens == [f.output_token_ids for f in done]
        ours = {name: list(live_sets(e).values()) for name, e in traces(engine).items()}
        assert sets == json.loads(json.dumps(ours))


@pytest.mark.parametrize("policy, threshold", [("h2o", 0.0), ("snapkv", 0.5), ("random", 0.5)])
def test_blocks_of_32_are_that_of_the_masked_reference(policy, threshold, hf_model):
    engine = engine_for(_config(policy, threshold), block_size=32, num_kv_blocks=80)
    check_reference(hf_model("tiny-llama"), run(engine, prompts(2), max_tokens=40), engine)
    assert engine.counters.evicted_tokens > 0


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

"""The dry engine and the real one agree step for step, so that one may plan for the other."""

from __future__ import annotations

import pytest

from vtoken.config import VTokenConfig
from vtoken.engine import EngineSettings, run_requests
from vtoken.experiments.capacity.engines import DryEngines, EngineLimits, RealEngines
from vtoken.experiments.capacity.prompts import make_prompts
from vtoken.experiments.capacity.scan import CapacityScan
from vtoken.experiments.capacity.scan_options import ScanSettings
from vtoken.experiments.planning.series import Series

pytestmark = pytest.mark.vllm

BLOCKS, BLOCK_SIZE, PROMPT_LEN, OUTPUT_LEN = 33, 32, 48, 112
SETTINGS = ScanSettings(
    engine=EngineSettings(model="tiny-llama", num_kv_blocks=BLOCKS, block_size=BLOCK_SIZE),
    prompt_len=PROMPT_LEN,
    output_len=OUTPUT_LEN,
)
LIMITS = EngineLimits(
    num_kv_blocks=BLOCKS, block_size=BLOCK_SIZE, max_model_len=PROMPT_LEN + OUTPUT_LEN + 1,
    max_batched_tokens=128,  # prompts are chunked
)  # fmt: skip


@pytest.fixture(scope="module")
def prompts(model_path):
    def tokenizer():
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model_path("tiny-llama"))

    return make_prompts(SETTINGS, tokenizer, vocab_size=0)


@pytest.fixture(scope="module")
def engines(model_path):
    model_path("tiny-llama")
    config = VTokenConfig(policy="random", eviction_ratio=0.5)
    real = RealEngines(LIMITS, config, SETTINGS.engine, max_num_seqs=16)
    yield real, DryEngines(LIMITS, config, SETTINGS.engine, fast_forward=False)
    real.close()


def steps_of(engine, requests) -> tuple[list, dict]:
    """Run to the end; what the scheduler did in every step, and what was counted.

    A step: (running requests, blocks in use, scheduled tokens, preemptions so far).
    """
    steps, scheduler = [], engine.scheduler
    schedule, num_preempted = scheduler.schedule, 0

    def watched(*args, **kwargs):
        nonlocal num_preempted
        output = schedule(*args, **kwargs)
        num_preempted += len(output.preempted_req_ids or ())
        if output.total_num_scheduled_tokens:
            tokens = sorted(output.num_scheduled_tokens.values())
            steps.append((len(scheduler.running), engine.num_used_blocks(), tokens, num_preempted))
        return output

    scheduler.schedule = watched
    engine.reset_prefix_cache()
    try:
        run = run_requests(engine, requests)
    finally:
        scheduler.schedule = schedule
    assert len(run.finished) == len(requests) and not engine.check_idle()
    counters = {k: v for k, v in run.counters.as_dict().items() if not k.endswith("_s")}
    return steps, counters


@pytest.mark.parametrize(
    ("mode", "concurrency"),
    [("native", 6), ("native", 8), ("naive", 8), ("vtoken", 8), ("vtoken", 10)],
)
def test_dry_and_real_agree_step_for_step(engines, prompts, mode, concurrency):
    real, dry = engines
    line = Series(mode, "" if mode == "native" else "random")
    requests = prompts(concurrency, 0)
    expected, expected_counts = steps_of(dry.get(line, 16), requests)
    found, counts = steps_of(real.get(line, concurrency), requests)
    for number, (a, b) in enumerate(zip(expected, found, strict=False)):
        assert a == b, f"step {number}"
    assert len(expected) == len(found)
    assert counts == expected_counts
    # The comparison must have had something to compare.
    preempted = found[-1][3]
    assert (preempted > 0) == (mode in ("native", "naive") and concurrency == 8)
    assert (counts["evicted_tokens"] > 0) == (mode in ("naive", "vtoken"))
    assert max(tokens[-1] for _, _, tokens, _ in found) < PROMPT_LEN * concurrency


def test_a_scan_of_a_real_engine_finds_what_the_dry_run_said(model_path):
    model_path("tiny-llama")
    result = CapacityScan(SETTINGS).run()
    rows = {row["mode"]: row for row in result.main.frontier}
    found = {mode: row["max_concurrency"] for mode, row in rows.items()}
    assert not result.notes, "the engine and its dry run differ"
    # 160 tokens are 5 blocks, half of them plus a block of growth 4 at most: 33 // 5 and 33 // 4.
    assert found == {"native": 6, "naive": 6, "vtoken": 8}
    for run in result.main.runs:
        point = run.point
        assert point.feasible == (point.concurrency == found[point.mode])
        if point.feasible:
            assert point.output_throughput > 0 and point.metrics["mean_ttft_ms"] > 0
            assert point.metrics["total_output_tokens"] == OUTPUT_LEN * point.concurrency
    by_mode = {run.point.mode: run.point for run in result.main.runs if run.point.feasible}
    held = {m: p.vtoken_retained_blocks_per_request for m, p in by_mode.items()}
    assert held["vtoken"] < held["naive"] <= held["native"]
    # vToken packs: it holds what is ideal. Naive keeps blocks that are no longer full.
    assert held["vtoken"] == pytest.approx(by_mode["vtoken"].ideal_blocks_per_request, abs=0.05)
    assert held["naive"] > 1.2 * by_mode["naive"].ideal_blocks_per_request

"""Planning on devices that are not here: scans in modelled pools, needs, the published table."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml

pytest.importorskip("vllm")

from vtoken.config import VTokenConfig
from vtoken.engine.settings import EngineSettings
from vtoken.errors import ConfigError, UnsupportedError
from vtoken.experiments.capacity.planned_scan import (
    PlannedScan,
    boundary_rows,
    case_rows,
    check_score_free,
    need_sentence,
    needs_for,
    plan_for,
)
from vtoken.experiments.capacity.scan_options import ScanSettings
from vtoken.experiments.planning.cost_model import CostProfile
from vtoken.experiments.planning.modelled_clock import StepCost
from vtoken.experiments.planning.series import Series

LLAMA = "meta-llama/Llama-3.1-8B"


def settings(policy="random", *, model=LLAMA, prompt=64, output=192, **engine):
    return ScanSettings(
        config=VTokenConfig(policy=policy, eviction_ratio=0.5),
        engine=EngineSettings(model=model, **engine),
        policies=(policy,),
        prompt_len=prompt,
        output_len=output,
        dry_run=True,
    )


def cost_of(plan):
    return StepCost(profile=CostProfile.from_device(plan.device), model=plan.model)


def scan_plan(plan, asked, cost=None):
    scan = PlannedScan(asked, plan, cost)
    scan.run()
    return scan


def is_enough(asked, plan, need) -> bool:
    """Whether a dry run in exactly that pool is feasible."""
    pool = replace(plan, num_usable_blocks=need.num_blocks, gpu_mem_util=None)
    one = replace(
        asked, concurrency=str(need.num_requests), modes=(need.mode,),
        policies=(need.policy or "random",),
    )  # fmt: skip
    return scan_plan(pool, one).result.is_feasible


def frontier(scan):
    return {row["mode"]: row["max_concurrency"] for row in scan.result.main.frontier}


def test_scan_finds_what_arithmetic_says_and_models_throughput():
    # 256 tokens are 16 blocks in full; packed at half retention 8 and the eviction interval.
    asked = settings(num_kv_blocks=52)
    plan = plan_for(asked, "h100-80g")
    scan = scan_plan(plan, asked, cost_of(plan))
    found = frontier(scan)
    assert found["native"] == 3 and found["vtoken"] >= 5 > found["native"]
    for run in scan.result.main.runs:
        point = run.point
        assert point.modelled and (point.output_throughput is not None) == point.feasible
    native = next(
        r.point for r in scan.result.main.runs if r.point.mode == "native" and r.point.feasible
    )
    # 192 decode steps of C requests, give or take prefill and growing contexts.
    step_s = cost_of(plan).decode_s(native.concurrency, 0)
    assert native.output_throughput == pytest.approx(native.concurrency / step_s, rel=0.1)


def test_needs_are_enough_and_one_request_more_is_not():
    asked = settings()
    plan = plan_for(replace(asked, engine=replace(asked.engine, num_kv_blocks=1000)), "h100-80g")
    needs = needs_for(asked, plan, num_requests=4, context_tokens=256)
    by_mode = {need.mode: need for need in needs}
    assert by_mode["native"].blocks_per_request == 16 == by_mode["naive"].blocks_per_request
    assert by_mode["vtoken"].blocks_per_request < 12
    assert by_mode["vtoken"].gpu_mem_util < by_mode["native"].gpu_mem_util <= 1
    assert all(is_enough(asked, plan, need) for need in needs)
    assert not is_enough(asked, plan, replace(needs[0], num_blocks=needs[0].num_blocks - 1))
    sentence = need_sentence(needs, plan)
    assert "4 requests of 256 tokens" in sentence and "modelled" in sentence


def test_needs_round_trip_through_the_memory_model():
    asked = settings(gpu_memory_utilization=0.5)
    plan = plan_for(asked, "h100-80g")
    for need in needs_for(asked, plan, num_requests=16, context_tokens=16320):
        engine = replace(asked.engine, gpu_memory_utilization=need.gpu_mem_util)
        assert (
            plan_for(replace(asked, engine=engine), "h100-80g").num_usable_blocks >= need.num_blocks
        )


def test_bad_targets_are_refused():
    asked = settings()
    plan = plan_for(asked, "h100-80g")
    for num, tokens, option in ((0, 100, "--target-concurrency"), (4, 10**7, "--target-context")):
        with pytest.raises(ConfigError) as info:
            needs_for(asked, plan, num_requests=num, context_tokens=tokens)
        assert info.value.option == option


def test_scored_policies_are_refused_with_what_is_possible():
    with pytest.raises(ConfigError, match="random") as info:
        check_score_free(settings("h2o"))
    assert info.value.option == "--policy" and "score" in info.value.allowed
    check_score_free(replace(settings("h2o"), modes=("native",)))


def test_unknown_device_heavy_weights_and_foreign_configs_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="h100-80g"):
        plan_for(settings(), "h100-8og")
    with pytest.raises(ConfigError, match="GiB of weights"):
        plan_for(settings(model="meta-llama/Llama-3.1-70B"), "l4")
    config = {"architectures": ["MambaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError):
        plan_for(settings(model=str(tmp_path)), "h100-80g")


def test_published_table_has_cases_that_agree_with_the_paper():
    from pathlib import Path

    file = Path(__file__).parents[2] / "examples" / "experiments" / "fig9_capacity.yaml"
    cases = yaml.safe_load(file.read_text())["cases"]
    ideal = {}
    for case in cases:
        engine = {"num_kv_blocks": case.get("num_kv_blocks")}
        if "gpu_mem_util" in case:
            engine["gpu_memory_utilization"] = case["gpu_mem_util"]
        asked = settings(
            model=case["model"], prompt=case["prompt_len"], output=case["output_len"], **engine
        )
        plan = plan_for(asked, case["device"])
        found = [{"mode": m, "policy": "random"} for m in ("native", "naive", "vtoken")]
        rows = case_rows(case, asked, plan, found)
        ideal[case["name"]] = [row["ideal"] for row in rows]
        assert rows[0]["paper"] == rows[0]["ideal"], "a full-retention figure of the paper"
    assert list(ideal.values()) == [[5, 5, 10], [11, 11, 22], [3, 3, 6]]


def test_series_without_eviction_needs_full_blocks():
    assert settings().blocks_per_request(Series("indirection", ""), 257, 16) == 17


def test_boundary_is_set_against_the_modes_own_peak():
    def point(concurrency, rate, feasible=True):
        return {
            "mode": "vtoken", "policy": "random", "concurrency": concurrency,
            "feasible": feasible, "output_throughput": rate,
        }  # fmt: skip

    points = [point(5, 200.0), point(8, 180.0), point(9, None, False)]
    (row,) = boundary_rows(points, [{"mode": "vtoken", "policy": "random"}])
    assert row["boundary_concurrency"] == 8 and row["peak_concurrency"] == 5
    assert row["boundary_of_peak_frac"] == pytest.approx(0.9)

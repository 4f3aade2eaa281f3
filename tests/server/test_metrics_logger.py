"""The stat logger alone: labels per engine, histograms, and silence where there is no vToken."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from vtoken.server.stats import COUNTS, DURATIONS_NS, GAUGES, KEY_PREFIX, VIOLATIONS

pytest.importorskip("vllm")
REGISTRY = pytest.importorskip("prometheus_client").REGISTRY

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "vtoken.json"


def make_logger(model: str, engine: int, additional=None):
    from vtoken.vllm_plugin.metrics import VTokenStatLogger

    config = SimpleNamespace(
        additional_config={"vtoken": {}} if additional is None else additional,
        model_config=SimpleNamespace(served_model_name=model),
        parallel_config=SimpleNamespace(_api_process_count=1),
    )
    return VTokenStatLogger(config, engine)


def send(logger, **figures: int) -> dict:
    by_stage = {"waiting_to_start": 1, **{KEY_PREFIX + k: v for k, v in figures.items()}}
    logger.record(SimpleNamespace(num_kv_fetch_reqs_by_stage=by_stage), None)
    return by_stage


def sample(name: str, model: str, engine: int) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": model, "engine": str(engine)})


def test_engines_are_told_apart():
    first, second = make_logger("two", 0), make_logger("two", 1)
    send(first, evicted_tokens=5, live_tokens=30, dead_tokens=10)
    send(second, evicted_tokens=7, live_tokens=8, dead_tokens=0)
    send(first, evicted_tokens=2)
    assert sample("vtoken_evicted_tokens_total", "two", 0) == 7
    assert sample("vtoken_evicted_tokens_total", "two", 1) == 7
    assert sample("vtoken_live_tokens", "two", 0) == 30
    assert sample("vtoken_fragmentation_ratio", "two", 0) == 0.25
    assert sample("vtoken_fragmentation_ratio", "two", 1) == 0


def test_histograms_are_in_seconds():
    logger = make_logger("times", 0)
    send(logger, plan_ns=3_000_000)
    send(logger, plan_ns=1_000_000, relocation_ns=500_000)
    assert sample("vtoken_plan_seconds_count", "times", 0) == 2
    assert sample("vtoken_plan_seconds_sum", "times", 0) == pytest.approx(0.004)
    assert sample("vtoken_relocation_seconds_sum", "times", 0) == pytest.approx(0.0005)


def test_vllms_loggers_see_only_their_own():
    assert send(make_logger("own", 0), moved_tokens=1) == {"waiting_to_start": 1}


@pytest.mark.parametrize("additional", [{}, {"vtoken": {"mode": "native"}}])
def test_nothing_without_vtoken(additional):
    name = f"none {additional}"
    logger = make_logger(name, 0, additional)
    send(logger)
    logger.log()
    assert sample("vtoken_evicted_tokens_total", name, 0) is None


def test_line_tells_the_interval_from_the_total():
    logger = make_logger("line", 3)
    send(logger, evicted_tokens=50, plan_ns=2_000_000, live_tokens=90, dead_tokens=10)
    logger.log()
    send(logger, evicted_tokens=5, plan_ns=1_000_000)
    line = logger._line(logger.totals - logger._logged)
    assert line.startswith("Engine 003: vToken: live 90 tokens, dead 10 (10.0%)")
    assert "evicted 5 (total 55)" in line
    assert "planning 1.000 ms a step" in line


def test_all_that_is_sent_is_understood():
    from vtoken.vllm_plugin import metrics

    known = {*metrics.COUNTERS, *metrics.GAUGES, *metrics.HISTOGRAMS}
    sent = {*COUNTS, *GAUGES, *DURATIONS_NS, VIOLATIONS}
    # vLLM has metrics of its own for these two; they are for the log line.
    assert sent - known == {"preemptions", "running_requests"}
    assert known <= sent


def test_dashboard_asks_for_what_there_is():
    from vtoken.vllm_plugin import metrics

    names = {f"{name}_total" for name, _ in metrics.COUNTERS.values()}
    names |= {name for name, _ in (*metrics.GAUGES.values(), metrics.FRAGMENTATION)}
    names |= {f"{name}_bucket" for name, _ in metrics.HISTOGRAMS.values()}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"vtoken_\w+", target["expr"])
    }
    assert asked <= names
    assert len(asked) >= len(names) - 1

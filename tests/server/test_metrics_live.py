"""/metrics and the log line of a running server, against what the engine itself says."""

from __future__ import annotations

import re
import time

import pytest

pytest.importorskip("openai")
pytestmark = pytest.mark.vllm

COUNTERS = ("evicted_tokens", "moved_tokens", "released_blocks", "reused_slots")
NAMES = (
    "vtoken_live_tokens",
    "vtoken_dead_tokens",
    *(f"vtoken_{name}_total" for name in COUNTERS),
    "vtoken_relocation_seconds_count",
    "vtoken_plan_seconds_count",
    "vtoken_fragmentation_ratio",
    "vtoken_headroom_blocks",
    "vtoken_invariant_violations_total",
)


def scrape(server) -> dict[str, float]:
    """Samples of engine 0 by name."""
    text = server.ask("/metrics")[2]
    found = re.findall(r'^([\w:]+)\{engine="0",model_name="[^"]+"\} (\S+)$', text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def run_some(server) -> None:
    server.client().completions.create(
        model="tiny-llama", prompt="slow rain " * 30, max_tokens=140, n=2,
        extra_body={"ignore_eos": True},
    )  # fmt: skip


def test_every_metric_is_there(idle_server):
    run_some(idle_server)
    found = scrape(idle_server)
    assert set(NAMES) <= set(found)
    assert found["vtoken_invariant_violations_total"] == 0


def test_counters_are_the_engines_own(idle_server):
    run_some(idle_server)
    engine, found = idle_server.wait_idle(), scrape(idle_server)
    assert engine["counters"]["evicted_tokens"] > 0
    for name in COUNTERS:
        assert found[f"vtoken_{name}_total"] == engine["counters"][name], name


def test_an_idle_engine_holds_nothing(idle_server):
    run_some(idle_server)
    engine, found = idle_server.wait_idle(), scrape(idle_server)
    assert found["vtoken_live_tokens"] == found["vtoken_dead_tokens"] == 0
    assert found["vtoken_headroom_blocks"] == engine["blocks"]["usable"]
    assert found["vllm:kv_cache_usage_perc"] == 0


def test_usage_stays_true_after_reclaim(idle_server):
    """vLLM's own figure while a request has long been cut down to its budget."""
    stream = idle_server.client().completions.create(
        model="tiny-llama", prompt="slow rain " * 30, max_tokens=400, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    checked = 0
    for number, _ in enumerate(stream):
        if number < 200 or number % 40:
            continue
        engine, found = idle_server.engine(), scrape(idle_server)
        if engine["num_running"] == 1:
            used = found["vllm:kv_cache_usage_perc"] * engine["blocks"]["usable"]
            # A step may lie between the two answers; a request at its budget moves by one block.
            assert abs(used - engine["requests"][0]["blocks"]) <= 1.01
            assert used * engine["block_size"] < engine["requests"][0]["computed"]
            checked += 1
    assert checked


def test_a_line_beside_vllms(idle_server):
    run_some(idle_server)
    for _ in range(100):
        lines = re.findall(r"vToken: live .*", idle_server.log_text())
        if any(re.search(r"evicted [1-9]", line) for line in lines):
            return
        time.sleep(0.1)
    pytest.fail(f"no line with evictions: {lines[-3:]}")


def test_vllms_own_line_does_not_see_our_figures(idle_server):
    run_some(idle_server)
    assert "KV fetch" not in idle_server.log_text()

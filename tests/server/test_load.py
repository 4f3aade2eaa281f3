"""Many clients in a pool that native cannot hold: nothing fails, nothing hangs, all comes back."""

from __future__ import annotations

import re

import pytest

from vtoken.server.load import run_load

pytest.importorskip("openai")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CLIENTS, SECONDS, MAX_TOKENS = 32, 20.0, 200
# 1,280 tokens: five requests of 44 + 200 tokens, or ten cut down to 64 + 32.
POOL = ("--num-kv-blocks", "40", "--block-size", "32", "--max-model-len", "512")


def load(tmp_path_factory, name: str, *options: str):
    from server_process import Server

    server = Server(tmp_path_factory.mktemp(name) / "server.log", *POOL, *options)
    try:
        server.wait_until_up()
        report = run_load(
            server.url, model="tiny-llama", clients=CLIENTS, seconds=SECONDS, max_tokens=MAX_TOKENS
        )
        metrics = server.ask("/metrics")[2]
        found = re.search(r"^vllm:num_preemptions_total\{.*\} (\S+)$", metrics, re.MULTILINE)
        return report, float(found[1])
    finally:
        server.stop()


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    return load(tmp_path_factory, "native", "--mode", "native")


@pytest.fixture(scope="module")
def reclaiming(tmp_path_factory):
    return load(tmp_path_factory, "vtoken", "--policy", "h2o", "--kv-budget-tokens", "64")


def test_every_stream_is_complete(reclaiming):
    report, _ = reclaiming
    assert report.failed == []
    assert report.stuck == 0
    assert report.completed >= CLIENTS


def test_pool_comes_back(reclaiming):
    assert reclaiming[0].pool["owned"] == 0
    assert reclaiming[0].pool["evicted_tokens"] > 0


def test_native_preempts_and_reclaiming_does_not(native, reclaiming):
    assert native[0].failed == []
    assert native[1] > 0
    assert reclaiming[1] == 0

"""`vtoken bench --suite peers`: stock vLLM and our modes on a tiny model, beside a stand-in."""

from __future__ import annotations

import csv
import json
import shlex
import sys
from pathlib import Path

import pytest
from peer_fakes import asked, write_openvino

from vtoken_cli.app import main

pytestmark = pytest.mark.vllm

NUM, PROMPT_LEN, OUTPUT_LEN, BUDGET = 2, 160, 24, 96
WORKLOAD = f"random:{PROMPT_LEN}+{OUTPUT_LEN}"
PEER = "openvino-eviction:half"
SPEEDS = {
    "output_throughput", "output_throughput_min", "output_throughput_max", "request_throughput",
    "mean_ttft_ms", "mean_tpot_ms", "p95_e2el_ms",
}  # fmt: skip


@pytest.fixture
def library(tmp_path) -> Path:
    """A stand-in for OpenVINO GenAI, which an interpreter of its own finds, and a model for it."""
    folder = tmp_path / "library"
    write_openvino(folder)
    (folder / "openvino_model.xml").write_text("<net/>")
    python = tmp_path / "python"
    path, own = shlex.quote(str(folder)), shlex.quote(sys.executable)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {own} "$@"\n')
    python.chmod(0o755)
    return folder


def test_peers_take_turns_with_our_modes_in_the_same_pool(library, tmp_path, capfd) -> None:
    out = tmp_path / "out"
    args = ["--mode", "naive,vtoken", "--policy", "h2o", "--kv-budget-tokens", str(BUDGET)]
    args += ["--workload", WORKLOAD, "--repeats", "2"]
    args += ["--num-prompts", str(NUM), "--concurrency", str(NUM)]
    args += ["--peers", json.dumps({PEER: str(tmp_path / "python")})]
    args += ["--peer-args", json.dumps({PEER: {"ir": str(library)}})]
    command = ["bench", "--suite", "peers", "--model", "tiny-llama", "--quiet", *args]
    assert main([*command, "--output", str(out)]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    result = json.loads((out / "result.json").read_text())
    assert result["command"] == "bench" and list(result["suites"]) == ["peers"]
    rows = {row["mode"]: row for row in result["suites"]["peers"]}
    assert list(rows) == ["stock", PEER, "naive", "vtoken"]
    for mode, row in rows.items():
        assert row["workload"] == WORKLOAD
        assert (row["concurrency"], row["repeats"], row["completed"]) == (NUM, 2, NUM)
        assert row["total_input_tokens"] == NUM * PROMPT_LEN
        assert row["total_output_tokens"] == NUM * OUTPUT_LEN
        assert set(row) >= SPEEDS
        is_stock = mode == "stock"
        assert ("throughput_over_stock" in row) != is_stock
        assert (f"{WORKLOAD}: {mode}" in shown) != is_stock
    ours = rows["vtoken"]
    assert rows["stock"]["peer_version"].startswith("vllm ")
    assert 0 <= rows["stock"]["pool_tokens"] - ours["pool_tokens"] < 32
    assert rows["naive"]["vtoken_evicted_tokens"] == ours["vtoken_evicted_tokens"] > 0
    assert (rows["naive"]["vtoken_decisions"], ours["vtoken_decisions"]) == ("recorded", "replayed")
    assert ours["vtoken_moved_tokens"] > 0 == rows["naive"]["vtoken_moved_tokens"]
    _check_peer(rows[PEER], ours, library)
    _check_files(out, rows)


def _check_peer(row: dict, ours: dict, library: Path) -> None:
    """The stand-in was made with our pool and budget, and its row says so."""
    (made,) = asked(library)
    assert made["num_kv_blocks"] == ours["pool_tokens"] // 32 and made["max_num_seqs"] == NUM
    assert made["cache_eviction_config"] == [32, 32, BUDGET, "norm_sum"]
    assert made["folder"] == str(library)
    assert row["budget_tokens"] == ours["budget_tokens"] == BUDGET
    assert row["pool_tokens"] == 32 * made["num_kv_blocks"]
    assert (row["engine"], row["peer_version"]) == (PEER, "openvino-genai 1.2")
    assert "note" not in row


def _check_files(out: Path, rows: dict) -> None:
    summary = list(csv.DictReader((out / "summary.csv").open()))
    assert [row["mode"] for row in summary] == list(rows)
    keys = [json.loads(x)["key"] for x in (out / "runs.jsonl").read_text().splitlines()[1:]]
    # Our modes, then the peers, repeat by repeat.
    assert [key.split("|")[4].split("/")[0] for key in keys] == 2 * [
        "naive", "vtoken", "stock", PEER,
    ]  # fmt: skip
    page = (out / "report.html").read_text()
    assert (out / "peers_throughput_0.png").is_file() and "alt='peers_throughput_0'" in page
    assert page.count("<tr class=''>") == len(rows)

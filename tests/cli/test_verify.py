"""The `verify` command from outside: exit codes, result keys, replay."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = pytest.mark.vllm


def _verify(*args: str, cwd) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "vtoken_cli.app", "verify", *args]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, timeout=800, check=False
    )


def test_events_then_a_replayed_fault(tmp_path) -> None:
    done = _verify(
        "--hash-kv", "--events", "60", "--model", "tiny-llama", "--policy", "h2o", "--json",
        "--output", "out", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["passed"] is True and result["command"] == "verify"
    rows = {r["name"]: r for r in result["invariants"]}
    assert set(rows) == {"I1", "I2", "I3", "I4", "conservation", "positions", "scores"}
    assert rows["I1"]["events"] >= 60 and rows["I1"]["violations"] == 0
    assert result["cost_ratio"] > 0
    assert (tmp_path / "out" / "result.json").exists()

    report = _violation_report()
    (tmp_path / "report.json").write_text(json.dumps(report))
    done = _verify("--replay", "report.json", "--json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr[-2000:]
    replayed = json.loads(done.stdout)
    assert replayed["passed"] is False and replayed["violation"]["invariant"] == "scores"
    assert "scores" in done.stderr


def _violation_report() -> dict:
    """What a run with a fault in it would have left: its settings, requests and the fault."""
    from vtoken.checks.report import REPORT_VERSION
    from vtoken.config import VTokenConfig
    from vtoken.verify.workloads import staggered_prompts

    config = VTokenConfig(kv_budget_tokens=44, eviction_interval_tokens=8)
    requests = [
        {
            "step": 1 + i,
            "req_id": r.request_id,
            "prompt_token_ids": r.prompt_token_ids,
            "max_tokens": 24,
        }
        for i, r in enumerate(staggered_prompts(2, 40, 24, 500, 0, 0))
    ]
    settings = {"model": "tiny-llama", "num_kv_blocks": 64, "max_model_len": 256, "block_size": 16}
    return {
        "schema_version": REPORT_VERSION, "check": "scores", "step": 0,
        "replay": {
            "settings": settings, "config": config.model_dump(mode="json"), "requests": requests,
            "fault": "the score accumulator not moved",
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--suite", "speed"), "--suite"),
        (("--replay", "nowhere.json"), "--replay"),
        (("--model", "./nowhere"), "--model"),
        (("--mode", "native", "--suite", "faults"), "--mode"),
        (("--mode", "indirection", "--hash-kv"), "--mode"),
    ],
)
def test_bad_usage_ends_with_2(tmp_path, args, named) -> None:
    done = _verify(*args, cwd=tmp_path)
    assert done.returncode == 2 and named in done.stderr, done.stderr[-500:]

"""A policy that a user installed, run by the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

REPO = Path(__file__).resolve().parents[2]
SCAN = (
    "capacity-scan", "--dry-run", "--model", "tiny-llama", "--num-kv-blocks", "40", "--mode",
    "naive,vtoken", "--prompt-len", "64", "--output-len", "128", "--concurrency", "4", "--json",
    "--quiet",
)  # fmt: skip


def test_capacity_scan_runs_an_installed_policy(tmp_path):
    """Installed offline into a folder of its own; found through its entry point, evicts, frees."""
    source, target = tmp_path / "source", tmp_path / "site"
    shutil.copytree(REPO / "examples" / "my_policy", source)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    pip += ["--no-index", "--quiet", "--disable-pip-version-check", "--target", target, source]
    subprocess.run(pip, check=True, capture_output=True, text=True, timeout=120)

    code = "import sys; from vtoken_cli.app import main; sys.exit(main(sys.argv[1:]))"
    path = os.pathsep.join([str(target), str(REPO)])
    done = subprocess.run(
        [sys.executable, "-c", code, *SCAN, "--policy", "my-policy"], check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    points = {p["mode"]: p for p in json.loads(done.stdout)["points"]}
    assert {p["policy"] for p in points.values()} == {"my-policy"}
    naive, ours = points["naive"], points["vtoken"]
    assert ours["feasible"] and ours["vtoken_evicted_tokens"] > 0
    above = ours["vtoken_retained_blocks_per_request"] - ours["ideal_blocks_per_request"]
    assert 0 <= above <= 1
    assert naive["vtoken_released_blocks"] < ours["vtoken_released_blocks"]

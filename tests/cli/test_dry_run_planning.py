"""`vtoken capacity-scan --dry-run --device`: answers, and what is refused with exit code 2."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm")

from vtoken_cli import cpu_runtime
from vtoken_cli.app import main

DRY = ["capacity-scan", "--dry-run", "--json", "--quiet"]
LLAMA = ["--device", "h100-80g", "--model", "meta-llama/Llama-3.1-8B"]


@pytest.fixture(autouse=True)
def same_process(monkeypatch):
    monkeypatch.setattr(cpu_runtime, "ensure_cpu_runtime", lambda note: None)


def run(capfd, *args):
    code = main([*DRY, *args])
    out, err = capfd.readouterr()
    return code, (json.loads(out) if out.strip().startswith("{") else None), err


def test_scan_of_a_device(capfd):
    lengths = ("--prompt-len", "64", "--output-len", "192", "--num-kv-blocks", "40")
    code, result, _ = run(capfd, *LLAMA, *lengths)
    found = {row["mode"]: row["max_concurrency"] for row in result["frontier"]}
    assert code == 0 and found["native"] == 2 and found["vtoken"] >= 4
    assert result["pool"]["usable_blocks"] == 40 and result["modelled_only"]
    assert all(point["modelled"] for point in result["points"])
    assert {"fixed_bytes", "num_batched_tokens"} <= {
        key.removeprefix("overhead_") for key in result["memory_plan"]
    }


def test_inverse_question(capfd):
    code, result, _ = run(capfd, *LLAMA, "--target-concurrency", "16", "--target-context", "16320")
    needs = {row["mode"]: row for row in result["needs"]}
    assert code == 0 and needs["native"]["num_blocks"] == 16 * 1020
    assert needs["vtoken"]["kv_gib"] < 0.55 * needs["native"]["kv_gib"]


def azure(tmp_path, *rows):
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    return str(path)


def test_trace_side_by_side(capfd, tmp_path):
    rows = [f"2023-11-16 18:15:{s:02d}.5,200,{60 + s}" for s in range(8)]
    code, result, _ = run(
        capfd, *LLAMA, "--num-kv-blocks", "60", "--trace", azure(tmp_path, *rows),
        "--rate-scale", "20", "--output", str(tmp_path / "out"),
    )  # fmt: skip
    assert code == 0
    assert [row["mode"] for row in result["trace"]] == ["native", "naive", "vtoken"]
    assert all(row["modelled"] and row["completed"] == 8 for row in result["trace"])
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"result.json", "trace.csv", "demand.csv"} <= written


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--device", "h100-8og"], "did you mean 'h100-80g'"),
        (["--device", "l4", "--model", "meta-llama/Llama-3.1-70B"], "GiB of weights"),
        ([*LLAMA, "--policy", "h2o"], "score"),
        ([*LLAMA, "--target-context", "100"], "--target-concurrency"),
        (["--target-concurrency", "3"], "--device"),
        ([*LLAMA, "--target-concurrency", "3", "--router", "fastest"], "--router"),
    ],
)
def test_bad_input_is_refused_with_a_reason(capfd, args, says):
    code, result, err = run(capfd, *args)
    assert code == 2 and says in err and "Traceback" not in err and result is None


def test_unsorted_trace_and_foreign_architecture_are_refused(capfd, tmp_path):
    rows = ["2023-11-16 18:15:02,200,60", "2023-11-16 18:15:01,200,60"]
    code, _, err = run(capfd, *LLAMA, "--trace", azure(tmp_path, *rows))
    assert code == 2 and "sorted" in err
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    code, _, err = run(capfd, "--device", "h100-80g", "--model", str(tmp_path))
    assert code == 2 and "MambaForCausalLM" in err


def test_planning_options_need_a_dry_run(capfd):
    code = main(["capacity-scan", *LLAMA])
    assert code == 2 and "--dry-run" in capfd.readouterr().err


def test_cases_side_by_side(capfd, tmp_path):
    config, out = tmp_path / "cases.yaml", tmp_path / "out"
    case = {"name": "Small, at once", "model": "meta-llama/Llama-3.1-8B", "num_kv_blocks": 40,
            "prompt_len": 64, "output_len": 192, "policy": "random", "eviction_ratio": 0.5,
            "paper": {"native": 2}}  # fmt: skip
    config.write_text(json.dumps({"cases": [case]}))
    code, result, _ = run(capfd, "--config", str(config), "--output", str(out))
    assert code == 0
    found = {row["mode"]: (row["paper"], row["max_concurrency"]) for row in result["frontier"]}
    assert found["native"] == (2, 2) and found["vtoken"][1] >= 4
    assert (out / "small-at-once" / "demand_over_time.png").stat().st_size > 1000
    config.write_text(json.dumps({"cases": [{**case, "polcy": "random"}]}))
    code, _, err = run(capfd, "--config", str(config))
    assert code == 2 and "polcy" in err and "policy" in err

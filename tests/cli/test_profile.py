"""`vtoken profile`: one-line refusals, clean JSON with the contract's keys, files."""

from __future__ import annotations

import csv
import json

import pytest

from vtoken_cli.app import main


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--suite", "speed"], ["--suite 'speed'", "overhead, step, kernels, scale, all"]),
        (["--concurrency", "0"], ["--concurrency '0'", "from 1"]),
        (["--concurrency", "16,many"], ["--concurrency 'many'", "a whole number"]),
        (["--concurrency", "8,8"], ["--concurrency", "different words"]),
        (["--steps", "2"], ["--steps 2", "4 or more"]),
        (["--events", "0"], ["--events 0", "1 or more"]),
        (["--prompt-len", "7"], ["--prompt-len 7", "16 or more"]),
        (["--mode", "vtokn"], ["--mode 'vtokn'", "did you mean 'vtoken'?"]),
        (["--policy", "h20"], ["--policy 'h20'", "did you mean 'h2o'?"]),
        (["--kv-budget-tokens", "3"], ["--kv-budget-tokens 3", "at least 5 for h2o"]),
        (["--eviction-ratio", "1"], ["--eviction-ratio 1.0", "from 0 to below 1"]),
        (["--trace", "t.json", "--suite", "kernels"], ["--trace 't.json'", "--suite step"]),
        (["--replay-decisions", "f"], ["--replay-decisions 'f'", "not in a profile"]),
        (["--model", "no-such-model"], ["--model 'no-such-model'"]),
        (["--block-size", "20"], ["--block-size 20", "multiple of 16"]),
    ],
)
def test_bad_input_is_one_line_and_code_2(args, says, capfd):
    assert main(["profile", "--quiet", *args]) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured.err
    for text in says:
        assert text in captured.err


def test_a_place_that_cannot_be_written_is_refused(tmp_path, capfd, monkeypatch):
    from vtoken.experiments.profile import run
    from vtoken.experiments.profile.rows import make_row

    suites = {"kernels": lambda result, say: [make_row("a/b", "us", value=1.0)]}
    monkeypatch.setattr(run, "_SUITES", suites)
    (tmp_path / "file").write_text("")
    args = ["profile", "--suite", "kernels", "--quiet", "--output", str(tmp_path / "file")]
    assert main(args) == 2
    assert "--output" in capfd.readouterr().err


@pytest.mark.vllm
def test_the_step_suite_writes_json_tables_a_picture_and_a_trace(tmp_path, capfd):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    out, trace = tmp_path / "out", tmp_path / "trace.json"
    code = main(
        ["profile", "--suite", "step", "--mode", "vtoken", "--model", "tiny-llama",
         "--concurrency", "2", "--steps", "6", "--prompt-len", "64", "--json", "--quiet",
         "--output", str(out), "--trace", str(trace)]
    )  # fmt: skip
    captured = capfd.readouterr()
    assert code == 0, captured.err[-2000:]
    result = json.loads(captured.out)
    assert result == json.loads((out / "result.json").read_text())
    assert result["command"] == "profile" and result["schema_version"] == 1
    assert result["environment"]["kernels"]["attention"] in ("cpp", "torch")
    assert result["environment"]["kernels"]["serves"]
    assert result["config"]["num_steps"] == 6 and result["config"]["modes"] == ["vtoken"]
    rows = {r["name"]: r for r in result["step"]}
    assert set(result) >= {"config", "environment", "started_at", "step"}
    assert set(rows["vtoken/step/c2"]) >= {"name", "value", "unit", "p50", "p95"}
    assert rows["vtoken/attention/c2"]["frac"] > 0
    with (out / "step.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(e["name"] == "step" for e in events) == 6
    assert (out / "step.png").exists() == _has_matplotlib()


def _has_matplotlib() -> bool:
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None

"""`vtoken capacity-scan`: exit codes, one-line refusals, clean JSON, files, and Ctrl-C."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys

import pytest

from vtoken_cli.app import main

DRY = ["capacity-scan", "--dry-run", "--model", "meta-llama/Llama-3.1-8B", "--quiet"]
SMALL = ["--num-kv-blocks", "67", "--prompt-len", "48", "--output-len", "112"]


@pytest.fixture
def bad_jsonl(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text('{"prompt": "fine"}\nnot json\n')
    return str(path)


# ---- bad input: exit code 2, one line that names the option and what is allowed ------------


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--policy", "randon"], ["--policy 'randon'", "did you mean 'random'?"]),
        (["--policy", "random,h20"], ["--policy 'h20'", "did you mean 'h2o'?"]),
        (["--mode", "native,vtokn"], ["--mode 'vtokn'", "did you mean 'vtoken'?"]),
        (["--eviction-ratio", "1"], ["--eviction-ratio 1.0", "from 0 to below 1"]),
        (["--eviction-ratio", "-0.1"], ["--eviction-ratio -0.1", "from 0 to below 1"]),
        (["--eviction-ratio", "half"], ["--eviction-ratio 'half'", "a number"]),
        (
            ["--eviction-ratio", "0.5", "--kv-budget-tokens", "64"],
            ["--eviction-ratio and --kv-budget-tokens", "give one of them"],
        ),
        (["--kv-budget-tokens", "20"], ["--kv-budget-tokens 20", "at least 21 for random"]),
        (["--num-kv-blocks", "6"], ["--num-kv-blocks 6", "at least 7 blocks of 16 tokens"]),
        (["--num-kv-blocks", "0"], ["--num-kv-blocks 0", "1 or more"]),
        (["--concurrency", "0"], ["--concurrency '0'", "1-32 or 1,2,4, or auto"]),
        (["--concurrency", "1,0,4"], ["--concurrency '1,0,4'", "1-32 or 1,2,4, or auto"]),
        (["--repeats", "0"], ["--repeats 0", "1 or more"]),
        (["--prompt-len", "15"], ["--prompt-len 15", "at least 16"]),
        (["--output-len", "0"], ["--output-len 0", "1 or more"]),
        (["--max-model-len", "100"], ["--max-model-len 100", "at least 160"]),
        (["--time-limit", "soon"], ["--time-limit 'soon'", "5m"]),
        (["--model", "meta-llama/Llama-9"], ["--model 'meta-llama/Llama-9'"]),
        (["--block-size", "24"], ["--block-size 24", "multiple of 16"]),
        (["--dataset-path", "BAD"], ["--dataset-path", "chat.jsonl:2", "one JSON object per line"]),
        (["--dataset-path", "/no/such/file"], ["--dataset-path '/no/such/file'", "readable file"]),
        (["--no-such-option"], ["No such option"]),
    ],
)
def test_bad_input_is_one_line_and_code_2(args, says, bad_jsonl, capfd):
    args = [bad_jsonl if arg == "BAD" else arg for arg in args]
    lengths = [] if "--dataset-path" in args else SMALL
    assert main([*DRY, *lengths, *args]) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured.err
    for text in says:
        assert text in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("model", ["./no/such/folder", "/no/such/folder", "smolm2-135m"])
def test_a_model_that_does_not_exist_is_refused_before_anything_starts(model, capfd):
    assert main(["capacity-scan", "--model", model, "--quiet"]) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert f"--model {model!r}" in captured.err


def test_the_help_names_this_command_s_own_defaults(capfd):
    assert main(["capacity-scan", "--help"]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "[default: native,naive,vtoken]" in shown and "[default: random]" in shown


# ---- dry runs, through vLLM's scheduler ----------------------------------------------------


@pytest.mark.vllm
def test_a_dry_run_writes_json_and_nothing_else(capfd):
    assert main([*DRY, *SMALL, "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["command"] == "capacity-scan" and result["schema_version"] == 1
    found = {row["mode"]: row["max_concurrency"] for row in result["frontier"]}
    assert (found["native"], found["vtoken"]) == (6, 11)
    assert result["pool"] == {"usable_blocks": 67, "block_size": 16}
    assert result["environment"]["usable_kv_blocks"] == 67
    assert all(point["modelled"] for point in result["points"])
    assert result["config"]["prompt_len"] == 48 and result["config"]["dry_run"] is True


@pytest.mark.vllm
def test_people_get_a_table_the_frontier_and_files(tmp_path, capfd):
    assert main([*DRY, *SMALL, "--mode", "native,vtoken", "--output", str(tmp_path / "out")]) == 0
    out = capfd.readouterr().out
    assert "67 blocks of 16 tokens, modelled" in out and "blocks/req" in out
    last = " ".join(out.strip().split("\n")[-2:])
    assert "native 6" in last and "vtoken 11 (1.8x native)" in last
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"result.json", "points.csv", "frontier.csv", "demand.csv"} <= written
    rows = list(csv.DictReader((tmp_path / "out" / "points.csv").open()))
    saved = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [int(r["concurrency"]) for r in rows] == [p["concurrency"] for p in saved["points"]]
    pytest.importorskip("matplotlib")
    assert {"frontier.png", "block_demand.png", "demand_over_time.png"} <= written


@pytest.mark.vllm
def test_a_list_of_concurrencies_is_run_as_given(capfd):
    assert main([*DRY, *SMALL, "--json", "--mode", "native", "--concurrency", "2,7-8"]) == 0
    points = json.loads(capfd.readouterr().out)["points"]
    assert [(p["concurrency"], p["feasible"]) for p in points] == [
        (2, True), (7, False), (8, False),
    ]  # fmt: skip
    assert points[1]["vtoken_preemptions"] == 1 and "preempted" in points[1]["reason"]


@pytest.mark.vllm
def test_no_feasible_point_is_code_1(capfd):
    # One packed request fits (7 blocks), one in full does not (10 blocks).
    args = ["--num-kv-blocks", "8", "--mode", "native", "--json"]
    assert main([*DRY, *SMALL, *args]) == 1
    (point,) = json.loads(capfd.readouterr().out)["points"]
    assert point["reason"] == "one request needs 10 blocks, the pool has 8"


@pytest.mark.vllm
def test_settings_come_from_yaml_too(tmp_path, capfd):
    file = tmp_path / "scan.yaml"
    file.write_text("prompt-len: 48\noutput-len: 112\nmode: native\nnum-kv-blocks: 67\n")
    assert main([*DRY, "--config", str(file), "--json", "--num-kv-blocks", "30"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["pool"]["usable_blocks"] == 30  # the command line wins
    assert result["frontier"][0]["max_concurrency"] == 3


# ---- an early end --------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["ctrl_c", "time_limit"])
def test_an_early_end_keeps_the_points_measured_so_far(tmp_path, model_path, sent):
    model_path("tiny-llama")
    out = tmp_path / "out"
    args = [
        "capacity-scan", "--model", "tiny-llama", "--num-kv-blocks", "400", "--mode", "native",
        "--prompt-len", "32", "--output-len", "64", "--concurrency", "1,40", "--repeats", "2",
        "--output", str(out), "--json",
    ]  # fmt: skip
    # The second point is interrupted as soon as it is on its way.
    scan = subprocess.Popen(
        [sys.executable, "-c", "import sys; from vtoken_cli.app import main; sys.exit(main())", *args],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "VTOKEN_NO_REEXEC": "1"},
        # Jobs that a shell puts into the background ignore it, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )  # fmt: skip
    lines = []
    try:
        for line in scan.stderr:
            lines.append(line)
            if line.startswith("native at 40: "):
                break
        scan.send_signal(sent)
        stdout, rest = scan.communicate(timeout=120)
    finally:
        scan.kill()
    assert scan.returncode == 130, "".join(lines) + rest
    assert "Traceback" not in rest
    for result in (json.loads(stdout), json.loads((out / "result.json").read_text())):
        assert result["interrupted"] is True
        assert [p["concurrency"] for p in result["points"]] == [1]
        assert result["points"][0]["feasible"] and result["points"][0]["output_throughput"] > 0

"""`vtoken bench`: refusals, dry runs, files, resumption, Ctrl-C, and one real engine."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import yaml

from vtoken.experiments.bench import pairing
from vtoken.experiments.bench.suites import SUITES
from vtoken_cli.app import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "experiments"
DRY = ["bench", "--dry-run", "--model", "tiny-llama", "--quiet"]
SMALL = ["--policy", "random", "--workload", "random:64+40", "--num-prompts", "2"]
MEMORY = [*DRY, *SMALL, "--ratios", "0.5", "--repeats", "2"]


# ---- bad input: exit code 2, one line that names the option and what is allowed ------------


@pytest.fixture
def unusable(tmp_path):
    path = tmp_path / "chat.json"
    path.write_text(json.dumps([{"conversations": [{"from": "human", "value": "no answer"}]}]))
    return str(path)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--suite", "speed"], ["--suite 'speed'", *SUITES]),
        (["--suite", "memori"], ["did you mean 'memory'?", *SUITES]),
        (["--workload", "txt"], ["--workload 'txt'", "did you mean 'text'?"]),
        (["--workload", "/no/such.json"], ["--workload '/no/such.json'", "readable file"]),
        (["--workload", "UNUSABLE"], ["--workload", "chat.json", "usable rows"]),
        (["--workload", "random:64"], ["--workload 'random:64'"]),
        (["--concurrency", "4,0,8"], ["--concurrency '4,0,8'", "from 1"]),
        (["--policy", "h3o"], ["--policy 'h3o'", "did you mean 'h2o'?"]),
        (["--repeats", "0"], ["--repeats 0"]),
        (["--ratios", "0.5,1"], ["--ratios 1.0", "below 1"]),
        (["--goodput", "ttft=500"], ["--goodput 'ttft=500'", "ttft:500 tpot:50"]),
        (["--clock", "sun"], ["--clock 'sun'", "wall, cpu"]),
        (["--suite", "sla", "--dry-run"], ["--dry-run 'sla'", "need a model"]),
        (["--resume", "/no/such/folder"], ["--resume", "earlier run"]),
        (["--prompt-len", "9000", "--workload", "random"], ["at most 8,192"]),
        (
            ["--suite", "peers", "--peers", '{"kvpress": "/no/python"}'],
            ["--peers 'kvpress=/no/python'", "a Python that runs (No such file"],
        ),
        (["--suite", "peers", "--peers", '{"sglang": "python"}'], ["--peers 'sglang'", "kvpress"]),
    ],
)
def test_bad_input_is_one_line_and_code_2(args, says, unusable, capfd) -> None:
    args = [unusable if arg == "UNUSABLE" else arg for arg in args]
    head = ["bench", "--model", "tiny-llama", "--quiet"]
    head += ["--dry-run"] if "--peers" not in args and "--dry-run" not in args else []
    assert main([*head, *args]) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured.err
    for text in says:
        assert text in captured.err


def test_a_peer_without_its_library_is_refused(tmp_path, capfd) -> None:
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'kvpress'\" >&2\nexit 1\n"
    )
    python.chmod(0o755)
    peers = json.dumps({"kvpress": str(python)})
    assert main(["bench", "--suite", "peers", "--model", "tiny-llama", "--peers", peers]) == 2
    assert "can import kvpress (ModuleNotFoundError" in capfd.readouterr().err


# ---- examples ------------------------------------------------------------------------------


@pytest.mark.parametrize("suite", SUITES)
def test_each_suite_has_an_example_that_names_its_place_in_the_paper(suite) -> None:
    from vtoken_cli.commands.bench import OWN, make_settings
    from vtoken_cli.given import build_run, read_yaml
    from vtoken_cli.options import ENGINE, FILES, OUTPUT, VTOKEN

    path = EXAMPLES / f"{suite}.yaml"
    rows = (*VTOKEN, *ENGINE, *OWN, *FILES, *OUTPUT)
    run = build_run(read_yaml(str(path), rows), rows, ("mode", "policy"))
    settings = make_settings(run)
    assert settings.chosen_suites == (suite,) and settings.engine.model == "smollm2-135m"
    assert re.search(r"Figure \d|Table \d|not in the paper", path.read_text()), path
    assert yaml.safe_load(path.read_text())["suite"] == suite
    assert f"{suite}.yaml" in (EXAMPLES / "README.md").read_text()


# ---- dry runs, through vLLM's scheduler ----------------------------------------------------


@pytest.mark.vllm
def test_memory_writes_rows_tables_plots_and_one_page(tmp_path, capfd) -> None:
    out = tmp_path / "out"
    assert main([*MEMORY, "--json", "--output", str(out)]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["command"] == "bench" and result == json.loads((out / "result.json").read_text())
    rows = result["suites"]["memory"]
    by_mode = {row["mode"]: row for row in rows if not row.get("shadow")}
    assert set(by_mode) == {"native", "naive", "vtoken"}
    vtoken, naive = by_mode["vtoken"], by_mode["naive"]
    assert vtoken["repeats"] == 2 and vtoken["modelled"] is True
    assert (naive["vtoken_decisions"], vtoken["vtoken_decisions"]) == ("recorded", "replayed")
    assert vtoken["vtoken_evicted_tokens"] == naive["vtoken_evicted_tokens"] > 0
    retained = "vtoken_retained_blocks_per_request"
    assert vtoken["retained_over_naive"] == pytest.approx(vtoken[retained] / naive[retained])
    assert vtoken["retained_over_naive"] < 0.73 and vtoken["blocks_above_ideal"] <= 1
    assert vtoken["utilization_points_over_naive"] > 22
    assert naive["vtoken_blocks_partly_dead_frac"] == pytest.approx(
        naive["vtoken_blocks_expected_partly_dead_frac"], abs=0.1
    )
    (shadow,) = [row for row in rows if row.get("shadow")]
    assert shadow["mode"] == "native" and shadow["shadow_freeable_frac"] > 0.27
    summary = list(csv.DictReader((out / "summary.csv").open()))
    assert [row["mode"] for row in summary] == [row["mode"] for row in rows]
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len(list(out.glob("*.png"))) == 4
    assert "://" not in page and "fewer blocks than naive" in page
    histogram = list(csv.DictReader((out / "memory_block_histogram.csv").open()))
    assert sum(float(r["blocks_frac"]) for r in histogram if r["mode"] == "naive") == (
        pytest.approx(1.0)
    )


@pytest.mark.vllm
def test_native_alone_says_what_each_policy_would_free(tmp_path, capfd) -> None:
    policies = ["--policy", "random,streaming-llm", "--ratios", "0.3,0.5,0.7", "--repeats", "2"]
    args = [*DRY, *SMALL, *policies]
    out = tmp_path / "out"
    assert main([*args, "--mode", "native", "--output", str(out)]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "freeable %" in shown
    assert re.search(
        r"At ratio 0\.5 these policies would leave \d+ %( to \d+ %)? of native's", shown
    )
    rows = json.loads((out / "result.json").read_text())["suites"]["memory"]
    assert {row["mode"] for row in rows} == {"native"}  # nothing that was not asked for
    plain, *shadows = rows
    assert not plain.get("shadow") and all(row["shadow"] for row in shadows)
    freed = {(r["policy"], r["eviction_ratio"]): r["shadow_freeable_frac"] for r in shadows}
    assert set(freed) == {(p, r) for p in ("random", "streaming-llm") for r in (0.3, 0.5, 0.7)}
    for policy in ("random", "streaming-llm"):
        assert 0 < freed[policy, 0.3] < freed[policy, 0.5] < freed[policy, 0.7] < 0.7
    for row in shadows:  # against native's own blocks on the same prompts
        own = plain["vtoken_retained_blocks_per_request"]
        assert row["vtoken_retained_blocks_per_request"] == own
        assert row["shadow_freeable_blocks_per_request"] == pytest.approx(
            own * row["shadow_freeable_frac"]
        )
    # A run with all modes says the same.
    assert main([*args, "--json"]) == 0
    full = json.loads(capfd.readouterr().out)["suites"]["memory"]
    assert {
        (r["policy"], r["eviction_ratio"]): r["shadow_freeable_frac"]
        for r in full if r.get("shadow")
    } == pytest.approx(freed)  # fmt: skip


@pytest.mark.vllm
def test_prefix_and_sensitivity_show_tables(tmp_path, capfd) -> None:
    args = ["--suite", "prefix,sensitivity", "--prefix-len", "64", "--suffix-len", "64"]
    args += ["--sharing-degrees", "1,2", "--repeats", "1", "--output-len", "40"]
    out = tmp_path / "out"
    assert main([*DRY, *SMALL, *args, "--output", str(out)]) == 0
    shown = capfd.readouterr().out
    assert "shared-prefix-2" in shown and "fragmentation_threshold" in shown
    suites = json.loads((out / "result.json").read_text())["suites"]
    hits = {(r["mode"], r["sharing_degree"]): r["prefix_hit_frac"] for r in suites["prefix"]}
    # The second of two requests finds the 64 shared tokens of 128; without sharing nobody does.
    assert hits[("naive", 1)] == 0 and hits[("vtoken", 2)] == hits[("naive", 2)] == 0.25
    capacity = {
        (r["factor"], r["value"]): r["normalized_retained_capacity"] for r in suites["sensitivity"]
    }
    assert capacity[("block_size", 16)] == 1.0 and capacity[("eviction_ratio", 0.5)] == 1.0
    assert capacity[("eviction_ratio", 0.7)] < 1 < capacity[("eviction_ratio", 0.3)]
    assert {v for f, v in capacity if f == "block_size"} == {16, 32, 48, 64}


@pytest.mark.vllm
def test_a_run_that_evicts_nothing_says_so(capfd) -> None:
    args = ["--kv-budget-tokens", "500", "--repeats", "1"]
    assert main([*DRY, *SMALL, *args]) == 0
    assert "Evicted nothing, being within budget: naive, random" in capfd.readouterr().out


@pytest.mark.vllm
@pytest.mark.parametrize("suite", ["memory", "sensitivity"])
def test_rows_longer_than_the_model_are_left_out_and_said_so(suite, tmp_path, capfd) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("timestamp_s,input_tokens,output_tokens\n0,64,40\n1,9000,40\n2,70,40\n")
    out = tmp_path / "out"
    args = ["--suite", suite, "--policy", "random", "--workload", str(path), "--repeats", "1"]
    assert main([*DRY, *args, "--num-prompts", "2", "--output", str(out)]) == 0
    said = "1 of 3 usable rows are left out, being longer than 8,192 tokens with their output."
    assert said in " ".join(capfd.readouterr().out.split())
    result = json.loads((out / "result.json").read_text())
    assert sum(note.endswith(said) for note in result["notes"]) == 1
    assert {row["completed"] for row in result["suites"][suite]} == {2}


@pytest.mark.vllm
def test_ctrl_c_keeps_runs_and_resume_takes_them_up(tmp_path, capfd, monkeypatch) -> None:
    real, calls = pairing.measure, []

    def measure(*args, **kwargs):
        calls.append(kwargs)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(pairing, "measure", measure)
    first, second = tmp_path / "first", tmp_path / "second"
    assert main([*MEMORY, "--output", str(first)]) == 130
    assert "interrupted" in capfd.readouterr().out
    result = json.loads((first / "result.json").read_text())
    assert result["interrupted"] is True
    kept = {row["mode"]: row for row in result["suites"]["memory"] if not row.get("shadow")}
    # One repeat of each mode and a second one of native.
    assert {mode: row["repeats"] for mode, row in kept.items()} == {
        "native": 2, "naive": 1, "vtoken": 1,
    }  # fmt: skip
    assert kept["vtoken"]["retained_over_naive"] < 0.73
    assert len((first / "runs.jsonl").read_text().splitlines()) == 1 + 4

    assert main([*MEMORY, "--output", str(second), "--resume", str(first)]) == 0
    assert "4 runs were read from the earlier benchmark" in capfd.readouterr().out
    assert len(calls) == 5 + 2  # native, naive, vtoken in two repeats, less the four
    rows = json.loads((second / "result.json").read_text())["suites"]["memory"]
    assert {row["repeats"] for row in rows} == {2}

    other = [*MEMORY, "--seed", "7", "--resume", str(first)]
    assert main(other) == 2 and "runs of the same settings" in capfd.readouterr().err


@pytest.mark.vllm
def test_a_pair_that_ctrl_c_parted_is_run_again_together(tmp_path, monkeypatch) -> None:
    """What naive decided is lost with its process, and vtoken is to follow it."""
    real, calls = pairing.measure, []

    def measure(*args, **kwargs):
        calls.append(kwargs)
        if len(calls) == 3:  # the first vtoken
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(pairing, "measure", measure)
    first, second = tmp_path / "first", tmp_path / "second"
    assert main([*MEMORY, "--output", str(first)]) == 130
    assert main([*MEMORY, "--output", str(second), "--resume", str(first)]) == 0
    assert len(calls) == 3 + 5  # all of native, naive, vtoken in two repeats but the first native
    lines = [json.loads(line) for line in (second / "runs.jsonl").read_text().splitlines()[1:]]
    found = {line["key"]: line["values"].get("vtoken_decisions") for line in lines}
    assert sorted(found.values(), key=str) == [None, None, *2 * ["recorded"], *2 * ["replayed"]]


@pytest.mark.vllm
def test_a_resumed_sensitivity_has_the_rows_of_an_undisturbed_one(tmp_path, monkeypatch) -> None:
    real, calls = pairing.measure, []

    def measure(*args, **kwargs):
        calls.append(kwargs)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    args = ["--suite", "sensitivity", "--ratios", "0.3", "--block-sizes", "16,32"]
    args += ["--thresholds", "0,0.5", "--repeats", "2"]

    def rows(folder, *more: str, code: int = 0) -> list[dict]:
        assert main([*DRY, *SMALL, *args, *more, "--output", str(folder)]) == code
        return json.loads((folder / "result.json").read_text())["suites"]["sensitivity"]

    whole = rows(tmp_path / "whole")
    monkeypatch.setattr(pairing, "measure", measure)
    cut = rows(tmp_path / "first", code=130)
    assert len(cut) == len(whole) - 1 and {row["repeats"] for row in cut} == {1}
    assert rows(tmp_path / "second", "--resume", str(tmp_path / "first")) == whole
    assert len(calls) == 4 + 5  # the default and three others in two repeats, less three


# ---- one real engine -----------------------------------------------------------------------


@pytest.mark.vllm
def test_a_limit_that_nothing_meets_ends_with_1(tmp_path, capfd) -> None:
    args = ["--suite", "sla", "--policy", "random", "--workload", "random:32+8", "--repeats", "1"]
    args += ["--concurrency", "1,2", "--ref-concurrency", "2", "--pool-fracs", "1"]
    args += ["--slo-p95", "0.001", "--goodput", "e2el:60000", "--block-size", "32"]
    command = ["bench", "--model", "tiny-llama", "--quiet", *args, "--output", str(tmp_path)]
    assert main(command) == 1
    assert "Nothing meets the limit" in " ".join(capfd.readouterr().out.split())
    rows = json.loads((tmp_path / "result.json").read_text())["suites"]["sla"]
    assert {row["mode"] for row in rows} == {"native", "naive", "vtoken"}
    for row in rows:
        assert row["feasible"] is False and row["c_sel"] is None
        assert row["sla_p95_e2el_ms"] == 0.001 < row["p95_e2el_ms"]
        assert row["request_goodput"] == pytest.approx(row["request_throughput"])
        assert row["completed"] == 2 * row["concurrency"]

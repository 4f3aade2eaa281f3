"""`vtoken bench --suite quality` on a tiny model, whose answers are made the right ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("rouge_score", reason="rouge-score is not installed")

from vtoken_cli.app import main

pytestmark = pytest.mark.vllm

BENCH = ["bench", "--suite", "quality", "--model", "tiny-llama", "--quiet", "--output-len", "8"]
CONTEXT = (
    "In the year {n} the harbour of Arnfeld was dug anew. Ships from {n} towns lay there, laden "
    "with salt, wool and iron, and a lamp burned on the mole all night. The keeper of the lamp had "
    "a dog that knew every sail by its patches, and it barked {n} times when the herring came. "
)
NUM_QUESTIONS = 3
RESULT_KEYS = {"schema_version", "command", "config", "environment", "started_at", "suites"}
ROW_KEYS = {
    "mode", "policy", "workload", "vtoken_evicted_tokens", "vtoken_moved_tokens",
    "vtoken_released_blocks", "vtoken_peak_blocks", "vtoken_retained_blocks_per_request",
    "vtoken_memory_utilization", "vtoken_preemptions", "vtoken_relocation_events",
}  # fmt: skip


def write_questions(path: Path, answers: list[str]) -> Path:
    """A LongBench-style file of long contexts with these accepted answers."""
    rows = [
        {"context": 2 * CONTEXT.format(n=17 + n), "input": f"When, {n}?", "answers": [answer]}
        for n, answer in enumerate(answers)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_bench(folder: Path, *args: str) -> dict:
    """The rows of result.json by (mode, policy, kept share), and the whole of it."""
    assert main([*BENCH, *args, "--output", str(folder)]) == 0
    result = json.loads((folder / "result.json").read_text())
    rows = {(r["mode"], r["policy"], r["budget_frac"]): r for r in result["suites"]["quality"]}
    assert len(rows) == len(result["suites"]["quality"])
    return result | {"rows": rows}


@pytest.fixture(scope="module")
def all_kept(tmp_path_factory) -> dict:
    """Full KV against a budget above all lengths, on one engine; `texts` by mode beside it."""
    folder = tmp_path_factory.mktemp("quality")
    path = write_questions(folder / "harbour.jsonl", ["no answer"] * NUM_QUESTIONS)
    args = ["--mode", "indirection,vtoken", "--policy", "random", "--kv-budget-tokens", "500"]
    result = run_bench(folder / "out", *args, "--workload", str(path))
    lines = (folder / "out" / "runs.jsonl").read_text().splitlines()[1:]
    texts = [json.loads(line)["values"]["texts"] for line in lines]
    return result | {"texts": dict(zip(("indirection", "vtoken"), texts, strict=True))}


def test_a_budget_that_keeps_all_is_full_kv_and_says_so(all_kept) -> None:
    texts = all_kept["texts"]
    assert texts["vtoken"] == texts["indirection"] and len(texts["vtoken"]) == NUM_QUESTIONS
    row = all_kept["rows"]["vtoken", "random", 1.0]
    assert row["identical_frac"] == row["mean_rouge_l"] == 1.0
    assert row["vtoken_evicted_tokens"] == row["vtoken_relocation_events"] == 0
    assert row["note"] == "evicted nothing: the requests stayed within their budget"
    # Nobody's text holds the answer of this file: full KV cannot do it, and no budget is judged.
    assert row["accuracy"] == row["full_kv"] == 0.0
    assert "no budget can be judged" in " ".join(all_kept["notes"])


def test_budgets_are_judged_and_bad_ones_stay(all_kept, tmp_path, capfd) -> None:
    answers = [text.strip() for text in all_kept["texts"]["indirection"]]
    assert all(answers)
    path = write_questions(tmp_path / "harbour.jsonl", answers)
    out = tmp_path / "out"
    args = ["--workload", str(path), "--policy", "random,streaming-llm", "--ratios", "0,0.9"]
    result = run_bench(out, *args, "--mode", "native,vtoken")
    shown = capfd.readouterr().out
    assert RESULT_KEYS <= set(result) and result["command"] == "bench"
    assert set(result["suites"]) == {"quality"}
    rows = result["rows"]
    policies = ("random", "streaming-llm")
    assert set(rows) == {("native", "", 1.0)} | {
        ("vtoken", policy, kept) for policy in policies for kept in (1.0, 0.1)
    }
    for row in rows.values():
        assert set(row) >= ROW_KEYS and row["workload"] == row["task"] == "harbour"
        assert row["full_kv"] == 1.0 and row["num_questions"] == NUM_QUESTIONS
        assert row["completed"] == NUM_QUESTIONS and row["prompt_tokens"] > 100
    for policy in policies:
        # Other kernels than stock's, and the same texts.
        kept = rows["vtoken", policy, 1.0]
        assert kept["accuracy"] == kept["identical_frac"] == kept["mean_rouge_l"] == 1.0
        assert kept["vtoken_evicted_tokens"] == 0 and "note" in kept
        bad = rows["vtoken", policy, 0.1]
        assert bad["vtoken_evicted_tokens"] > 0 and "note" not in bad
        assert bad["accuracy"] < 1.0 and bad["identical_frac"] < 1.0 and bad["mean_rouge_l"] < 1.0
        assert kept["safe_budget_frac"] == bad["safe_budget_frac"] == 1.0
    note = "full KV 100 % of 3 questions): smallest safe budget: random 100 %, streaming-llm 100 %"
    assert note in " ".join(result["notes"]) and note in " ".join(shown.split())
    assert "Evicted nothing, being within budget: vtoken, random on harbour;" in shown
    page = (out / "report.html").read_text()
    assert page.count("<tr class=''>") == len(rows)
    assert (out / "quality_harbour.png").is_file() and page.count("data:image/png;base64,") == 1

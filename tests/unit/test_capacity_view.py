"""How a scan is shown: tables, sentences, CSV, plots; and where its requests come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vtoken.engine import EngineSettings
from vtoken.errors import ConfigError
from vtoken.experiments.capacity.point import PointRun, ScanPoint
from vtoken.experiments.capacity.pools import Pool
from vtoken.experiments.capacity.prompts import make_prompts
from vtoken.experiments.capacity.scan_options import ScanSettings
from vtoken.experiments.capacity.scan_result import ScanHalf, ScanResult
from vtoken.experiments.capacity.show import (
    answer_lines,
    csv_tables,
    frontier_sentence,
    points_table,
    write_plots,
)
from vtoken.experiments.capacity.time_limit import LeftOut
from vtoken.experiments.report.results import plain


def run(mode, concurrency, feasible=True, policy=None, modelled=False) -> PointRun:
    policy = ("" if mode == "native" else "random") if policy is None else policy
    blocks = 32 if mode == "native" else 17
    return PointRun(
        ScanPoint(
            mode=mode, policy=policy, concurrency=concurrency, feasible=feasible,
            reason="" if feasible else "preempted at step 9 with 3 resident",
            output_throughput=12.34 * concurrency if feasible and not modelled else None,
            vtoken_peak_blocks=blocks * concurrency, modelled=modelled,
            vtoken_retained_blocks_per_request=0.75 * blocks, ideal_blocks_per_request=10.0,
        ),
        demand=[(1, 8, concurrency), (2, 9, concurrency)],
    )  # fmt: skip


def half(*runs, blocks=208, modelled=False, left_out=()) -> ScanHalf:
    made = ScanHalf(Pool(usable_blocks=blocks, block_size=32, how="as given"), modelled=modelled)
    made.runs, made.left_out = list(runs), list(left_out)
    return made


MEASURED = [
    run("vtoken", 12), run("vtoken", 13, False), run("native", 6), run("native", 7, False),
]  # fmt: skip


def result(main, modelled=None, **settings) -> ScanResult:
    return ScanResult(
        ScanSettings(**settings), "now", main=main, modelled=modelled, max_tokens=1024
    )


def shown(table) -> str:
    from rich.console import Console

    console = Console(width=120)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_the_table_has_a_row_per_point_in_order_of_concurrency():
    text = shown(points_table(half(*MEASURED)))
    rows = [[c.strip() for c in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    assert rows == [
        ["6", "native", "yes", "74.0", "192", "24.0", "10.0", ""],
        ["7", "native", "no", "", "224", "24.0", "10.0", "preempted at step 9 with 3 resident"],
        ["12", "vtoken", "yes", "148.1", "204", "12.8", "10.0", ""],
        ["13", "vtoken", "no", "", "221", "12.8", "10.0", "preempted at step 9 with 3 resident"],
    ]
    assert "208 blocks of 32 tokens, measured" in text


def test_policies_are_named_where_there_are_several():
    runs = (run("naive", 2), run("naive", 2, policy="streaming-llm"))
    text = shown(points_table(half(*runs)))
    assert "naive, random" in text and "naive, streaming-llm" in text
    assert "naive, random" not in shown(points_table(half(runs[0])))
    assert frontier_sentence(half(*runs)) == (
        "naive (random) at least 2, naive (streaming-llm) at least 2"
    )


def test_the_sentence_gives_the_frontier_and_what_is_not_proven():
    assert frontier_sentence(half(*MEASURED)) == "vtoken 12 (2.0x native), native 6"
    assert frontier_sentence(half(run("native", 6))) == "native at least 6"
    assert frontier_sentence(half(run("native", 6, False))) == "native below 6"
    assert frontier_sentence(half(run("native", 1, False))) == "native 0"
    left = LeftOut(mode="naive", policy="random", concurrency=6, predicted_s=70.0, left_s=12.0)
    assert frontier_sentence(half(run("native", 6), left_out=[left])) == (
        "native at least 6, naive not run"
    )


def test_the_last_sentence_answers_both_halves():
    modelled = half(
        run("native", 175, modelled=True), run("vtoken", 320, modelled=True), blocks=5600,
        modelled=True,
    )  # fmt: skip
    last = answer_lines(result(half(*MEASURED), modelled))[-1]
    assert last == (
        "Requests of up to 1,024 tokens at once without a preemption: vtoken 12 (2.0x native), "
        "native 6, measured in 208 blocks of 32 tokens; native at least 175, vtoken at least 320 "
        "(1.8x native), modelled in the 5,600 blocks of 32 tokens that vLLM would make."
    )


def test_what_the_time_limit_left_out_is_said():
    left = LeftOut(
        mode="vtoken", policy="random", concurrency=13, predicted_s=70.4, left_s=31.0, reserved_s=5.0
    )  # fmt: skip
    lines = answer_lines(result(half(*MEASURED, left_out=[left]), time_limit_s=300.0))
    assert lines[0] == (
        "left out by --time-limit 300s: vtoken at 13: about 70 s, 31 s left of which 5 s reserved"
    )


def test_an_interrupted_scan_says_so():
    made = result(half(*MEASURED))
    made.interrupted = True
    assert any(line.startswith("interrupted") for line in answer_lines(made))


def test_sections_are_plain_and_keep_the_halves_apart():
    modelled = half(run("native", 175, modelled=True), blocks=5600, modelled=True)
    sections = json.loads(json.dumps(plain(result(half(*MEASURED), modelled).sections())))
    assert [p["concurrency"] for p in sections["points"]] == [12, 13, 6, 7]
    assert sections["modelled"]["points"][0]["modelled"] is True
    assert sections["modelled"]["pool"] == {"usable_blocks": 5600, "block_size": 32}
    assert sections["frontier"][0] == {
        "mode": "vtoken", "policy": "random", "max_concurrency": 12, "next_infeasible": 13,
    }  # fmt: skip


def test_demand_is_that_of_the_frontier_points():
    rows = csv_tables(result(half(*MEASURED)))["demand"]
    assert {(row["mode"], row["concurrency"]) for row in rows} == {("vtoken", 12), ("native", 6)}
    assert rows[0] == {
        "mode": "vtoken", "policy": "random", "concurrency": 12, "step": 1, "blocks": 8,
        "running": 12,
    }  # fmt: skip


def test_every_half_is_plotted(tmp_path):
    pytest.importorskip("matplotlib")
    modelled = half(run("native", 175, modelled=True), blocks=5600, modelled=True)
    paths = write_plots(result(half(*MEASURED), modelled), tmp_path)
    names = {"frontier.png", "block_demand.png", "throughput.png", "demand_over_time.png"}
    nothing_timed = {f"modelled_{name}" for name in names - {"throughput.png"}}
    assert {path.name for path in paths} == names | nothing_timed
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


# ---- requests ------------------------------------------------------------------------------


class Words:
    """A tokenizer with one id per word."""

    def __init__(self):
        self.ids: dict[str, int] = {}

    def encode(self, text, add_special_tokens=True):
        return [self.ids.setdefault(word, len(self.ids)) for word in text.split(" ")]

    def decode(self, ids):
        return " ".join(map(str, ids))


def sharegpt(tmp_path: Path, num: int) -> str:
    rows = [
        {"conversations": [{"from": "human", "value": f"tell me {i} " + "more " * 20},
                           {"from": "gpt", "value": "well " * (10 + i)}]}
        for i in range(num)
    ]  # fmt: skip
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(rows))
    return str(path)


def source(**settings):
    return make_prompts(ScanSettings(**settings), Words, vocab_size=100)


def test_prompts_from_texts_have_the_length_asked_for_and_are_distinct():
    prompts = source(prompt_len=40, output_len=9)
    made = [r for repeat in range(3) for r in prompts(5, repeat)]
    assert {r.prompt_len for r in made} == {40} and {r.output_len for r in made} == {9}
    assert len({tuple(r.prompt_token_ids[:16]) for r in made}) == 15
    assert prompts.max_tokens == 49


def test_asking_for_more_prompts_does_not_change_the_first_ones():
    prompts, again = source(prompt_len=40), source(prompt_len=40)
    few = [r.prompt_token_ids for r in prompts(3, 0)]
    more = [r.prompt_token_ids for r in prompts(9, 0)]
    assert more[:3] == few and [r.prompt_token_ids for r in again(9, 0)] == more


def test_defaults_are_256_and_768_tokens():
    assert source().max_tokens == 1024


def test_random_prompts_where_there_is_no_text():
    prompts = make_prompts(ScanSettings(prompt_len=32, output_len=8), None, vocab_size=100)
    assert len({tuple(r.prompt_token_ids) for repeat in (0, 1) for r in prompts(4, repeat)}) == 8


def test_a_dataset_keeps_its_own_lengths_and_repeats_take_other_rows(tmp_path):
    prompts = source(dataset_path=sharegpt(tmp_path, 10), repeats=2)
    assert prompts.max_requests == 5
    seen = [r.request_id for repeat in (0, 1) for r in prompts(5, repeat)]
    assert len(set(seen)) == 10
    # The longest conversation decides how long requests may get.
    longest = max(r.prompt_len + r.output_len for repeat in (0, 1) for r in prompts(5, repeat))
    assert prompts.max_tokens == longest > prompts.mean_tokens
    with pytest.raises(ConfigError, match="at most 5"):
        prompts(6, 0)


def test_a_dataset_with_an_output_length_generates_that_much(tmp_path):
    prompts = source(dataset_path=sharegpt(tmp_path, 4), output_len=7)
    assert {r.output_len for r in prompts(4, 0)} == {7}


def test_a_dataset_with_a_prompt_length_is_text_to_cut_from(tmp_path):
    prompts = source(dataset_path=sharegpt(tmp_path, 4), prompt_len=33, output_len=5)
    made = prompts(20, 0)  # more than there are rows
    assert {(r.prompt_len, r.output_len) for r in made} == {(33, 5)}


def test_a_trace_has_lengths_and_made_up_tokens(tmp_path):
    path = tmp_path / "trace.csv"
    rows = "".join(f"2023-11-16 18:15:0{i}.5,{40 + i},{5 + i}\n" for i in range(4))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    made = source(dataset_path=str(path))(4, 0)
    assert [(r.prompt_len, r.output_len) for r in made] == [(40 + i, 5 + i) for i in range(4)]
    assert all(len(r.prompt_token_ids) == r.prompt_len for r in made)
    assert len({tuple(r.prompt_token_ids[:16]) for r in made}) == 4


def test_a_dataset_line_that_is_not_json_is_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "fine"}\n{"prompt": oops}\n')
    with pytest.raises(ConfigError, match=r"--dataset-path '.*bad.jsonl:2'"):
        source(dataset_path=str(path))


def test_more_repeats_than_rows_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="--repeats 5: at most 4"):
        source(dataset_path=sharegpt(tmp_path, 4), repeats=5)


def test_the_configuration_in_results_is_complete_and_plain():
    row = plain(ScanSettings(engine=EngineSettings(num_kv_blocks=9)).row())
    assert row["engine"]["num_kv_blocks"] == 9 and row["vtoken"]["score_queries"] == 32
    assert row["modes"] == ["native", "naive", "vtoken"] and row["policies"] == ["random"]
    json.dumps(row)

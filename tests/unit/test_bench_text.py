"""Advice and safe budgets from rows; workloads by name; made-up tasks; open loop."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from vtoken.errors import ConfigError
from vtoken.experiments.bench.advice import advise, crossover
from vtoken.experiments.bench.bench_options import BenchSettings
from vtoken.experiments.bench.context import SuiteResult
from vtoken.experiments.bench.named_workloads import make_workload
from vtoken.experiments.bench.suites.quality import run_quality, safe_budget, sentences
from vtoken.workloads.retrieval import (
    answered,
    key_value_prompts,
    line_prompts,
    multidoc_prompts,
)


def _name(where) -> str:
    return f"{where} requests"


def test_crossover_lies_between_measured_points() -> None:
    text = crossover([(4, 0.9), (8, 0.97), (12, 1.3)], _name)
    assert "up to 8 requests use native" in text and "3 % slower" in text
    assert "from 12 requests on vToken is faster (30 % faster than native)" in text


def test_no_crossover_is_claimed_where_none_was_measured() -> None:
    never = crossover([(4, 0.9), (8, 1.01)], _name)
    assert "use native" in never and "faster (" not in never
    always = crossover([(4, 1.1), (8, 1.4)], _name)
    assert "at all measured points" in always and "10 % faster" in always
    assert "no clear crossover" in crossover([(4, 1.2), (8, 0.9), (12, 1.2)], _name)


def test_sla_advice_names_pools_and_concurrencies() -> None:
    rows = [
        {
            "workload": "text", "pool_policy": "h2o", "pool_frac": frac, "pool_blocks": blocks,
            "mode": "vtoken", "gain_over_native": gain, "concurrency": c,
            "throughput_over_native": 1 + gain,
        }
        for frac, blocks, gain in ((1.0, 40, -0.03), (0.75, 30, 0.2))
        for c in (8,)
    ]  # fmt: skip
    first, *others = advise("sla", rows)
    assert "up to a pool of 100 % of naive's demand use native" in first
    assert "from a pool of 75 %" in first and "20 % faster" in first
    assert any("40 blocks: at 8 requests at once vToken is 3 % slower" in x for x in others)


def _quality(budget: float, accuracy: float, full: float = 0.8) -> dict:
    return {
        "task": "needle", "policy": "h2o", "budget_frac": budget, "accuracy": accuracy,
        "full_kv": full, "num_questions": 20,
    }  # fmt: skip


def test_safe_budget_is_the_smallest_below_which_nothing_fell() -> None:
    assert safe_budget([_quality(0.7, 0.8), _quality(0.5, 0.79), _quality(0.3, 0.5)]) == 0.5
    # A lucky small budget below a bad one is not safe.
    assert safe_budget([_quality(0.7, 0.8), _quality(0.5, 0.6), _quality(0.3, 0.8)]) == 0.7
    assert safe_budget([_quality(0.7, 0.7)]) is None


def test_a_task_that_full_kv_cannot_do_judges_no_budget() -> None:
    rows = [_quality(0.5, 0.0, 0.0) | {"safe_budget_frac": 0.5}]
    (line,) = sentences(rows)
    assert "no budget can be judged" in line


def test_full_kv_alone_names_no_budget() -> None:
    (line,) = sentences([_quality(1.0, 0.8) | {"policy": ""}])
    assert line.endswith("no budget was measured.")


def test_files_of_one_name_are_refused(tmp_path) -> None:
    pytest.importorskip("rouge_score", reason="rouge-score is not installed")
    row = {"context": "The key is 5.", "input": "Which?", "answers": ["5"]}
    paths = [tmp_path / folder / "keys.jsonl" for folder in "ab"]
    for path in paths:
        path.parent.mkdir()
        path.write_text(json.dumps(row) + "\n")
    context = SimpleNamespace(
        settings=BenchSettings(suites=("quality",), workloads=tuple(map(str, paths))),
        tokenizer=WordTokenizer,
        max_len=4096,
    )
    with pytest.raises(ConfigError, match="--workload 'keys'.*different names"):
        run_quality(context, SuiteResult())


class WordTokenizer:
    """A token per word, space or line end, numbered as they come."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        import re

        ids = []
        for word in re.findall(r"\w+|\s|[^\w\s]", text):
            if word not in self.words:
                self.words.append(word)
            ids.append(self.words.index(word))
        return ids

    def decode(self, ids) -> str:
        return "".join(self.words[i] for i in ids)


@pytest.mark.parametrize("make", [key_value_prompts, line_prompts, multidoc_prompts])
def test_tasks_hold_their_answer_once_and_end_with_the_question(make) -> None:
    requests = make(WordTokenizer(), 5, 300, seed=3)
    prompts = [r.prompt for r in requests]
    assert len(set(prompts)) == 5
    for request in requests:
        (answer,) = request.answers
        key = request.metadata["key"]
        assert request.prompt_len <= 300 and request.metadata["num_items"] > 1
        assert key in request.prompt and answer in request.prompt
        assert request.prompt.rindex(key) > request.prompt.index(answer)
    # The asked item wanders from the first to the last.
    places = [r.prompt.index(r.metadata["key"]) for r in requests]
    assert places == sorted(places) and places[0] < places[-1]
    again = make(WordTokenizer(), 5, 300, seed=3)
    assert [r.prompt for r in again] == prompts


def test_a_prompt_too_short_for_an_item_is_refused() -> None:
    with pytest.raises(ConfigError, match="--prompt-len"):
        key_value_prompts(WordTokenizer(), 1, 20)


def test_answers_count_wherever_they_stand() -> None:
    assert answered(" it is\n Arnfeld.", ["arnfeld"])
    assert not answered("Arn feld", ["arnfeld"])


def _workload(text: str):
    return make_workload(
        text, prompt_len=40, output_len=8, get_tokenizer=WordTokenizer, vocab_size=1000, seed=1
    )


def test_workload_names_carry_lengths_and_repeats_differ() -> None:
    workload = _workload("random:32+16")
    first, other = workload.make(3, 0), workload.make(3, 1)
    assert workload.max_tokens == 48 and {r.prompt_len for r in first} == {32}
    prompts = [tuple(r.prompt_token_ids) for r in (*first, *other)]
    assert len(set(prompts)) == 6
    assert _workload("random").max_tokens == 48


@pytest.mark.parametrize(
    ("text", "named"),
    [("rndom", "did you mean 'random'"), ("./nowhere.json", "nowhere.json"), ("random:3+4", "16")],
)
def test_unknown_and_impossible_workloads_are_refused(text, named) -> None:
    with pytest.raises(ConfigError) as error:
        _workload(text)
    assert named in str(error.value)


def test_a_dataset_without_usable_rows_is_refused(tmp_path) -> None:
    path = tmp_path / "empty.json"
    path.write_text(json.dumps([{"conversations": [{"from": "human", "value": "hi"}]}]))
    with pytest.raises(ConfigError, match="usable rows"):
        make_workload(
            str(path), prompt_len=40, output_len=8, get_tokenizer=WordTokenizer, vocab_size=1000
        )


def test_a_trace_gives_every_repeat_rows_of_its_own(tmp_path) -> None:
    path = tmp_path / "trace.csv"
    lines = [f"{n},{20 + n},4" for n in range(4)]
    path.write_text("timestamp_s,input_tokens,output_tokens\n" + "\n".join(lines) + "\n")
    workload = _workload(str(path))
    assert [r.prompt_len for r in workload.make(2, 1)] == [22, 23]
    with pytest.raises(ConfigError, match="at most 4"):
        workload.make(2, 2)


def test_open_loop_waits_for_arrivals_and_counts_from_them(monkeypatch) -> None:
    from vtoken.engine import run as run_module

    clock = SimpleNamespace(now=0.0)
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.now += seconds

    fake_time = SimpleNamespace(perf_counter=lambda: clock.now, sleep=sleep)
    monkeypatch.setattr(run_module, "time", fake_time)
    from capacity_fakes import FakeWorld, make_requests

    from vtoken.config import VTokenConfig
    from vtoken.engine import EngineSettings
    from vtoken.workloads import with_arrivals

    world = FakeWorld()
    settings = EngineSettings(num_kv_blocks=64, block_size=16, max_model_len=64, max_num_seqs=8)
    engine = world.open_engine(settings, VTokenConfig(mode="native"))

    def on_step(_) -> None:
        clock.now += 1.0

    world.on_step = on_step
    requests = with_arrivals(make_requests(2, 0, 16, 3), 0.1, burstiness=float("inf"))
    result = run_module.run_requests(engine, requests, by_arrival=True)
    # Three steps of a second, then seven seconds of nothing before the second arrival at 10 s.
    assert slept == [7.0]
    assert [t.submitted_s for t in result.times.values()] == [0.0, 10.0]
    assert [t.e2el_s for t in result.times.values()] == [3.0, 3.0]

"""Datasets with too few rows, or too long ones: said before any engine is opened."""

from __future__ import annotations

import json
from contextlib import closing

import pytest
from capacity_fakes import SHAPE

from vtoken.engine import EngineSettings
from vtoken.errors import ConfigError
from vtoken.experiments.bench.bench_options import BenchSettings
from vtoken.experiments.bench.context import Context, SuiteResult
from vtoken.experiments.bench.journal import Journal
from vtoken.experiments.bench.named_workloads import make_workload
from vtoken.experiments.bench.run import run_bench
from vtoken.experiments.bench.suites import sla
from vtoken.experiments.bench.suites.questions import make_task
from vtoken.experiments.report.listener import Bar, Listener


class NoEngine(Exception):
    """An engine was asked for."""


class NoEngineContext(Context):
    """A model that is a few numbers, and no engine."""

    shape, model_path = SHAPE, "fake"

    def __init__(self, *args) -> None:
        super().__init__(*args, open_real=self._open, open_dry=self._open)

    def _open(self, *args, **kwargs):
        raise NoEngine


@pytest.fixture
def trace(tmp_path):
    """Writes a trace of requests of these many prompt and 4 output tokens; its path."""

    def write(*prompt_lens: int) -> str:
        path = tmp_path / "trace.csv"
        rows = [f"{at},{length},4" for at, length in enumerate(prompt_lens)]
        path.write_text("\n".join(["timestamp_s,input_tokens,output_tokens", *rows, ""]))
        return str(path)

    return write


def bench(suite: str, path: str, **changes):
    settings = BenchSettings(
        suites=tuple(suite.split(",")), workloads=(path,), policies=("random",),
        engine=EngineSettings(model="fake", block_size=32), **changes,
    )  # fmt: skip
    return run_bench(settings, make_context=NoEngineContext)


@pytest.mark.parametrize(
    ("suite", "changes", "asked"),
    [
        ("memory", {"num_requests": 4}, "4 x 3"),
        ("sensitivity", {"repeats": 4}, "4 x 4"),
        ("peers", {"num_requests": 6, "repeats": 2}, "6 x 2"),
        # The reference has two requests a place: 2 x 2 requests.
        ("sla", {"concurrency": "1", "ref_concurrency": 2}, "4 x 3"),
        ("sla", {"concurrency": "auto", "ref_concurrency": 2}, "4 x 3"),
        # A listed point, though it might turn out to lie above two misses.
        ("sla", {"concurrency": "1,2,6", "ref_concurrency": 1, "repeats": 1}, "12 x 1"),
        ("sla", {"num_requests": 4}, "4 x 3"),
        # The last suite's rows are missed before the first one runs.
        ("memory,sla", {"num_requests": None, "repeats": 1}, "48 x 1"),
    ],
)
def test_too_few_rows_are_said_before_any_engine_opens(trace, suite, changes, asked) -> None:
    path = trace(*[20] * 11)
    with pytest.raises(ConfigError) as error:
        bench(suite, path, **changes)
    assert str(error.value) == (
        f"--num-prompts and --repeats '{asked}': at most 11 together: {path} has 11 usable rows"
    )


@pytest.mark.parametrize(
    ("suite", "changes"),
    [
        ("memory", {"num_requests": 4}),
        ("sensitivity", {}),
        ("sla", {"concurrency": "1,2", "ref_concurrency": 2}),
        ("sla", {"concurrency": "auto", "ref_concurrency": 2}),
        # An absolute limit needs no reference.
        ("sla", {"concurrency": "1,2", "ref_concurrency": 8, "slo_p95_e2el_ms": 9.0}),
    ],
)
def test_enough_rows_are_enough(trace, suite, changes) -> None:
    with pytest.raises(NoEngine):
        bench(suite, trace(*[20] * 12), **changes)


def test_auto_tries_no_more_requests_than_there_are_rows_for(trace) -> None:
    settings = BenchSettings(concurrency="auto", repeats=3)
    workload = make_workload(
        trace(*[20] * 65), prompt_len=1, output_len=1, get_tokenizer=None, vocab_size=100
    )
    assert sla.auto_limit(settings, workload) == 10  # 2 x 10 requests, 3 times
    assert len(workload.make(20, 2)) == 20
    plenty = BenchSettings(concurrency="auto", repeats=3, num_requests=5)
    assert sla.auto_limit(plenty, workload) == sla.MAX_CONCURRENCY


def test_auto_says_how_far_the_rows_go(trace) -> None:
    path = trace(*[20] * 65)
    settings = BenchSettings(
        suites=("sla",), workloads=(path,), concurrency="auto",
        engine=EngineSettings(model="fake", block_size=32),
    )  # fmt: skip
    result = SuiteResult()
    context = NoEngineContext(settings, Journal({}), Listener(), Bar())
    with closing(context), pytest.raises(NoEngine):
        sla.run_sla(context, result)
    assert result.notes == [f"{path} has rows for at most 10 requests at once: auto tries no more."]


# ---- rows that are longer than the model ---------------------------------------------------


@pytest.mark.parametrize(("max_model_len", "longest"), [(None, 4096), (100, 100)])
def test_rows_longer_than_the_model_or_the_users_limit_are_left_out(
    trace, max_model_len, longest
) -> None:
    # With their 4 output tokens: one that just fits, one that just does not.
    path = trace(20, longest - 4, longest - 3, 30, 9000)
    settings = BenchSettings(engine=EngineSettings(model="fake", max_model_len=max_model_len))
    notes: list[str] = []
    with closing(NoEngineContext(settings, None, None, None)) as context:
        (workload,) = context.workloads([path], 1, notes)
    assert [r.prompt_len for r in workload.make(3, 0)] == [20, longest - 4, 30]
    assert (workload.max_tokens, workload.max_requests) == (longest, 3)
    (note,) = notes
    assert note == (
        f"{path}: 2 of 5 usable rows are left out, being longer than {longest:,} tokens with "
        "their output."
    )


def test_a_dataset_whose_rows_all_fit_says_nothing(trace) -> None:
    notes: list[str] = []
    with closing(NoEngineContext(BenchSettings(), None, None, None)) as context:
        context.workloads([trace(20, 30, 40)], 1, notes)
    assert notes == []


def test_rows_that_are_left_out_count_for_no_repeat(trace) -> None:
    path = trace(*[20] * 11, 9000)
    with pytest.raises(ConfigError, match="at most 11 together"):
        bench("memory", path, num_requests=4)


def test_a_dataset_of_which_no_row_fits_is_refused(trace) -> None:
    path = trace(9000, 5000)
    with pytest.raises(ConfigError) as error:
        bench("memory", path)
    assert str(error.value) == (
        f"--workload {path!r}: rows of at most 4,096 tokens with their output, which is what the "
        "model or --max-model-len takes; the shortest of its 2 has 5,004"
    )


class Words:
    """A token a word."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [len(word) for word in text.split()]


def test_long_questions_are_left_out_of_a_task(tmp_path) -> None:
    path = tmp_path / "questions.jsonl"
    rows = [{"context": "a " * n, "input": "b", "answers": ["c"]} for n in (10, 90, 20, 30)]
    path.write_text("\n".join(map(json.dumps, rows)))
    task = make_task(str(path), Words(), 2, output_len=12, max_len=100)
    assert [r.prompt_len for r in task.requests] == [12, 22]  # with the question and "Answer:"
    assert task.note.startswith(f"{path}: 1 of 4 usable rows are left out, being longer than 100")
    with pytest.raises(ConfigError, match="rows of at most 20 tokens"):
        make_task(str(path), Words(), 2, output_len=12, max_len=20)

"""Score reports: tagged by logical id, matched by step, written to files and read again."""

from __future__ import annotations

import json

import numpy as np
import pytest

from vtoken.core.messages import ScoreReport
from vtoken.errors import ConfigError
from vtoken.policies.base import ScoreKind, score_window
from vtoken.recording.decisions import RequestKey, prompt_hash
from vtoken.recording.score_files import ScoreRecorder, ScoreTrace
from vtoken.scheduling.reports import ReportBook

NAN = np.nan


def ids(*values):
    return np.array(values, np.int32)


class Table:
    """As much of a request's table as a question looks at."""

    def __init__(self, *by_index):
        self.by_index = list(by_index)
        self.num_computed_tokens = self.num_physical_tokens = len(by_index)

    def ids_by_physical_index(self):
        return ids(*self.by_index)


def ask(book, req_id, step, *by_index):
    book.ask(req_id, step, Table(*by_index), len(by_index))


def scores_for(book, req_id, step, num_ids):
    """Scores by logical id, NaN where there is none; None: no report."""
    part = book.scored_ids(req_id, step)
    if part is None:
        return None
    by_index = part.scores[part.start : part.start + part.num_ids]
    out = np.full(num_ids, NAN, np.float32)
    for i, score in zip(book.ids_asked(req_id, step).tolist(), by_index, strict=True):
        if 0 <= i < num_ids:
            out[i] = score
    return out


def report(step, **scores):
    parts = [np.array(s, np.float32) for s in scores.values()]
    start = np.concatenate([[0], np.cumsum([len(p) for p in parts])]).astype(np.int32)
    return ScoreReport(step, list(scores), start, np.concatenate(parts))


def test_scores_come_back_by_logical_id_whatever_the_layout():
    book = ReportBook()
    ask(book, "a", 5, 3, -1, 0, 2)
    ask(book, "b", 5, 0, 1)
    book.receive(report(5, a=[30, 9, 1, 20], b=[7, 8]))
    np.testing.assert_array_equal(scores_for(book, "a", 5, 5), [1, NAN, 20, 30, NAN])
    np.testing.assert_array_equal(scores_for(book, "b", 5, 2), [7, 8])
    assert book.has("a", 5) and not book.has("a", 4)


def test_a_decision_uses_the_report_of_one_step_alone():
    book = ReportBook()
    for step in (5, 6):
        ask(book, "a", step, 0, 1)
    book.receive(report(6, a=[60, 61]))
    assert scores_for(book, "a", 5, 2) is None, "asked, not answered"
    book.receive(report(5, a=[50, 51]))
    assert scores_for(book, "a", 5, 2).tolist() == [50, 51]
    assert scores_for(book, "a", 6, 2).tolist() == [60, 61]
    assert scores_for(book, "a", 7, 2) is None and scores_for(book, "b", 5, 2) is None
    assert book.asked_at("a") == 6 and book.asked_at("b") == -1


def test_the_table_says_what_a_question_is_about_until_it_changes():
    """Growth comes behind; before a change the ids are copied out; what has served is dropped."""
    table, synced = Table(4, -1, 0, 2), []

    def sync(req_id):
        synced.append(req_id)
        table.by_index += [5, 6]
        table.num_physical_tokens = table.num_computed_tokens = 6

    book = ReportBook(sync)
    for step, length in ((5, 4), (6, 6)):
        book.ask("a", step, table, length)
    book.receive(report(5, a=[40, 9, 1, 20]))
    assert book.scored_ids("a", 5).ids is None and not synced
    assert book.ids_asked("a", 6).tolist() == [4, -1, 0, 2, 5, 6] and synced == ["a"]
    assert book.ids_asked("a", 5).tolist() == [4, -1, 0, 2]
    book.hold("a", served_step=5)
    book.hold("b")
    table.by_index[:] = [6, 5, 4]
    assert book.ids_asked("a", 5) is None and not book.has("a", 5)
    book.receive(report(6, a=[40, 9, 1, 20, 50, 60]))
    assert book.scored_ids("a", 6).ids.tolist() == [4, -1, 0, 2, 5, 6]
    np.testing.assert_array_equal(scores_for(book, "a", 6, 7), [1, NAN, 20, NAN, 40, 50, 60])
    assert synced == ["a"]


def test_old_questions_are_dropped_however_irregularly_they_are_asked():
    book = ReportBook()
    for step in (1, 2, 7, 8, 15):
        ask(book, "a", step, 0)
        book.receive(report(step, a=[step]))
    assert len(book) == 1 and book.ids_asked("a", 8) is None
    assert scores_for(book, "a", 15, 1).tolist() == [15]


def test_a_report_about_a_life_before_preemption_is_dropped():
    book = ReportBook()
    ask(book, "a", 5, 0, 1)
    book.forget("a")
    book.receive(report(5, a=[1, 2]))
    assert scores_for(book, "a", 5, 2) is None and len(book) == 0
    ask(book, "a", 6, 0)
    book.receive(report(5, a=[1, 2]))
    assert scores_for(book, "a", 6, 1) is None


@pytest.mark.parametrize(
    "kind, given, counted",
    [(ScoreKind.ACCUMULATED, "all", "all"), (ScoreKind.COUNT_ABOVE_THRESHOLD, 32, 32),
     (ScoreKind.WINDOW, 8, 8), (ScoreKind.LAST, "all", 1), (ScoreKind.KEY_NORM, 32, 0),
     (ScoreKind.NONE, "all", 0)],
)  # fmt: skip
def test_results_can_say_which_queries_counted(kind, given, counted):
    assert score_window(kind, given) == {"score_kind": kind.value, "prompt_queries": counted}


@pytest.fixture
def recorded(tmp_path):
    """A trace of one prompt at lengths 6 and 9."""
    path = str(tmp_path / "scores.jsonl")
    recorder = ScoreRecorder(path, {"score_kind": "accumulated"})
    key = RequestKey(prompt_hash([1, 2, 3]), 0)
    recorder.add(key, 0, ids(5, 0, -1, 2), np.array([0.5, 0.1, 99, 0.2], np.float32))
    recorder.add(key, 0, ids(0, 2, 5, 8), np.array([1, 2, 5, 8], np.float32))
    recorder.flush()
    return path


def test_a_score_trace_answers_a_dry_run(recorded):
    trace = ScoreTrace(recorded, ScoreKind.ACCUMULATED)
    trace.bind(lambda req_id: [1, 2, 3])
    got = trace("x", 17, ids(2, -1, 0, 4, 5))
    np.testing.assert_array_equal(got, np.array([0.2, 0, 0.1, NAN, 0.5], np.float32))
    assert list(trace.lengths(prompt_hash([1, 2, 3]))) == [6, 9]
    # Between recorded lengths: the last one before; before all: the first.
    np.testing.assert_array_equal(trace("x", 18, ids(0, 7)), np.array([0.1, NAN], np.float32))
    np.testing.assert_array_equal(trace("x", 19, ids(0, 11)), np.array([1, NAN], np.float32))
    np.testing.assert_array_equal(trace("x", 20, ids(0, 3)), np.array([0.1, NAN], np.float32))


def test_a_prompt_that_was_not_recorded_is_refused(recorded):
    trace = ScoreTrace(recorded)
    trace.bind(lambda req_id: [4])
    with pytest.raises(ConfigError, match="has no scores of a request with prompt"):
        trace("x", 3, ids(0))


def test_scores_of_another_kind_are_refused(recorded):
    with pytest.raises(ConfigError, match="holds accumulated scores, the policy reads last"):
        ScoreTrace(recorded, ScoreKind.LAST)


@pytest.mark.parametrize(
    "text", ["", "{}", "hello", "[" * 100_000, json.dumps({"schema": "vtoken-scores/1"}) + "\n{}"]
)
def test_damaged_score_traces_are_refused(tmp_path, text):
    path = tmp_path / "scores.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="score trace"):
        ScoreTrace(str(path))
    with pytest.raises(ConfigError, match="score trace .*: a readable file .No such file"):
        ScoreTrace(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="--record-scores"):
        ScoreRecorder(str(tmp_path / "no" / "file"), {})

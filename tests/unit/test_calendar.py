"""The calendar of requests that have to be looked at."""

from __future__ import annotations

from vtoken.scheduling.calendar import Calendar


def test_a_request_comes_back_in_its_step_and_not_before():
    calendar = Calendar()
    calendar.watch("a")
    calendar.watch("b")
    calendar.defer("a", 5)
    for step_seq in range(1, 5):
        calendar.open(step_seq)
        assert list(calendar.watched) == ["b"]
    calendar.open(5)
    assert list(calendar.watched) == ["b", "a"]
    calendar.open(6)
    assert list(calendar.watched) == ["b", "a"]  # until it is put off again


def test_only_the_last_appointment_counts():
    calendar = Calendar()
    calendar.defer("a", 2)
    calendar.defer("a", 4)
    calendar.defer("b", 2)
    calendar.watch("b")
    calendar.defer("b", None)
    for step_seq, watched in ((1, []), (2, []), (3, []), (4, ["a"])):
        calendar.open(step_seq)
        assert list(calendar.watched) == watched


def test_a_forgotten_request_does_not_come_back():
    calendar = Calendar()
    calendar.defer("a", 2)
    calendar.watch("b")
    calendar.forget("a")
    calendar.forget("b")
    calendar.open(1)
    calendar.open(2)
    assert not calendar.watched
    calendar.watch_all(["a", "b"])
    assert list(calendar.watched) == ["a", "b"]


def test_nothing_stays_of_a_request_that_was_deferred_for_ever():
    calendar = Calendar()
    for req_id in ("gone", "watched", "deferred again"):
        calendar.watch(req_id)
        calendar.defer(req_id, 10**15)
    calendar.forget("gone")
    calendar.watch("watched")
    calendar.defer("deferred again", None)
    assert not calendar._deferred and not calendar._step_of
    assert list(calendar.watched) == ["watched"]

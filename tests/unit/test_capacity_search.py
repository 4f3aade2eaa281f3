"""Which concurrencies a scan tries, and how it keeps to a time limit. No engine, no clock."""

from __future__ import annotations

import math

import pytest

from vtoken.errors import ConfigError
from vtoken.experiments.capacity.time_limit import SAFETY, Deadline, StepTimes
from vtoken.experiments.planning.search import BisectSearch, GridSearch, parse_concurrency


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("8", (8,)), (8, (8,)), ("1-4", (1, 2, 3, 4)), ("1,2,4", (1, 2, 4)),
        ("4, 1-3 ,2", (1, 2, 3, 4)), ("auto", None), (" auto ", None), ("7-7", (7,)),
    ],
)  # fmt: skip
def test_concurrency_is_read(text, points):
    assert parse_concurrency(text) == points


@pytest.mark.parametrize(
    "text", ["0", "0-4", "1,0", "", "four", "4-1", "1,,2", "-3", "1.5", "1-", "65537", "auto,1"]
)
def test_other_concurrencies_are_refused_in_one_line(text):
    with pytest.raises(ConfigError) as error:
        parse_concurrency(text)
    assert error.value.option == "--concurrency" and error.value.value == text
    assert "1-32" in str(error.value) and "\n" not in str(error.value)


def tried_by(search, frontier: int) -> list[int]:
    """Work a search through against a world in which `frontier` requests fit."""
    tried = []
    while (n := search.next()) is not None:
        assert search.next() == n, "asking again must not change the answer"
        assert n not in tried, f"{n} is tried twice"
        tried.append(n)
        search.report(n, n <= frontier)
    return tried


def test_a_grid_is_tried_in_full_and_in_order():
    assert tried_by(GridSearch([4, 1, 16]), frontier=2) == [1, 4, 16]


def test_a_grid_goes_on_after_a_point_that_was_left_out():
    search = GridSearch([1, 2, 3])
    search.report(search.next(), True)
    search.leave_out(search.next())
    assert search.next() == 3


@pytest.mark.parametrize("limit", [1, 2, 7, 40])
def test_bisection_finds_every_frontier_from_every_guess(limit):
    for frontier in range(limit + 1):
        for guess in range(1, limit + 3):
            search = BisectSearch(guess, limit=limit)
            tried = tried_by(search, frontier)
            assert search.feasible == frontier, (frontier, guess, tried)
            # Proven on both sides, unless a side is known without a try.
            assert frontier == 0 or frontier in tried
            assert frontier == limit or frontier + 1 in tried
            # Two gallops and a bisection over the distance from the guess.
            distance = abs(frontier - min(guess, limit)) + 1
            assert len(tried) <= 3 + 2 * math.log2(distance) + 1, (frontier, guess, tried)


def test_a_right_guess_costs_the_frontier_and_one_above():
    assert tried_by(BisectSearch(12, limit=208), frontier=12) == [12, 13]


def test_a_guess_at_the_limit_needs_no_point_above():
    assert tried_by(BisectSearch(9, limit=9), frontier=9) == [9]


def test_bisection_without_a_guess_doubles_then_halves():
    assert tried_by(BisectSearch(limit=1000), frontier=11) == [1, 2, 4, 8, 16, 12, 10, 11]


def test_bisection_ends_where_a_point_is_left_out():
    search = BisectSearch(5, limit=20)
    search.report(5, True)
    search.leave_out(search.next())
    assert search.next() is None and search.feasible == 5


# ---- time ----------------------------------------------------------------------------------


def test_nothing_is_predicted_from_nothing():
    assert StepTimes().predict("native", 100, 1000) is None


def test_costs_of_steps_and_tokens_are_told_apart():
    times = StepTimes()
    for steps, tokens in ((1, 256), (8, 64), (700, 4000)):
        times.record("native", steps, tokens, 0.05 * steps + 0.002 * tokens)
    assert times.predict("native", 768, 9000) == pytest.approx(SAFETY * (0.05 * 768 + 0.002 * 9000))


def test_a_mode_that_is_slower_is_predicted_from_its_own_measurements():
    times = StepTimes()
    times.record("native", 100, 1000, 10.0)
    assert times.predict("naive", 100, 1000) == pytest.approx(SAFETY * 10.0)
    times.record("naive", 100, 1000, 30.0)
    assert times.predict("naive", 200, 2000) == pytest.approx(SAFETY * 60.0)
    assert times.predict("native", 100, 1000) > 10.0  # all modes together: the slower answer


def test_no_cost_is_ever_negative():
    times = StepTimes()
    times.record("vtoken", 1, 1000, 5.0)
    times.record("vtoken", 100, 10, 0.1)  # least squares alone would give a step a negative cost
    times.record("vtoken", 50, 500, 2.4)
    for steps, tokens in ((1, 0), (0, 1), (1000, 0), (0, 1000)):
        assert times.predict("vtoken", steps, tokens) >= 0


def test_a_deadline_lets_nothing_start_that_would_overrun_it():
    now_s = [100.0]
    deadline = Deadline(60.0, lambda: now_s[0])
    assert deadline.has_room(60.0) and not deadline.has_room(60.1)
    assert deadline.has_room(20.0, reserved_s=40.0) and not deadline.has_room(20.1, reserved_s=40.0)
    now_s[0] += 50
    assert deadline.has_room(10.0) and not deadline.has_room(11.0) and deadline.has_room(None)
    now_s[0] += 10
    assert not deadline.has_room(None) and not deadline.has_room(0.0)


def test_without_a_limit_there_is_always_room():
    assert Deadline(None, lambda: 0.0).has_room(1e9)

"""Which concurrencies a capacity scan tries: search logic alone, no engine and no clock.

A search is asked for the `next` concurrency and told what came of it (`report`, or `leave_out`
where the point was not run), until it has none left.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

from vtoken.errors import ConfigError

AUTO = "auto"
MAX_CONCURRENCY = 65536
_ALLOWED = f"whole numbers from 1 to {MAX_CONCURRENCY:,}, as in 8, 1-32 or 1,2,4, or auto"


def parse_concurrency(text: str | int) -> tuple[int, ...] | None:
    """Read `--concurrency`: the points in ascending order, or None for `auto`.

    Raises:
        ConfigError: not numbers, zero among them, or a range that runs backwards.
    """
    text = str(text).strip()
    if text == AUTO:
        return None
    points: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        first = int(match[1]) if match else 0
        last = int(match[2]) if match and match[2] else first
        if not 1 <= first <= last <= MAX_CONCURRENCY:
            raise ConfigError("--concurrency", text, _ALLOWED)
        points.update(range(first, last + 1))
    return tuple(sorted(points))


class Search(ABC):
    """What to try next, for one mode and policy."""

    @abstractmethod
    def next(self) -> int | None:
        """The concurrency to try now; None when there is nothing left to try."""

    @abstractmethod
    def report(self, concurrency: int, feasible: bool) -> None:
        """Take in the outcome of the concurrency that `next` named."""

    @abstractmethod
    def leave_out(self, concurrency: int) -> None:
        """The concurrency that `next` named was not tried, and will not be."""


class GridSearch(Search):
    """Tries every point of a list, whatever comes of it."""

    def __init__(self, points: Sequence[int]) -> None:
        assert points and min(points) >= 1, points
        self._left = sorted(points, reverse=True)

    def next(self) -> int | None:
        return self._left[-1] if self._left else None

    def report(self, concurrency: int, feasible: bool) -> None:
        assert concurrency == self._left[-1], (concurrency, self._left[-1])
        self._left.pop()

    def leave_out(self, concurrency: int) -> None:
        self.report(concurrency, False)


class BisectSearch(Search):
    """Finds the largest feasible concurrency: brackets it from a guess, then bisects.

    From the guess it goes up by 1, 2, 4, ... while points are feasible, or down likewise while
    they are not; so a right guess costs two points, and one that is off by k about 2 log k.
    Assumes that what fits for n fits for fewer.

    Args:
        guess: where the frontier is expected.
        limit: the largest concurrency worth a try: one more cannot be feasible.

    Attributes:
        feasible: the largest concurrency found feasible, 0 at first.
        infeasible: the smallest one known to be infeasible.
    """

    def __init__(self, guess: int = 1, *, limit: int = MAX_CONCURRENCY) -> None:
        assert limit >= 1, limit
        self._guess = min(max(1, guess), limit)
        self._stride = 1
        self._tried: set[int] = set()
        self._is_over = False
        self._limit = limit
        self.feasible, self.infeasible = 0, limit + 1

    def next(self) -> int | None:
        if self._is_over or self.infeasible - self.feasible == 1:
            return None
        if not self._tried:
            return self._guess
        if self.infeasible > self._limit:  # everything was feasible so far
            return min(self.feasible + self._stride, self._limit)
        if self.feasible == 0:  # nothing was so far
            return max(self.infeasible - self._stride, 1)
        return (self.feasible + self.infeasible) // 2

    def report(self, concurrency: int, feasible: bool) -> None:
        assert self.feasible < concurrency < self.infeasible, concurrency
        if self._tried:
            self._stride *= 2
        self._tried.add(concurrency)
        if feasible:
            self.feasible = concurrency
        else:
            self.infeasible = concurrency

    def leave_out(self, concurrency: int) -> None:
        self._is_over = True

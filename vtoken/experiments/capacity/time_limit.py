"""How long a point will take, from what was measured so far; and whether it may still start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

SAFETY = 1.1  # a machine that others use as well is not the same from one minute to the next


@dataclass(slots=True)
class StepTimes:
    """Fits `seconds = steps x a + tokens x b`, both at least 0, to what was measured.

    `a` is the cost of a step that does not depend on its size (weights are read once, the
    scheduler runs once), `b` that of a token. Decode attention grows with the context; that part
    ends up in `b` as soon as a whole point was measured.

    Attributes:
        records: per mode, rows of (steps, tokens, seconds).
    """

    records: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)

    def record(self, mode: str, num_steps: int, num_tokens: int, seconds: float) -> None:
        """Take in one measurement; `num_tokens` counts prompt and output tokens."""
        self.records.setdefault(mode, []).append((num_steps, num_tokens, seconds))

    def predict(self, mode: str, num_steps: int, num_tokens: int) -> float | None:
        """Seconds a run will take; None before anything was measured.

        The mode's own measurements and those of all modes are both asked, and the slower answer
        counts: a mode's own may be no more than its warm-up.
        """
        everything = [row for rows in self.records.values() for row in rows]
        fits = [_fit(rows) for rows in (everything, self.records.get(mode)) if rows]
        seconds = [num_steps * a + num_tokens * b for a, b in fits]
        return SAFETY * max(seconds) if seconds else None


def _fit(rows: list[tuple[float, float, float]]) -> tuple[float, float]:
    """Least squares with both factors at least 0: (seconds a step, seconds a token)."""
    data = np.asarray(rows, float)
    X, y = data[:, :2], data[:, 2]
    if len(rows) >= 2 and np.linalg.matrix_rank(X) == 2:
        a, b = np.linalg.lstsq(X, y, rcond=None)[0]
        if a >= 0 and b >= 0:
            return float(a), float(b)
    # One column explains it all: the one that leaves the smaller error.
    by_column = [(X[:, i] @ y) / (X[:, i] @ X[:, i]) for i in (0, 1)]
    errors = [float(np.sum((X[:, i] * by_column[i] - y) ** 2)) for i in (0, 1)]
    if errors[0] < errors[1]:
        return float(by_column[0]), 0.0
    return 0.0, float(by_column[1])


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A point that was not run, and why.

    Attributes:
        predicted_s, left_s: what it would have taken, and what there was.
        reserved_s: the part of `left_s` kept for points that matter more.
    """

    mode: str
    policy: str
    concurrency: int
    predicted_s: float
    left_s: float
    reserved_s: float = 0.0
    modelled: bool = False

    def describe(self) -> str:
        name = f"{self.mode} at {self.concurrency}" + " (modelled)" * self.modelled
        text = f"{name}: about {self.predicted_s:.0f} s, {max(0.0, self.left_s):.0f} s left"
        return text + f" of which {self.reserved_s:.0f} s reserved" * (self.reserved_s > 0)


class Deadline:
    """A time limit that is asked before a point starts.

    Args:
        limit_s: seconds from now; None is no limit.
        clock: monotonic seconds.
    """

    def __init__(self, limit_s: float | None, clock: Callable[[], float]) -> None:
        self.limit_s, self._clock, self._start = limit_s, clock, clock()

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._start

    @property
    def left_s(self) -> float:
        return float("inf") if self.limit_s is None else self.limit_s - self.elapsed_s

    def has_room(self, predicted_s: float | None, reserved_s: float = 0.0) -> bool:
        """Whether something that takes this long may start now."""
        return self.left_s > 0 and (predicted_s or 0.0) + reserved_s <= self.left_s

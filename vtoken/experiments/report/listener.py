"""What an experiment reports its progress to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Bar:
    """Progress of one piece of work; this base class shows nothing."""

    def advance(self, amount: float = 1, text: str = "") -> None:
        """Count `amount` of the work as done; `text` says what is going on now."""

    def update(self, done: float, text: str = "", total: float | None = None) -> None:
        """Set the work done so far, and the total where that changed."""


class Listener:
    """Is told how an experiment goes; this one does nothing with it."""

    def note(self, text: str) -> None:
        """Something else begins, or is worth saying."""

    @contextmanager
    def progress(self, total: float | None, description: str) -> Iterator[Bar]:
        """Around a piece of work; `total` in any unit, None where it is not known."""
        yield Bar()

"""Every exception vToken raises on purpose.

    VTokenError
    |-- ConfigError          a user's option or file is wrong             exit code 2
    |   `-- UnsupportedError this engine or model cannot run what was asked  exit code 2
    |-- EngineError          the engine failed while running              exit code 3
    `-- InvariantViolation   a check of our own found a broken invariant  exit code 1

Bugs of ours are AssertionErrors; they are not part of this tree.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class VTokenError(Exception):
    """Base of all errors that vToken raises on purpose."""

    exit_code = 3


class ConfigError(VTokenError, ValueError):
    """A setting is wrong: names the option, the value and what is allowed, in one sentence."""

    exit_code = 2

    def __init__(self, option: str, value: object, allowed: str) -> None:
        self.option, self.value, self.allowed = option, value, allowed
        super().__init__(f"{option} {value!r}: {allowed}")

    def __reduce__(self):
        return type(self), (self.option, self.value, self.allowed)


class UnsupportedError(ConfigError):
    """A combination vToken refuses at start-up; `allowed` says why and what would work."""


class EngineError(VTokenError):
    """The engine failed while running; the message says where its log is."""

    exit_code = 3


class InvariantViolation(VTokenError):
    """A check found a broken invariant.

    `invariant` is one of the names `vtoken verify` prints: I1, I2, I3, I4, conservation,
    positions, scores.
    """

    exit_code = 1

    def __init__(self, invariant: str, message: str, report: dict | None = None) -> None:
        self.invariant, self.message, self.report = invariant, message, report or {}
        super().__init__(f"{invariant}: {message}")

    def __reduce__(self):
        return type(self), (self.invariant, self.message, self.report)


def nearest(word: str, known: Iterable[str]) -> str:
    """Say which known words are near: "did you mean X?" or "one of A, B, C"."""
    known = sorted(known)
    close = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else "one of " + ", ".join(known)

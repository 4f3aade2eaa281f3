"""Checks of policy parameters, with the message a user sees."""

from __future__ import annotations

from numbers import Real
from typing import Any, TypeGuard

from vtoken.errors import ConfigError


def _number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def check_fraction(policy: str, field: str, value: object) -> None:
    """Raise ConfigError unless `value` is a number from 0 to 1."""
    if not (_number(value) and 0 <= value <= 1):
        raise ConfigError(f"policy_args of {policy}: {field}", value, "a fraction from 0 to 1")


def check_tokens(policy: str, field: str, value: object, *, odd: bool = False) -> None:
    """Raise ConfigError unless `value` is a whole number of tokens, at least 1 (and odd)."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    is_even = isinstance(value, int) and value % 2 == 0
    if not is_count or (odd and is_even):
        allowed = "an odd number of tokens, 1 or more" if odd else "tokens, 1 or more"
        raise ConfigError(f"policy_args of {policy}: {field}", value, allowed)


def check_ids(policy: str, field: str, value: Any) -> tuple[int, ...]:
    """Read vocabulary ids from any sequence (YAML and JSON give lists).

    Raises:
        ConfigError: an entry is not a whole number, 0 or more.
    """
    try:
        ids = tuple(int(i) for i in value)
        fits = all(i == j and i >= 0 for i, j in zip(ids, value, strict=True))
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ConfigError(f"policy_args of {policy}: {field}", value, "a list of vocabulary ids")
    return ids

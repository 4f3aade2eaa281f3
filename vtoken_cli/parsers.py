"""Turn an option's text, or the value a YAML file has for it, into what the code uses.

Each parser takes (value, option name) and raises ConfigError naming both.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from vtoken.errors import ConfigError
from vtoken.units import AUTO, parse_count, parse_duration_s


def text(value: Any, option: str) -> str:
    """Take text as it is; a YAML number counts as text."""
    if isinstance(value, (dict, list, bool)):
        raise ConfigError(option, value, "a single value")
    return str(value)


def flag(value: Any, option: str) -> bool:
    """Take true or false."""
    if not isinstance(value, bool):
        raise ConfigError(option, value, "true or false")
    return value


def number(value: Any, option: str) -> float:
    """Read a finite number."""
    try:
        found = float(value) if not isinstance(value, bool) else float("nan")
    except (TypeError, ValueError):
        found = float("nan")
    if found - found != 0:  # inf and nan
        raise ConfigError(option, value, "a number such as 0.5")
    return found


def count(value: Any, option: str) -> int:
    """Read a whole number from 0, with vLLM's suffixes (4k is 4,000, 4K is 4,096)."""
    if isinstance(value, (bool, dict, list)) or (isinstance(value, float) and value % 1):
        raise ConfigError(option, value, "a whole number, as in 4096, 4k (4,000) or 4K (4,096)")
    return parse_count(value if isinstance(value, int) else str(value), option)


def model_length(value: Any, option: str) -> int:
    """Read a count of tokens; "auto" is -1 as in vLLM: what memory holds."""
    return AUTO if str(value) in ("auto", str(AUTO)) else count(value, option)


def integer(value: Any, option: str) -> int:
    """Read a whole number, negative ones included."""
    try:
        return int(value if isinstance(value, int) else str(value))
    except ValueError:
        raise ConfigError(option, value, "a whole number") from None


def duration_s(value: Any, option: str) -> float:
    """Read a duration (90, 90s, 5m, 1.5h) in seconds."""
    if isinstance(value, (bool, dict, list)):
        raise ConfigError(option, value, "a duration such as 90s, 5m or 1.5h")
    return parse_duration_s(value, option)


def json_object(value: Any, option: str) -> dict[str, Any]:
    """Read a JSON object, or take a YAML mapping."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(option, value, """a JSON object such as '{"name": 1}'""")
    return found


def choice(*allowed: str) -> Callable[[Any, str], str]:
    """Make a parser that takes one of a few words."""

    def parse(value: Any, option: str) -> str:
        if value not in allowed:
            raise ConfigError(option, value, "one of " + ", ".join(allowed))
        return value

    return parse


def each(parse: Callable[[Any, str], Any]) -> Callable[[Any, str], tuple]:
    """Make a parser of values separated by commas, or of a YAML list of them, or a single one."""

    def parse_all(value: Any, option: str) -> tuple:
        return tuple(parse(word, option) for word in comma_list(value, option))

    return parse_all


def comma_list(value: Any, option: str) -> list[str]:
    """Read words separated by commas, or a YAML list of them; no word twice."""
    words = value if isinstance(value, list) else str(value).split(",")
    words = [str(word).strip() for word in words]
    if not words or "" in words or len(set(words)) < len(words):
        raise ConfigError(option, value, "different words separated by commas")
    return words

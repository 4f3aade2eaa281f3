"""Small conversions between what people type, or put into files, and what the code counts."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

from vtoken.errors import ConfigError

_MULTIPLIERS = {"": 1, "k": 1000, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
AUTO = -1  # vLLM's number for a model length that memory decides


def cdiv(a: int, b: int) -> int:
    """Divide rounding up, for non-negative `a` and positive `b`."""
    return -(-a // b)


def check_least(value: float | None, option: str, least: int = 1) -> None:
    """Refuse a number that was given and is too small.

    Raises:
        ConfigError: names the option, the value and the least.
    """
    if value is not None and value < least:
        raise ConfigError(option, value, f"a whole number, {least} or more")


def parse_count(text: str | int, option: str) -> int:
    """Read a whole number with vLLM's suffixes: 32K is 32,768, 32k is 32,000.

    Raises:
        ConfigError: `text` is not such a number.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgG]?)\s*", str(text))
    number = Decimal(match[1]) * _MULTIPLIERS[match[2]] if match else Decimal("0.5")
    if number != int(number) or number >= 2**63:
        raise ConfigError(option, text, "a whole number, as in 4096, 4k (4,000) or 4K (4,096)")
    return int(number)


def parse_duration_s(text: str | float, option: str) -> float:
    """Read a duration in seconds: 90, "90s", "5m", "1.5h".

    Raises:
        ConfigError: `text` is not such a duration.
    """
    seconds = text if isinstance(text, (int, float)) else -1.0
    if match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", str(text)):
        seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
    if not 0.0 <= seconds < 1e9:  # a generation; the system's timers end not far above
        raise ConfigError(option, text, "a duration such as 90s, 5m or 1.5h")
    return float(seconds)


def read_text(path: str | Path, option: str) -> str:
    """Read a whole file as UTF-8, whatever the locale; a byte-order mark is dropped.

    Raises:
        ConfigError: no such file, not readable, a folder, or not UTF-8: names file and line.
    """
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        allowed = "UTF-8 text, but this line has other bytes"
        raise ConfigError(option, f"{path}:{line}", allowed) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", error)
        raise ConfigError(option, str(path), f"a readable file ({why})") from error

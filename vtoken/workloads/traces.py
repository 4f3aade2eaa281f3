"""Recorded traces: arrival times and lengths of real traffic, without text.

Formats, by their owners' own documentation:

* Azure LLM inference trace (CSV): TIMESTAMP (date and time), ContextTokens, GeneratedTokens.
* BurstGPT (CSV): Timestamp (s), Request tokens, Response tokens, and others.
* ServeGen (CSV): timestamp_s, input_tokens, output_tokens, and optionally reason_ratio.
* Mooncake (JSONL): timestamp (ms), input_length, output_length, hash_ids: one id for each block
  of 512 prompt tokens, equal where the prefix up to and including the block is equal.
* Alibaba's Bailian (JSONL): the same fields and chat_id; seconds, and an id for 16 tokens.

Rows must be in the order of their arrival; times are made relative to the first row. Rows without
prompt or output tokens (failed requests) are left out, and counted in a warning.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from vtoken.errors import ConfigError, nearest
from vtoken.workloads.chat import no_usable_rows
from vtoken.workloads.files import bad_row, read_csv, read_jsonl
from vtoken.workloads.request import WorkloadRequest, take

MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
MOONCAKE_BLOCK_TOKENS, BAILIAN_BLOCK_TOKENS = 512, 16
TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
logger = logging.getLogger("vtoken.workloads")


class _Clock:
    """Turns a file's times into seconds after its first row, and refuses to run backwards."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._first_s: float | None = None
        self._last_s = float("-inf")

    def arrival_s(self, line: int, time_s: float) -> float:
        if not 0 <= time_s < float("inf"):
            raise bad_row(self._path, line, f"a time of at least 0, not {time_s:g} s")
        if time_s < self._last_s:
            back_s = self._last_s - time_s
            raise bad_row(self._path, line, f"rows sorted by time, but this is {back_s:g} s back")
        self._first_s = time_s if self._first_s is None else self._first_s
        self._last_s = time_s
        return time_s - self._first_s


def load_csv(path: str | Path, form: str, *, num: int | None = None) -> list[WorkloadRequest]:
    """Read a trace of one of `CSV_FORMATS`.

    Raises:
        ConfigError: missing columns, a value that is not a time or a token count, unsorted
            times, or fewer than `num` rows.
    """
    path, (columns, parse_time_s) = Path(path), CSV_FORMATS[form]
    clock = _Clock(path)

    def requests() -> Iterator[WorkloadRequest | None]:
        for line, (stamp, prompt, output) in read_csv(path, columns):
            arrival_s = clock.arrival_s(line, parse_time_s(path, line, stamp))
            yield _request(path, line, prompt, output, arrival_s)

    return _finish(requests(), num, path)


def load_mooncake(
    path: str | Path,
    *,
    num: int | None = None,
    hash_block_tokens: int | None = None,
    time_unit: str | None = None,
) -> list[WorkloadRequest]:
    """Read a trace with prefix hashes, as Mooncake's and Alibaba's.

    Args:
        hash_block_tokens: prompt tokens per hash id; None: what the trace's owner says.
        time_unit: one of `TIME_UNITS`; None: likewise.

    Raises:
        ConfigError: as for `load_csv`; also a row whose hash ids do not cover its prompt.
    """
    if time_unit is not None and time_unit not in TIME_UNITS:
        raise ConfigError("--time-unit", time_unit, nearest(time_unit, TIME_UNITS))
    if hash_block_tokens is not None and hash_block_tokens < 1:
        raise ConfigError("--hash-block-tokens", hash_block_tokens, "a whole number, 1 or more")
    path = Path(path)
    clock, prefixes = _Clock(path), _Prefixes()

    def requests() -> Iterator[WorkloadRequest | None]:
        for line, row in read_jsonl(path):
            if missing := [key for key in MOONCAKE_FIELDS if key not in row]:
                fields = f"fields {', '.join(MOONCAKE_FIELDS)}; {', '.join(missing)} missing"
                raise bad_row(path, line, fields)
            is_bailian = "chat_id" in row
            unit = time_unit or ("s" if is_bailian else "ms")
            time, hashes = row["timestamp"], row["hash_ids"]
            if type(time) not in (int, float) or not time < 1e18:
                raise bad_row(path, line, f"a number in timestamp ({unit}), not {time!r}")
            if not isinstance(hashes, list) or not all(type(h) is int and h >= 0 for h in hashes):
                raise bad_row(path, line, "hash_ids, a list of whole numbers from 0")
            request = _request(
                path, line, row["input_length"], row["output_length"],
                clock.arrival_s(line, time * TIME_UNITS[unit]), hashes,
                hash_block_tokens or (BAILIAN_BLOCK_TOKENS if is_bailian else MOONCAKE_BLOCK_TOKENS),
                prefixes,
            )  # fmt: skip
            yield request

    return _finish(requests(), num, path)


class _Prefixes:
    """Small numbers for prefixes, so that equal ones mean all before is equal too.

    A trace's own ids may be of any size, and may be hashes of one block's content alone.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, object], int] = {}

    def of(self, hashes: list[int]) -> tuple[int, ...]:
        last, found = -1, []
        for h in hashes:
            last = self._numbers.setdefault((last, h), len(self._numbers))
            found.append(last)
        return tuple(found)


def _finish(
    rows: Iterator[WorkloadRequest | None], num: int | None, path: Path
) -> list[WorkloadRequest]:
    num_empty = 0

    def usable() -> Iterator[WorkloadRequest]:
        nonlocal num_empty
        for request in rows:
            if request is None:
                num_empty += 1
            else:
                yield request

    requests = take(usable(), num, str(path))
    if not requests:
        empty = Counter({"no prompt or output tokens": num_empty} if num_empty else {})
        raise no_usable_rows(path, num_empty, empty)
    if num_empty:
        logger.warning("%s: left out %d rows without prompt or output tokens", path, num_empty)
    return requests


def _request(
    path: Path,
    line: int,
    prompt: object,
    output: object,
    arrival_s: float,
    hashes: list[int] = (),
    block_tokens: int = 0,
    prefixes: _Prefixes | None = None,
) -> WorkloadRequest | None:
    """One row, or None where it has no prompt or no output tokens."""
    prompt_len = _tokens(path, line, "prompt", prompt)
    output_len = _tokens(path, line, "output", output)
    if not prompt_len or not output_len:
        return None
    if block_tokens:
        needed = -(-prompt_len // block_tokens)
        if len(hashes) != needed:
            raise bad_row(
                path, line,
                f"one hash id for each {block_tokens} tokens: {needed} for {prompt_len:,} tokens, "
                f"found {len(hashes)} (--hash-block-tokens sets how many tokens an id stands for)",
            )  # fmt: skip
    return WorkloadRequest(
        request_id=f"{path.stem}-{line}",
        prompt_len=prompt_len,
        output_len=output_len,
        arrival_s=arrival_s,
        prefix_hash_ids=prefixes.of(hashes) if prefixes else (),
        prefix_block_tokens=block_tokens,
        dataset=path.stem,
    )


def _tokens(path: Path, line: int, what: str, value: object) -> int:
    """Read a token count from a CSV string or a JSON number."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 12:
        value = int(value)
    if type(value) is not int or not 0 <= value < 10**12:
        raise bad_row(path, line, f"a whole number of {what} tokens, not {value!r:.40}")
    return value


def _parse_seconds(path: Path, line: int, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise bad_row(path, line, f"a time in seconds, not {text!r:.40}") from None


_FRACTION = re.compile(r"\.(\d+)")


def _parse_stamp(path: Path, line: int, text: str) -> float:
    """Read "2023-11-16 18:17:03.9799600" (any number of digits, optional zone) as seconds."""
    fraction = _FRACTION.search(text)
    whole = _FRACTION.sub("", text, count=1)
    try:
        moment = datetime.fromisoformat(whole)
    except ValueError:
        raise bad_row(path, line, f"a date and time in TIMESTAMP, not {text!r}") from None
    if moment.tzinfo is None:
        # Any fixed zone will do, for only differences count; the local one may jump by an hour.
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp() + (float("0." + fraction[1]) if fraction else 0.0)


CSV_FORMATS: dict[str, tuple[tuple[str, str, str], Callable[[Path, int, str], float]]] = {
    "azure": (("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _parse_stamp),
    "servegen": (("timestamp_s", "input_tokens", "output_tokens"), _parse_seconds),
    "burstgpt": (("Timestamp", "Request tokens", "Response tokens"), _parse_seconds),
}
"""(columns, how a time is read) of each trace that is a CSV table."""

load_azure, load_servegen, load_burstgpt = (
    partial(load_csv, form=form) for form in ("azure", "servegen", "burstgpt")
)

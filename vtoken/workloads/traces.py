"""Recorded traces: arrival times and lengths of real traffic, without text.

Formats, by their owners' own documentation:

* Azure LLM inference trace (CSV): TIMESTAMP (date and time), ContextTokens, GeneratedTokens.
* Mooncake (JSONL): timestamp (ms), input_length, output_length, hash_ids: one id for each block
  of 512 prompt tokens, equal where the prefix up to and including the block is equal.
* ServeGen (CSV): timestamp_s, input_tokens, output_tokens, and optionally reason_ratio.

Rows must be in the order of their arrival; times are made relative to the first row.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from vtoken.workloads.chat import no_usable_rows
from vtoken.workloads.files import bad_row, read_csv, read_jsonl
from vtoken.workloads.request import WorkloadRequest, take

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
SERVEGEN_COLUMNS = ("timestamp_s", "input_tokens", "output_tokens")
MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
MOONCAKE_BLOCK_TOKENS = 512


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


def load_azure(path: str | Path, *, num: int | None = None) -> list[WorkloadRequest]:
    """Read an Azure LLM inference trace.

    Raises:
        ConfigError: missing columns, a value that is not a time or a token count, unsorted
            times, or fewer than `num` rows.
    """
    return _load_csv(Path(path), AZURE_COLUMNS, _parse_stamp, num)


def load_servegen(path: str | Path, *, num: int | None = None) -> list[WorkloadRequest]:
    """Read requests sampled with ServeGen; raises as `load_azure` does."""
    return _load_csv(Path(path), SERVEGEN_COLUMNS, _parse_seconds, num)


def _load_csv(path: Path, columns: tuple[str, ...], parse_time_s, num: int | None):
    clock = _Clock(path)
    rows = (
        _request(path, line, prompt, output, clock.arrival_s(line, parse_time_s(path, line, stamp)))
        for line, (stamp, prompt, output) in read_csv(path, columns)
    )
    return _finish(rows, num, path)


def load_mooncake(path: str | Path, *, num: int | None = None) -> list[WorkloadRequest]:
    """Read a Mooncake trace with its prefix hashes.

    Raises:
        ConfigError: as for `load_azure`; also a row whose hash ids do not cover its prompt.
    """
    path = Path(path)
    clock = _Clock(path)
    rows = (_mooncake_request(path, line, row, clock) for line, row in read_jsonl(path))
    return _finish(rows, num, path)


def _mooncake_request(path: Path, line: int, row: dict, clock: _Clock) -> WorkloadRequest:
    if missing := [key for key in MOONCAKE_FIELDS if key not in row]:
        fields = f"fields {', '.join(MOONCAKE_FIELDS)}; {', '.join(missing)} missing"
        raise bad_row(path, line, fields)
    time_ms, hashes = row["timestamp"], row["hash_ids"]
    if isinstance(time_ms, bool) or not isinstance(time_ms, (int, float)):
        raise bad_row(path, line, f"milliseconds in timestamp, not {time_ms!r}")
    if not isinstance(hashes, list) or not all(type(h) is int and h >= 0 for h in hashes):
        raise bad_row(path, line, "hash_ids, a list of whole numbers from 0")
    request = _request(
        path, line, row["input_length"], row["output_length"],
        clock.arrival_s(line, time_ms / 1000), tuple(hashes),
    )  # fmt: skip
    needed = -(-request.prompt_len // MOONCAKE_BLOCK_TOKENS)
    if len(hashes) != needed:
        raise bad_row(
            path, line,
            f"one hash id for each {MOONCAKE_BLOCK_TOKENS} tokens: {needed} for "
            f"{request.prompt_len:,} tokens, found {len(hashes)}",
        )  # fmt: skip
    return request


def _finish(rows: Iterator[WorkloadRequest], num: int | None, path: Path) -> list[WorkloadRequest]:
    requests = take(rows, num, str(path))
    if not requests:
        raise no_usable_rows(path, 0, Counter())
    return requests


def _request(
    path: Path,
    line: int,
    prompt_len: object,
    output_len: object,
    arrival_s: float,
    hashes: tuple[int, ...] = (),
) -> WorkloadRequest:
    return WorkloadRequest(
        request_id=f"{path.stem}-{line}",
        prompt_len=_tokens(path, line, "prompt", prompt_len),
        output_len=_tokens(path, line, "output", output_len),
        arrival_s=arrival_s,
        prefix_hash_ids=hashes,
        prefix_block_tokens=MOONCAKE_BLOCK_TOKENS if hashes else 0,
        dataset=path.stem,
    )


def _tokens(path: Path, line: int, what: str, value: object) -> int:
    """Read a token count of at least 1 from a CSV string or a JSON number."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if type(value) is not int or value < 1:
        raise bad_row(path, line, f"a whole number of {what} tokens of at least 1, not {value!r}")
    return value


def _parse_seconds(path: Path, line: int, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise bad_row(path, line, f"seconds in timestamp_s, not {text!r}") from None


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

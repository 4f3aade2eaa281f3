"""Read dataset files line by line, so that every complaint can name file and line.

All readers raise `ConfigError("--dataset-path", "FILE:LINE", ...)`: one sentence, exit code 2.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

from vtoken.errors import ConfigError

OPTION = "--dataset-path"


def bad_row(path: Path, line: int, allowed: str) -> ConfigError:
    """Make the error for one line of a dataset."""
    return ConfigError(OPTION, f"{path}:{line}", allowed)


def read_text(path: str | Path) -> str:
    """Read a whole file as UTF-8 (a byte-order mark is dropped).

    Raises:
        ConfigError: no such file, not readable, a folder, or not UTF-8.
    """
    path = Path(path)
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise bad_row(path, line, "UTF-8 text, but this line has other bytes") from error
    except OSError as error:
        raise ConfigError(OPTION, str(path), f"a readable file ({error.strerror})") from error


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict]]:
    """Yield (line number, object) for each line that is not blank.

    Raises:
        ConfigError: a line is not JSON, or not a JSON object.
    """
    path = Path(path)
    # Not splitlines(): JSON strings may hold U+2028 and its like unescaped.
    for number, text in enumerate(read_text(path).split("\n"), start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise bad_row(path, number, f"one JSON object per line ({error.msg})") from error
        if not isinstance(row, dict):
            raise bad_row(path, number, f"one JSON object per line, not {_kind(row)}")
        yield number, row


def read_json_rows(path: str | Path) -> Iterator[tuple[int, dict]]:
    """Yield (line number, object) of a JSON list of objects, or of a JSONL file.

    In a list the line is the one on which the object begins.

    Raises:
        ConfigError: neither of the two; names the line on which parsing failed.
    """
    path = Path(path)
    text = read_text(path)
    start = len(text) - len(text.lstrip())
    if text[start : start + 1] != "[":
        yield from read_jsonl(path)
        return
    decoder = json.JSONDecoder()
    at, line, counted = start + 1, 1 + text.count("\n", 0, start), start
    while True:
        while text[at : at + 1] and text[at] in " \t\r\n,":
            at += 1
        line, counted = line + text.count("\n", counted, at), at
        if text[at : at + 1] == "]":
            return
        try:
            row, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise bad_row(path, error.lineno, f"a JSON list of objects ({error.msg})") from error
        if not isinstance(row, dict):
            raise bad_row(path, line, f"a JSON list of objects, not of {_kind(row)}")
        yield line, row


def read_csv(path: str | Path, columns: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, the values of `columns`) for each row below the header.

    Raises:
        ConfigError: a column is missing from the header, or a row is shorter than it.
    """
    path = Path(path)
    reader = csv.reader(io.StringIO(read_text(path)))
    header = [name.strip() for name in next(reader, [])]
    missing = [name for name in columns if name not in header]
    if missing:
        found = ", ".join(header) or "nothing"
        raise bad_row(
            path, 1, f"columns {', '.join(columns)}; {', '.join(missing)} missing among {found}"
        )
    places = [header.index(name) for name in columns]
    for row in reader:
        if not row:
            continue
        if len(row) < len(header):
            raise bad_row(path, reader.line_num, f"{len(header)} columns, found {len(row)}")
        yield reader.line_num, [row[place].strip() for place in places]


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", type(None): "null", bool: "true or false"}
    return names.get(type(value), "a number")

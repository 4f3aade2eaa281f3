"""Read dataset files line by line, so that every complaint can name file and line.

All readers raise `ConfigError("--dataset-path", "FILE:LINE", ...)`: one sentence, exit code 2.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

from vtoken import units
from vtoken.errors import ConfigError

OPTION = "--dataset-path"


def bad_row(path: Path, line: int, allowed: str) -> ConfigError:
    """Make the error for one line of a dataset."""
    return ConfigError(OPTION, f"{path}:{line}", allowed)


def read_text(path: str | Path) -> str:
    """Read a whole dataset; raises as `vtoken.units.read_text` does."""
    return units.read_text(path, OPTION)


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
        form = "one JSON object per line"
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _not_json(error, path, number, form) from error
        yield number, _checked(row, text, path, number, form)


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
        form, first = "a JSON list of objects", at
        try:
            row, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise _not_json(error, path, getattr(error, "lineno", line), form) from error
        yield line, _checked(row, text[first:at], path, line, form)


def read_csv(path: str | Path, columns: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, the values of `columns`) for each row below the header.

    Raises:
        ConfigError: a column is missing from the header, or a row is shorter than it.
    """
    path = Path(path)
    rows = _csv_rows(path)
    _, header = next(rows, (1, []))
    missing = [name for name in columns if name not in header]
    if missing:
        found = ", ".join(header) or "nothing"
        raise bad_row(
            path, 1, f"columns {', '.join(columns)}; {', '.join(missing)} missing among {found}"
        )
    places = [header.index(name) for name in columns]
    for line, row in rows:
        if len(row) < len(header):
            raise bad_row(path, line, f"{len(header)} columns, found {len(row)}")
        yield line, [row[place] for place in places]


def csv_header(path: str | Path) -> list[str]:
    """The names of a CSV file's columns; empty where it has none."""
    return next(_csv_rows(Path(path)), (1, []))[1]


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line number, fields) of each row that is not blank, the header too."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""))
    try:
        for row in reader:
            if row:
                yield reader.line_num, [value.strip() for value in row]
    except csv.Error as error:
        raise bad_row(path, reader.line_num, f"a CSV table ({error})") from error


def _not_json(error: Exception, path: Path, line: int, form: str) -> ConfigError:
    why = "nested too deep" if isinstance(error, RecursionError) else getattr(error, "msg", error)
    return bad_row(path, line, f"{form} ({why})")


def _checked(row: object, text: str, path: Path, line: int, form: str) -> dict:
    if not isinstance(row, dict):
        raise bad_row(path, line, f"{form}, not {_kind(row)}")
    if "\\ud" in text.lower():  # half of a pair of escapes is no character: no tokenizer takes it
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])
            raise bad_row(path, line, f"text in Unicode, but {half} is half a character") from None
    return row


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", type(None): "null", bool: "true or false"}
    return names.get(type(value), "a number")

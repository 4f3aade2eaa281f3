"""What every command writes: one JSON file in one form, and flat tables beside it.

    {"schema_version", "command", "config", "environment", "started_at", ...sections}

Sections are the command's own (`pool`, `frontier`, `points`, `runs`, `suites`, ...). Field names
are a contract with scripts: those of `vllm bench serve` where it has one, else `vtoken_*`.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime
from enum import Enum
from pathlib import Path

import numpy as np

from vtoken.errors import ConfigError

SCHEMA_VERSION = 1


def utc_now() -> str:
    """The time now, as `started_at` wants it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def make_result(
    command: str,
    config: object,
    *,
    environment: Mapping[str, object],
    started_at: str,
    **sections: object,
) -> dict[str, object]:
    """Put a result together, all of it plain Python.

    Args:
        config: the complete configuration: a mapping, dataclass or pydantic model.
        environment: from `collect_environment`.
        sections: `points=`, `runs=`, `frontier=`, ... as the command's contract names them;
            objects with a `row()` are flattened.
    """
    head = {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "config": config,
        "environment": environment,
        "started_at": started_at,
    }
    assert not set(head) & set(sections), set(head) & set(sections)
    return plain(head | sections)


def settings_row(settings: object) -> dict[str, object]:
    """The complete configuration of an experiment; modes and policies stand beside vToken's."""
    values = dict(vars(settings))
    engine, config = vars(values.pop("engine")), values.pop("config")
    values["engine"] = {k: dict(v) if k == "vllm_args" else v for k, v in engine.items()}
    return values | {"vtoken": config.model_dump(exclude={"mode", "policy"})}


def save_result(
    result: Mapping[str, object],
    folder: str | Path,
    tables: Mapping[str, Iterable[Mapping[str, object]]] | None = None,
) -> list[Path]:
    """Write `result.json` and one CSV file per table into a folder, which is made if need be.

    Returns:
        The paths written.
    """
    paths = [write_json(Path(folder) / "result.json", result)]
    for name, rows in (tables or {}).items():
        paths.append(write_csv(Path(folder) / f"{name}.csv", rows))
    return paths


def write_json(path: str | Path, value: object) -> Path:
    """Write JSON so that a reader sees the old file or the new one, never half of one."""
    text = json.dumps(plain(value), indent=2, allow_nan=False, ensure_ascii=False)
    return write_bytes(path, (text + "\n").encode())


def write_csv(path: str | Path, rows: Iterable[Mapping[str, object]]) -> Path:
    """Write flat rows; columns are all keys in order of first appearance, None is empty.

    A nested value is written as JSON. Atomic like `write_json`.
    """
    flat = [plain(row) for row in rows]
    columns = list(dict.fromkeys(key for row in flat for key in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    for row in flat:
        writer.writerow(
            {k: json.dumps(v) if isinstance(v, (dict, list)) else v for k, v in row.items()}
        )
    return write_bytes(path, out.getvalue().encode())


def plain(value: object) -> object:
    """Turn a value into what JSON knows: dict, list, str, int, float, bool, None.

    numpy numbers and arrays, dataclasses, pydantic models, objects with a `row()`, enums, paths,
    sets and dates are converted; NaN and infinity become None, for JSON has no word for them.

    Raises:
        TypeError: anything else: a result must not hold an object's repr by accident.
    """
    if value is None or (isinstance(value, (str, bool, int)) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {k if isinstance(k, str) else str(plain(k)): plain(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(plain(v) for v in value)
    # Before the iterables: a pydantic model iterates over its fields.
    if callable(getattr(value, "row", None)):
        return plain(value.row())
    if callable(getattr(value, "model_dump", None)):
        return plain(value.model_dump())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (Path, date)):
        return str(value)
    if isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray)):
        return [plain(v) for v in value]
    raise TypeError(f"{type(value).__name__} is not a result value: {value!r}")


def write_bytes(path: str | Path, data: bytes) -> Path:
    """Write a file so that a reader sees the old one or the new one, never half of one."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder: a rename across file systems is a copy, and not atomic.
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        allowed = f"a folder that can be written to ({error.strerror})"
        raise ConfigError("--output", str(path.parent), allowed) from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)  # mkstemp's 0600 would hide results from colleagues
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path

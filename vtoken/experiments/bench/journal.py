"""Runs already measured, by name: kept in a file as they come, and read back by `--resume`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from vtoken.errors import ConfigError
from vtoken.experiments.bench.measure import Record
from vtoken.experiments.report.results import plain, write_bytes

FILE_NAME = "runs.jsonl"
_FREE = {"suites", "repeats", "peers", "peer_args"}  # may differ between a run and its resumption


class Journal:
    """Records by key; written to `folder/runs.jsonl` as they come where there is a folder.

    Args:
        settings: the complete configuration, the first line of the file.
        resume: a folder, or a runs.jsonl, whose records need not be measured again.

    Raises:
        ConfigError: the file to resume is not one of these, or of other settings; or the folder
            cannot be written to.
    """

    def __init__(
        self, settings: Mapping[str, object], folder: Path | None = None, resume: Path | None = None
    ) -> None:
        self.records: dict[str, Record] = {}
        self.num_resumed = 0
        self._settings = plain(settings)
        if resume is not None:
            self._read(resume / FILE_NAME if resume.is_dir() else resume)
        self._path = None if folder is None else folder / FILE_NAME
        if self._path is not None:
            self._start()

    def _start(self) -> None:
        lines = [json.dumps({"settings": self._settings}) + "\n"]
        lines += [_line(key, record) for key, record in self.records.items()]
        try:
            write_bytes(self._path, "".join(lines).encode())  # it may be the file that was read
        except OSError as error:
            raise ConfigError(
                "--output", str(self._path.parent), f"a folder to write to ({error.strerror})"
            ) from None

    def _read(self, path: Path) -> None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ConfigError(
                "--resume", str(path), f"the output folder of an earlier run ({error.strerror})"
            ) from None
        for number, line in enumerate(lines):
            try:
                entry = json.loads(line)
                if number == 0:
                    self._check(path, entry["settings"])
                    continue
                record = Record(
                    values=entry["values"], shares=entry["shares"], histogram=entry["histogram"]
                )
                self.records[entry["key"]] = record
            except (ValueError, KeyError, TypeError) as error:
                if isinstance(error, ConfigError):
                    raise
                if number and number == len(lines) - 1:
                    break  # the run was ended while it wrote this line
                raise ConfigError("--resume", f"{path}:{number + 1}", "a line of runs") from None
        self.num_resumed = len(self.records)

    def _check(self, path: Path, recorded: Mapping[str, object]) -> None:
        for key, value in self._settings.items():
            if key not in _FREE and recorded.get(key) != value:
                raise ConfigError(
                    "--resume", str(path),
                    f"runs of the same settings; {key} was {recorded.get(key)!r}, is {value!r}",
                )  # fmt: skip

    def get(self, key: str) -> Record | None:
        return self.records.get(key)

    def put(self, key: str, record: Record) -> None:
        """Keep a record; on disk before this returns."""
        self.records[key] = record
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line(key, record))


def _line(key: str, record: Record) -> str:
    entry = {
        "key": key, "values": record.values, "shares": record.shares,
        "histogram": record.histogram,
    }  # fmt: skip
    return json.dumps(plain(entry)) + "\n"

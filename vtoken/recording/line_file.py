"""A file of JSON lines that a run writes as it goes: the record of its decisions, or of its scores."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path

from vtoken.errors import ConfigError

logger = logging.getLogger("vllm.vtoken")


class LineFile:
    """A header, then one JSON line for each `append`; they wait in memory until `flush`.

    A file that can be written no longer (a full disk) ends with its last whole line; it is said
    once, and the run goes on without it.
    """

    def __init__(self, option: str, path: str, header: dict) -> None:
        """Begin the file anew.

        Raises:
            ConfigError: it cannot be written; `option` is what named it.
        """
        self.path = Path(path)
        self._option = option
        self._lines: list[str] = []
        self._has_failed = False
        try:
            self.path.write_text(json.dumps(header) + "\n")
        except OSError as error:
            raise ConfigError(option, path, f"a file to write ({error.strerror})") from None

    def append(self, line: dict) -> None:
        if not self._has_failed:
            self._lines.append(json.dumps(line))

    def flush(self) -> None:
        """Append the waiting lines to the file."""
        if not self._lines:
            return
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a") as file:
                file.write("\n".join(self._lines) + "\n")
        except OSError as error:
            self._has_failed = True
            with contextlib.suppress(OSError):
                os.truncate(self.path, size)
            logger.error(
                "%s %s: %s; what was written is whole, the run goes on without it",
                self._option, self.path, error.strerror,
            )  # fmt: skip
        self._lines.clear()

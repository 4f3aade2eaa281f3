"""A file of JSON lines that a run writes as it goes: the record of its decisions, or of its scores."""

from __future__ import annotations

import json
from pathlib import Path

from vtoken.errors import ConfigError


class LineFile:
    """A header, then one JSON line for each `append`; they wait in memory until `flush`."""

    def __init__(self, option: str, path: str, header: dict) -> None:
        """Begin the file anew.

        Raises:
            ConfigError: it cannot be written; `option` is what named it.
        """
        self.path = Path(path)
        self._lines: list[str] = []
        try:
            self.path.write_text(json.dumps(header) + "\n")
        except OSError as error:
            raise ConfigError(option, path, f"a file to write ({error.strerror})") from None

    def append(self, line: dict) -> None:
        self._lines.append(json.dumps(line))

    def flush(self) -> None:
        """Append the waiting lines to the file."""
        if self._lines:
            with self.path.open("a") as file:
                file.write("\n".join(self._lines) + "\n")
            self._lines.clear()

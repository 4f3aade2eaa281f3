"""The one place where commands write: results to stdout, everything else to stderr.

    out.print(table)                 # a result for people; dropped under --json
    out.result({...})                # the result for scripts; written under --json only
    out.note("using both cores")     # on stderr, dropped under --quiet
    out.detail(...)                  # on stderr, under --verbose only
    out.warn(...)                    # on stderr, always
    with out.progress(12, "points") as bar:
        bar.advance(text="concurrency 8")

Commands print nothing themselves.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from vtoken.experiments.report.listener import Bar, Listener

PLAIN_PROGRESS_EVERY_S = 10.0


class Output(Listener):
    """Write a command's results and its chatter.

    Args:
        as_json: write the result as JSON and nothing else to stdout.
        quiet: no notes and no progress.
        verbose: details as well.
        stdout, stderr: where to; the process's own by default.
    """

    def __init__(
        self,
        *,
        as_json: bool = False,
        quiet: bool = False,
        verbose: bool = False,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        self.as_json, self.quiet, self.verbose = as_json, quiet, verbose
        self._stdout, self._stderr = stdout, stderr
        self._console: Any = None

    def print(self, *renderables: object) -> None:
        """Show results to people: text with Rich markup, tables, panels."""
        if not self.as_json:
            self.console.print(*renderables, highlight=False)

    def result(self, result: object) -> None:
        """Hand the result to scripts, as one JSON document."""
        if self.as_json:
            print(json.dumps(result, indent=2, default=_plain), file=self.stdout, flush=True)

    def note(self, text: str) -> None:
        """Say something worth knowing that is not a result."""
        if not self.quiet:
            self._say(text)

    def detail(self, text: str) -> None:
        """Say something only the curious want."""
        if self.verbose:
            self._say(text)

    def warn(self, text: str) -> None:
        """Say something that must not be missed."""
        self._say(f"warning: {text}")

    @contextmanager
    def progress(self, total: float | None, description: str) -> Iterator[Bar]:
        """Show progress on stderr: a bar on a terminal, a line now and then elsewhere.

        Args:
            total: amount of work, in any unit; None where it is not known.
        """
        if self.quiet:
            yield Bar()
        elif self.stderr.isatty():
            yield from _bar(self.stderr, total, description)
        else:
            yield _PlainBar(self._say, total, description)

    @property
    def stdout(self) -> TextIO:
        return self._stdout or sys.stdout

    @property
    def stderr(self) -> TextIO:
        return self._stderr or sys.stderr

    @property
    def console(self) -> Any:
        """Rich's console on stdout, made at first use: importing Rich takes a moment."""
        if self._console is None:
            from rich.console import Console

            class QuietlyBroken(Console):
                def on_broken_pipe(self) -> None:  # Rich would exit with code 1
                    raise BrokenPipeError

            # Rich cuts tables to 80 columns where it cannot see a terminal.
            width = None if self.stdout.isatty() or "COLUMNS" in os.environ else 120
            self._console = QuietlyBroken(file=self.stdout, width=width)
        return self._console

    @contextmanager
    def stdout_claimed(self) -> Iterator[None]:
        """Keep stdout for results: what libraries and their processes print goes to stderr.

        vLLM, its workers and the C++ libraries below write to file descriptor 1 themselves, so
        replacing `sys.stdout` alone would not keep JSON output clean.
        """
        before = self._stdout
        sys.stdout.flush()
        own = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
        os.dup2(2, 1)
        self._stdout, self._console = before or own, None
        try:
            yield
        finally:
            sys.stdout.flush()
            own.flush()
            os.dup2(own.fileno(), 1)
            own.close()
            self._stdout, self._console = before, None

    def _say(self, text: str) -> None:
        print(text, file=self.stderr, flush=True)


class _PlainBar(Bar):
    def __init__(self, say: Any, total: float | None, description: str) -> None:
        self._say, self._total, self._description = say, total, description
        self._done, self._shown_at_s = 0.0, float("-inf")

    def advance(self, amount: float = 1, text: str = "") -> None:
        self.update(self._done + amount, text)

    def update(self, done: float, text: str = "", total: float | None = None) -> None:
        self._done, self._total = done, total or self._total
        now_s = time.monotonic()
        finished = self._total is not None and done >= self._total
        if now_s - self._shown_at_s < PLAIN_PROGRESS_EVERY_S and not finished:
            return
        self._shown_at_s = now_s
        of_total = f"/{self._total:g}" if self._total else ""
        self._say(f"{self._description}: {done:g}{of_total} {text}".rstrip())


class _RichBar(Bar):
    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task = bar, task

    def advance(self, amount: float = 1, text: str = "") -> None:
        self._bar.update(self._task, advance=amount, text=text)

    def update(self, done: float, text: str = "", total: float | None = None) -> None:
        self._bar.update(self._task, completed=done, text=text, total=total)


def _bar(stderr: TextIO, total: float | None, description: str) -> Iterator[Bar]:
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeRemainingColumn(),
        rich_progress.TextColumn("{task.fields[text]}"),
    )
    with rich_progress.Progress(*columns, console=Console(file=stderr), transient=True) as bar:
        yield _RichBar(bar, bar.add_task(description, total=total, text=""))


def _plain(value: Any) -> Any:
    """Turn paths and NumPy numbers into what JSON knows."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} in a result is not JSON")

"""What a command hands over at its end: files where wanted, tables and sentences, the result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

from vtoken_cli.given import Run

NOTHING_FITS, INTERRUPTED = 1, 130
NO_PLOTS = "no plots: there is nothing to draw, or matplotlib is not installed"


def deliver(
    run: Run,
    report: Mapping[str, Any],
    *,
    tables: Mapping[str, Iterable[Mapping[str, object]]],
    write: Callable[[Path], object] | None = None,
    shown: Iterable[object] = (),
    lines: Iterable[str] = (),
    files: str | None = "result.json, tables and plots",
) -> None:
    """Write, show and hand over a result.

    Args:
        tables: for CSV files.
        write: writes what else there is, plots above all; says whether it did.
        shown: Rich renderables.
        lines: plain sentences below them.
        files: what the folder holds, in words; None says nothing.
    """
    from rich.markup import escape

    from vtoken.experiments.report.results import save_result

    if run.output_dir is not None:
        # The figures first: a plot that fails must not cost them.
        save_result(report, run.output_dir, tables)
        if write is not None and not write(run.output_dir):
            run.out.warn(NO_PLOTS)
        if files is not None:
            run.out.note(f"{files} are in {run.output_dir}")
    if shown := list(shown):
        run.out.print(*shown)
    for line in lines:
        run.out.print(escape(line))
    run.out.result(report)


def end(*, interrupted: bool = False, failed: bool = False) -> None:
    """End a command with the exit code of what became of it."""
    if interrupted or failed:
        raise typer.Exit(INTERRUPTED if interrupted else NOTHING_FITS)

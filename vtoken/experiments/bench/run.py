"""Which suites there are, and running them one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from vtoken.errors import ConfigError
from vtoken.experiments.bench.advice import advise
from vtoken.experiments.bench.bench_options import BenchSettings
from vtoken.experiments.bench.context import Context, SuiteResult
from vtoken.experiments.bench.journal import Journal
from vtoken.experiments.bench.suites import NEEDS_TIMES, SUITES
from vtoken.experiments.report.listener import Listener
from vtoken.experiments.report.results import settings_row, utc_now


@dataclass
class BenchResult:
    """Attributes:
    suites: results by suite, those that were run or begun.
    interrupted: Ctrl-C ended it; the journal has every run that was complete.
    """

    settings: BenchSettings
    started_at: str
    suites: dict[str, SuiteResult] = field(default_factory=dict)
    interrupted: bool = False
    num_resumed: int = 0

    @property
    def nothing_met(self) -> bool:
        return any(suite.nothing_met for suite in self.suites.values())


def suite_module(name: str):
    """The module of a suite; it has `run_NAME`, `sentences` and `PAPER`.

    `DEFAULT_WORKLOADS` where `--workload` names requests. Its largest run takes `NUM_REQUESTS` of
    them unless the user says otherwise, or `largest_run(settings)` where it has that.
    """
    return import_module(f"vtoken.experiments.bench.suites.{name}")


def run_bench(
    settings: BenchSettings,
    *,
    folder: Path | None = None,
    resume: Path | None = None,
    listener: Listener | None = None,
    make_context: Callable[..., Context] = Context,
) -> BenchResult:
    """Run the suites that were asked for.

    Args:
        folder: where runs are kept as they come; None: nowhere.
        resume: the folder of an earlier benchmark of the same settings.
    """
    listener = listener or Listener()
    result = BenchResult(settings, utc_now())
    suites = settings.chosen_suites
    for suite in suites:
        if settings.dry_run and suite in NEEDS_TIMES:
            if settings.suites != ("all",):
                counted = ", ".join(s for s in SUITES if s not in NEEDS_TIMES)
                raise ConfigError("--dry-run", suite, f"one of {counted}: the others need a model")
            suites = tuple(s for s in suites if s != suite)
    journal = Journal(settings_row(settings), folder, resume)
    result.num_resumed = journal.num_resumed
    with (
        listener.progress(None, "bench") as bar,
        closing(make_context(settings, journal, listener, bar)) as context,
    ):
        try:
            _check_rows(suites, context)
            for suite in suites:
                listener.note(f"suite {suite}")
                result.suites[suite] = SuiteResult()  # kept, whatever ends the suite
                getattr(suite_module(suite), f"run_{suite}")(context, result.suites[suite])
        except KeyboardInterrupt:
            result.interrupted = True
    for name, suite in result.suites.items():
        suite.notes += suite_module(name).sentences(suite.rows)
        suite.advice += advise(name, suite.rows)
    return result


def _check_rows(suites: Sequence[str], context: Context) -> None:
    """Refuse datasets that are too short for any of the suites, before the first one runs."""
    settings = context.settings
    largest = 0
    for module in map(suite_module, suites):
        if hasattr(module, "largest_run"):
            largest = max(largest, module.largest_run(settings))
        elif hasattr(module, "DEFAULT_WORKLOADS"):
            largest = max(largest, settings.num_requests or module.NUM_REQUESTS)
    if largest:
        context.workloads((), largest, [])

"""`vtoken profile`: what the mechanism costs, and where the time goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtoken.errors import ConfigError
from vtoken_cli.command import command
from vtoken_cli.delivery import deliver, end
from vtoken_cli.given import Run
from vtoken_cli.options import Opt, shared_rows
from vtoken_cli.parsers import choice, count

if TYPE_CHECKING:
    from vtoken.experiments.profile.profile_options import ProfileSettings
    from vtoken.experiments.profile.run import ProfileResult

SUITES = ("overhead", "step", "kernels", "scale", "all")

OWN = (
    Opt("suite", parse=choice(*SUITES), metavar="|".join(SUITES), default="all",
        help="What to measure."),
    Opt("concurrency", metavar="N,M", default="16,48",
        help="Running requests: all of them for overhead, the first for step."),
    Opt("prompt_len", parse=count, metavar="TOKENS", default="128",
        help="Prompt tokens of the shortest request."),
    Opt("steps", parse=count, metavar="N", default="80",
        help="Measured decode steps, per engine and pair."),
    Opt("events", parse=count, metavar="N", default="100",
        help="Relocation events to time, at least."),
    Opt("clock", parse=choice("wall", "cpu"), metavar="wall|cpu", default="wall",
        help="Of paired steps; cpu: this process's CPU time, on a machine that others use as well."),
    Opt("trace", metavar="FILE", help="Write the step suite's calls in Chrome's trace format."),
)  # fmt: skip
_NAMES = {"steps": "num_steps", "events": "num_events"}


@command(
    *shared_rows(mode="native,vtoken (of the step suite)"), *OWN, many=("mode", "concurrency"),
    starts_engine=True,
)  # fmt: skip
def profile(run: Run) -> None:
    """Measure what the mechanism costs.

    overhead: hooks against stock vLLM in paired steps, time per relocation event, reclaim against
    naive. step: where a step's time goes. kernels: ours against vLLM's own. scale: cost against
    running requests and context, metadata per token.
    """
    from vtoken.experiments.profile.run import run_profile, write_plots
    from vtoken.experiments.profile.show import answer_lines, tables

    settings = make_settings(run)
    with run.out.progress(None, "profile") as bar:
        result = run_profile(settings, lambda text: bar.advance(text=text))
    is_drawn = {"step", "scale"} & set(result.rows)
    deliver(
        run, make_report(result), tables=result.rows, shown=tables(result),
        lines=answer_lines(result), files="result.json and tables",
        write=(lambda folder: write_plots(result, folder)) if is_drawn else None,
    )  # fmt: skip
    end(interrupted=result.interrupted)


def make_settings(run: Run) -> ProfileSettings:
    """Turn what the user gave into settings, and check them before anything starts."""
    from vtoken.experiments.profile.profile_options import BLOCK_SIZE, ProfileSettings
    from vtoken.experiments.profile.profile_options import SUITES as ALL
    from vtoken.models import resolve_model

    own: dict[str, Any] = {_NAMES.get(k, k): v for k, v in run.own.items()}
    suite = own.pop("suite", "all")
    if "trace" in own:
        own["trace"] = Path(own["trace"]).expanduser()
    if "concurrency" in run.many:
        own["concurrencies"] = tuple(_running(text) for text in run.many["concurrency"])
    shared = run.settings()
    shared["config"].make_budget(shared["engine"].block_size or BLOCK_SIZE)
    settings = ProfileSettings(**shared, **own, suites=ALL if suite == "all" else (suite,))
    if suite != "kernels":
        resolve_model(settings.engine.model, run.out.note)
    return settings


def _running(text: str) -> int:
    value = count(text, "--concurrency")
    if value < 1:
        raise ConfigError("--concurrency", text, "whole numbers of requests from 1, as in 16,48")
    return value


def make_report(result: ProfileResult) -> dict[str, Any]:
    """The result file's content."""
    from vtoken.experiments.report.environment import collect_environment
    from vtoken.experiments.report.results import make_result

    settings = result.settings
    return make_result(
        "profile",
        settings,
        environment=collect_environment(block_size=settings.block_size),
        started_at=result.started_at,
        **result.rows,
    )

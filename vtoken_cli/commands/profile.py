"""`vtoken profile`: what the mechanism costs, and where the time goes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vtoken.errors import ConfigError
from vtoken_cli.options import ENGINE, VTOKEN, Opt, Run, command
from vtoken_cli.parsers import choice, count

if TYPE_CHECKING:
    from vtoken.experiments.profile.profile_options import ProfileSettings
    from vtoken.experiments.profile.run import ProfileResult

SUITES = ("overhead", "step", "kernels", "scale", "all")
INTERRUPTED = 130

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
_DEFAULTS = {"mode": "native,vtoken (of the step suite)"}
_SHARED = [replace(row, default=_DEFAULTS.get(row.key, row.default)) for row in (*VTOKEN, *ENGINE)]


@command(*_SHARED, *OWN, many=("mode", "concurrency"), starts_engine=True)
def profile(run: Run) -> None:
    """Measure what the mechanism costs.

    overhead: hooks against stock vLLM in paired steps, time per relocation event, reclaim against
    naive. step: where a step's time goes. kernels: ours against vLLM's own. scale: cost against
    running requests and context, metadata per token.
    """
    from vtoken.experiments.profile.run import run_profile
    from vtoken.experiments.profile.show import answer_lines, tables

    settings = make_settings(run)
    with run.out.progress(None, "profile") as bar:
        result = run_profile(settings, lambda text: bar.advance(text=text))
    report = make_report(result)
    if run.output_dir is not None:
        _write(run, result, report)
    run.out.print(*tables(result))
    for line in answer_lines(result):
        run.out.print(line)
    run.out.result(report)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)


def make_settings(run: Run) -> ProfileSettings:
    """Turn what the user gave into settings, and check them before anything starts.

    Raises:
        ConfigError: a setting is wrong.
    """
    from vtoken.config import VTokenConfig
    from vtoken.engine.settings import EngineSettings
    from vtoken.experiments.profile.profile_options import BLOCK_SIZE, ProfileSettings
    from vtoken.experiments.profile.profile_options import SUITES as ALL
    from vtoken.models import resolve_model

    own: dict[str, Any] = {_NAMES.get(k, k): v for k, v in run.own.items()}
    suite = own.pop("suite", "all")
    if "trace" in own:
        own["trace"] = Path(own["trace"]).expanduser()
    if "mode" in run.many:
        own["modes"] = tuple(run.many["mode"])
    if "concurrency" in run.many:
        own["concurrencies"] = tuple(_running(text) for text in run.many["concurrency"])
    config = VTokenConfig.from_mapping(run.vtoken)
    config.make_budget(run.engine.get("block_size") or BLOCK_SIZE)
    settings = ProfileSettings(
        config=config,
        engine=EngineSettings(**{"model": "smollm2-135m", **run.engine}, vllm_args=run.vllm_args()),
        suites=ALL if suite == "all" else (suite,),
        **own,
    )
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
    from vtoken.experiments.report.results import collect_environment, make_result

    settings = result.settings
    return make_result(
        "profile",
        settings,
        environment=collect_environment(block_size=settings.block_size),
        started_at=result.started_at,
        **result.rows,
    )


def _write(run: Run, result: ProfileResult, report: dict[str, Any]) -> None:
    from vtoken.experiments.profile.run import write_plots
    from vtoken.experiments.report.results import save_result

    save_result(report, run.output_dir, result.rows)
    drawn = write_plots(result, run.output_dir)
    if not drawn and {"step", "scale"} & set(result.rows):
        run.out.warn("no plots: matplotlib is not installed")
    run.out.note(f"result.json and tables are in {run.output_dir}")

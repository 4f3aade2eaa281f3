"""`vtoken capacity-scan`: how many requests fit into the KV pool at once, per mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from vtoken_cli.options import ENGINE, VTOKEN, Opt, Run, command
from vtoken_cli.parsers import count, duration_s, text
from vtoken_cli.planning import PLANNING, plan, take_planning

if TYPE_CHECKING:
    from vtoken.experiments.capacity.scan_options import ScanSettings
    from vtoken.experiments.capacity.scan_result import ScanResult

NOTHING_FITS, INTERRUPTED = 1, 130

OWN = (
    Opt("prompt_len", parse=count, metavar="TOKENS", default="256",
        help="Prompt tokens of each request."),
    Opt("output_len", parse=count, metavar="TOKENS", default="768",
        help="Tokens each request generates."),
    Opt("dataset_path", metavar="FILE", default="texts that come with vToken",
        help="Requests of a dataset; with --prompt-len, prompts cut from its text."),
    Opt("concurrency", parse=text, metavar="N|N-M|N,M|auto", default="auto",
        help="Requests at once to try: a list, or bracket and bisect."),
    Opt("repeats", parse=count, metavar="N", default="1",
        help="Runs of each point, with prompts of their own; throughput is their mean."),
    Opt("time_limit_s", "--time-limit", parse=duration_s, metavar="TIME",
        default="5m where no pool is given, else none",
        help="No measured point starts that would overrun it, from the first engine's start."),
    Opt("dry_run", switch=True, help="vLLM's scheduler and block pool with no model."),
    Opt("replay_scores", metavar="FILE",
        help="Scores for dry runs, of a run with --record-scores; without: random ones."),
)  # fmt: skip

_DEFAULTS = {"mode": "native,naive,vtoken", "policy": "random"}
_SHARED = [replace(row, default=_DEFAULTS.get(row.key, row.default)) for row in (*VTOKEN, *ENGINE)]


@command(*_SHARED, *OWN, *PLANNING, many=("mode", "policy"), starts_engine=True)
def capacity_scan(run: Run) -> None:
    """Find how many requests fit into the KV pool at once, per mode.

    A point is feasible when all its requests were resident at once and none was preempted. With
    neither --num-kv-blocks nor --kv-cache-memory-bytes, a CPU answers twice: modelled for the pool
    that vLLM would make, measured in a small one.
    """
    if (planning := take_planning(run)) is not None:
        if not plan(run, planning, make_settings):
            raise typer.Exit(NOTHING_FITS)
        return

    from vtoken.experiments.capacity.scan import CapacityScan

    scan = CapacityScan(make_settings(run), listener=_listener(run))
    result = scan.run()
    report = make_report(result)
    if run.output_dir is not None:
        _write(run, result, report)
    _print(run, result)
    run.out.result(report)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not result.is_feasible:
        raise typer.Exit(NOTHING_FITS)


def make_settings(run: Run) -> ScanSettings:
    """Turn what the user gave into settings.

    Raises:
        ConfigError: a setting is wrong.
    """
    from vtoken.config import VTokenConfig
    from vtoken.engine.settings import EngineSettings
    from vtoken.experiments.capacity.scan_options import DEFAULT_TIME_LIMIT_S, ScanSettings

    lists = {
        name: tuple(run.many[key])
        for name, key in (("modes", "mode"), ("policies", "policy"))
        if key in run.many
    }
    settings = ScanSettings(
        config=VTokenConfig.from_mapping(run.vtoken),
        engine=EngineSettings(**run.engine, vllm_args=run.vllm_args()),
        **lists,
        **run.own,
    )
    if settings.is_bare and settings.time_limit_s is None:
        settings = replace(settings, time_limit_s=DEFAULT_TIME_LIMIT_S)
    return settings


def make_report(result: ScanResult) -> dict[str, Any]:
    """The result file's content."""
    from vtoken.experiments.report.results import collect_environment, make_result

    pool = result.main.pool
    return make_result(
        "capacity-scan",
        result.settings.row(),
        environment=collect_environment(
            block_size=pool.block_size, usable_kv_blocks=pool.usable_blocks
        ),
        started_at=result.started_at,
        **result.sections(),
    )


def _write(run: Run, result: ScanResult, report: dict[str, Any]) -> None:
    from vtoken.experiments.capacity.show import csv_tables, write_plots
    from vtoken.experiments.report.results import save_result

    # The figures first: a plot that fails must not cost them.
    save_result(report, run.output_dir, csv_tables(result))
    if not write_plots(result, run.output_dir):
        run.out.warn("no plots: there is nothing to draw, or matplotlib is not installed")
    run.out.note(f"result.json, tables and plots are in {run.output_dir}")


def _print(run: Run, result: ScanResult) -> None:
    from rich.markup import escape

    from vtoken.experiments.capacity.show import answer_lines, points_table

    for half in (result.modelled, result.main):
        if half is not None and half.runs:
            run.out.print(points_table(half))
    for line in answer_lines(result):
        run.out.print(escape(line))


def _listener(run: Run):
    from vtoken.experiments.capacity.scan_result import ScanListener

    class Listener(ScanListener):
        """Shows how a scan goes, on stderr."""

        def stage(self, text: str) -> None:
            run.out.note(text)

        @contextmanager
        def point(self, label: str, num_output_tokens: int) -> Iterator[Callable[[int], None]]:
            with run.out.progress(num_output_tokens, label) as bar:
                yield bar.update

    return Listener()

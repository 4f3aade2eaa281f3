"""`vtoken capacity-scan`: how many requests fit into the KV pool at once, per mode."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vtoken_cli.command import command
from vtoken_cli.delivery import deliver, end
from vtoken_cli.given import Run
from vtoken_cli.options import Opt, shared_rows
from vtoken_cli.parsers import count, duration_s, text
from vtoken_cli.planning import PLANNING, plan, take_planning

if TYPE_CHECKING:
    from vtoken.experiments.capacity.scan_options import ScanSettings
    from vtoken.experiments.capacity.scan_result import ScanResult

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

_SHARED = shared_rows(mode="native,naive,vtoken", policy="random")


@command(*_SHARED, *OWN, *PLANNING, many=("mode", "policy"), starts_engine=True)
def capacity_scan(run: Run) -> None:
    """Find how many requests fit into the KV pool at once, per mode.

    A point is feasible when all its requests were resident at once and none was preempted. With
    neither --num-kv-blocks nor --kv-cache-memory-bytes, a CPU answers twice: modelled for the pool
    that vLLM would make, measured in a small one.
    """
    if (planning := take_planning(run)) is not None:
        return end(failed=not plan(run, planning, make_settings))

    from vtoken.experiments.capacity.scan import CapacityScan
    from vtoken.experiments.capacity.show import answer_lines, csv_tables, points_table, write_plots

    result = CapacityScan(make_settings(run), listener=run.out).run()
    halves = [half for half in (result.modelled, result.main) if half is not None and half.runs]
    deliver(
        run, make_report(result), tables=csv_tables(result), shown=map(points_table, halves),
        lines=answer_lines(result), write=lambda folder: write_plots(result, folder),
    )  # fmt: skip
    end(interrupted=result.interrupted, failed=not result.is_feasible)


def make_settings(run: Run) -> ScanSettings:
    """Turn what the user gave into settings."""
    from vtoken.experiments.capacity.scan_options import DEFAULT_TIME_LIMIT_S, ScanSettings

    settings = ScanSettings(**run.settings(), **run.own)
    if settings.is_bare and settings.time_limit_s is None:
        settings = replace(settings, time_limit_s=DEFAULT_TIME_LIMIT_S)
    return settings


def make_report(result: ScanResult) -> dict[str, Any]:
    """The result file's content."""
    from vtoken.experiments.report.environment import collect_environment
    from vtoken.experiments.report.results import make_result

    pool = result.main.pool
    return make_result(
        "capacity-scan", result.settings.row(), started_at=result.started_at, **result.sections(),
        environment=collect_environment(
            block_size=pool.block_size, usable_kv_blocks=pool.usable_blocks
        ),
    )  # fmt: skip

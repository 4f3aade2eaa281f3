"""`vtoken bench`: paired runs of modes and policies, the paper's evaluation as suites."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtoken.experiments.bench.suites import BY_NAME_ONLY, SUITES
from vtoken.modes import MODES
from vtoken_cli.command import command
from vtoken_cli.delivery import deliver, end
from vtoken_cli.given import Run
from vtoken_cli.options import Opt, shared_rows
from vtoken_cli.parsers import choice, comma_list, count, each, json_object, number, text

if TYPE_CHECKING:
    from vtoken.experiments.bench.bench_options import BenchSettings


def concurrency(value: Any, option: str) -> str:
    """Read a list of concurrencies; a YAML list is joined."""
    return ",".join(map(str, value)) if isinstance(value, list) else text(value, option)


def _goodput(value: Any, option: str) -> dict[str, float]:
    from vtoken.engine.benchmark_metrics import parse_goodput

    if isinstance(value, dict):
        value = " ".join(f"{k}:{v}" for k, v in value.items())
    return parse_goodput(text(value, option))


OWN = (
    Opt("suites", "--suite", parse=comma_list, metavar="NAME,...", default="memory",
        help=f"What to run: {', '.join((*SUITES, 'all'))}; {', '.join(BY_NAME_ONLY)} only by name."),
    Opt("workloads", "--workload", parse=comma_list, metavar="NAME|FILE,...",
        default="the suite's own", help="text, random or a dataset; :256+96 sets its lengths."),
    Opt("prompt_len", parse=count, metavar="TOKENS", help="Prompts of workloads without lengths."),
    Opt("output_len", parse=count, metavar="TOKENS", help="Output of workloads without lengths."),
    Opt("num_requests", "--num-prompts", parse=count, metavar="N", default="the suite's own",
        help="Requests of a run."),
    Opt("concurrency", "--concurrency --max-concurrency", parse=concurrency,
        metavar="N|N-M|N,M|auto", default="the suite's own",
        help="Closed loop: requests at once; in sla the grid, or auto to bracket and bisect."),
    Opt("request_rate", parse=number, metavar="PER_S", help="Open loop: requests per second."),
    Opt("burstiness", parse=number, metavar="X", default="1: Poisson",
        help="Open loop: below 1 arrivals come in bursts."),
    Opt("goodput_ms", "--goodput", parse=_goodput, metavar="'ttft:500 tpot:50'",
        help="Limits in ms that a request must keep to count in request_goodput."),
    Opt("repeats", parse=count, metavar="N", default="3",
        help="Pairs of every comparison, each with prompts of its own."),
    Opt("clock", parse=choice("wall", "cpu"), metavar="wall|cpu", default="wall",
        help="cpu: times are this process's CPU time, on a machine that others use as well."),
    Opt("ratios", parse=each(number), metavar="F,...", default="0.3,0.5,0.7",
        help="Eviction ratios of memory, sensitivity and quality."),
    Opt("ref_concurrency", parse=count, metavar="N", default="8",
        help="sla: concurrency at which naive sets the limit and the pool."),
    Opt("sla_factor", parse=number, metavar="X", default="1.05",
        help="sla: the limit as a multiple of naive's p95 there."),
    Opt("slo_p95_e2el_ms", "--slo-p95", parse=number, metavar="MS",
        help="sla: an absolute limit on p95 latency instead."),
    Opt("pool_fracs", parse=each(number), metavar="F,...", default="1,0.75",
        help="sla: pools as shares of naive's demand there."),
    Opt("block_sizes", parse=each(count), metavar="N,...", default="16,32,48,64",
        help="sensitivity: tokens per block."),
    Opt("thresholds", parse=each(number), metavar="F,...", default="0,0.1,0.3,0.5",
        help="sensitivity: fragmentation thresholds."),
    Opt("degrees", "--sharing-degrees", parse=each(count), metavar="N,...", default="1,2,4,8",
        help="prefix, sharing: requests that share a prefix."),
    Opt("prefix_len", parse=count, metavar="TOKENS", help="prefix, sharing: tokens that are shared."),
    Opt("suffix_len", parse=count, metavar="TOKENS", help="prefix, sharing: tokens of their own."),
    Opt("peers", parse=json_object, metavar="JSON",
        help="""peers: interpreters of other environments, '{"kvpress": "venv/bin/python"}': """
        "openvino, openvino-eviction, kvpress; NAME:LABEL once more."),
    Opt("peer_args", parse=json_object, metavar="JSON", help="peers: further settings by peer."),
    Opt("resume", metavar="DIR", help="Take the runs that an earlier --output has, of the same "
        "settings."),
    Opt("dry_run", switch=True, help="vLLM's scheduler and block pool with no model: counts."),
)  # fmt: skip

_MODES = f"Modes to compare: {', '.join(MODES)}; in memory native alone says what each policy would free."
_SHARED = [
    replace(row, help=_MODES) if row.key == "mode" else row
    for row in shared_rows(mode="native,naive,vtoken", policy="h2o,scissorhands,random")
]


@command(*_SHARED, *OWN, many=("mode", "policy"), starts_engine=True)
def bench(run: Run) -> None:
    """Compare modes and policies in paired runs.

    Each suite is one part of the paper's evaluation; examples/experiments has a YAML for each.
    Runs take turns over the same prompts (A B A B), tables hold medians and ratios of pairs.
    """
    from vtoken.experiments.bench.output_files import csv_tables, make_bench_result, write_pages
    from vtoken.experiments.bench.run import run_bench
    from vtoken.experiments.bench.show import closing_lines, suite_table

    resume = run.own.pop("resume", None)
    result = run_bench(
        make_settings(run),
        folder=run.output_dir,
        resume=None if resume is None else Path(resume).expanduser(),
        listener=run.out,
    )
    report = make_bench_result(result)
    deliver(
        run, report, tables=csv_tables(result),
        write=lambda folder: write_pages(result, report, folder),
        shown=[suite_table(name, suite.rows) for name, suite in result.suites.items() if suite.rows],
        lines=closing_lines(result), files="result.json, summary.csv, report.html and plots",
    )  # fmt: skip
    end(interrupted=result.interrupted, failed=result.nothing_met)


def make_settings(run: Run) -> BenchSettings:
    """Turn what the user gave into settings."""
    from vtoken.experiments.bench.bench_options import BenchSettings

    own = {k: tuple(v) if isinstance(v, list) else v for k, v in run.own.items()}
    return BenchSettings(**run.settings(), **own)

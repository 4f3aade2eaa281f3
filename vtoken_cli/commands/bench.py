"""`vtoken bench`: paired runs of modes and policies, the paper's evaluation as suites."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vtoken_cli.options import ENGINE, VTOKEN, Opt, Run, command
from vtoken_cli.parsers import choice, comma_list, count, json_object, number, text

if TYPE_CHECKING:
    from vtoken.experiments.bench.bench_options import BenchSettings
    from vtoken.experiments.bench.run import BenchResult

NOTHING_MET, INTERRUPTED = 1, 130
SUITES = "memory, sla, sensitivity, prefix, quality, peers, all"


def numbers(value: Any, option: str) -> tuple[float, ...]:
    """Read numbers separated by commas, or a YAML list of them."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = [value]
    return tuple(number(word, option) for word in comma_list(value, option))


def counts(value: Any, option: str) -> tuple[int, ...]:
    """Read whole numbers separated by commas, or a YAML list of them."""
    value = [value] if isinstance(value, int) and not isinstance(value, bool) else value
    return tuple(count(word, option) for word in comma_list(value, option))


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
        help=f"What to run: {SUITES} (peers only by name, or where one is given)."),
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
    Opt("ratios", parse=numbers, metavar="F,...", default="0.3,0.5,0.7",
        help="Eviction ratios of memory, sensitivity and quality."),
    Opt("ref_concurrency", parse=count, metavar="N", default="8",
        help="sla: concurrency at which naive sets the limit and the pool."),
    Opt("sla_factor", parse=number, metavar="X", default="1.05",
        help="sla: the limit as a multiple of naive's p95 there."),
    Opt("slo_p95_e2el_ms", "--slo-p95", parse=number, metavar="MS",
        help="sla: an absolute limit on p95 latency instead."),
    Opt("pool_fracs", parse=numbers, metavar="F,...", default="1,0.75",
        help="sla: pools as shares of naive's demand there."),
    Opt("block_sizes", parse=counts, metavar="N,...", default="16,32,48,64",
        help="sensitivity: tokens per block."),
    Opt("thresholds", parse=numbers, metavar="F,...", default="0,0.1,0.3,0.5",
        help="sensitivity: fragmentation thresholds."),
    Opt("degrees", "--sharing-degrees", parse=counts, metavar="N,...", default="1,2,4,8",
        help="prefix: requests that share a prefix."),
    Opt("prefix_len", parse=count, metavar="TOKENS", help="prefix: tokens that are shared."),
    Opt("suffix_len", parse=count, metavar="TOKENS", help="prefix: tokens of their own."),
    Opt("peers", parse=json_object, metavar="JSON",
        help="""peers: interpreters of other environments, '{"kvpress": "venv/bin/python"}': """
        "openvino, openvino-eviction, kvpress; NAME:LABEL once more."),
    Opt("peer_args", parse=json_object, metavar="JSON", help="peers: further settings by peer."),
    Opt("resume", metavar="DIR", help="Take the runs that an earlier --output has, of the same "
        "settings."),
    Opt("dry_run", switch=True, help="vLLM's scheduler and block pool with no model: counts."),
)  # fmt: skip

_DEFAULTS = {"mode": "native,naive,vtoken", "policy": "h2o,scissorhands,random"}
_HELP = {
    "mode": "Modes to compare: native, indirection, naive, vtoken; in memory native alone says "
    "what each policy would free.",
}
_SHARED = [
    replace(
        row, default=_DEFAULTS.get(row.key, row.default), help=_HELP.get(row.key, row.help)
    )
    for row in (*VTOKEN, *ENGINE)
]  # fmt: skip


@command(*_SHARED, *OWN, many=("mode", "policy"), starts_engine=True)
def bench(run: Run) -> None:
    """Compare modes and policies in paired runs.

    Each suite is one part of the paper's evaluation; examples/experiments has a YAML for each.
    Runs take turns over the same prompts (A B A B), tables hold medians and ratios of pairs.
    """
    from vtoken.experiments.bench.output_files import make_bench_result, write_files
    from vtoken.experiments.bench.run import run_bench

    resume = run.own.pop("resume", None)
    settings = make_settings(run)
    with run.out.progress(None, "bench") as bar:
        result = run_bench(
            settings,
            folder=run.output_dir,
            resume=None if resume is None else Path(resume).expanduser(),
            listener=_listener(run, bar),
        )
    report = make_bench_result(result)
    if run.output_dir is not None:
        if not write_files(result, report, run.output_dir):
            run.out.warn("no plots: there is nothing to draw, or matplotlib is not installed")
        run.out.note(f"result.json, summary.csv, report.html and plots are in {run.output_dir}")
    _print(run, result)
    run.out.result(report)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)
    if result.nothing_met:
        raise typer.Exit(NOTHING_MET)


def make_settings(run: Run) -> BenchSettings:
    """Turn what the user gave into settings.

    Raises:
        ConfigError: a setting is wrong.
    """
    from vtoken.config import VTokenConfig
    from vtoken.engine.settings import EngineSettings
    from vtoken.experiments.bench.bench_options import BenchSettings

    own = {k: tuple(v) if isinstance(v, list) else v for k, v in run.own.items()}
    lists = {
        name: tuple(run.many[key])
        for name, key in (("modes", "mode"), ("policies", "policy"))
        if key in run.many
    }
    return BenchSettings(
        config=VTokenConfig.from_mapping(run.vtoken),
        engine=EngineSettings(**run.engine, vllm_args=run.vllm_args()),
        **lists,
        **own,
    )


def _print(run: Run, result: BenchResult) -> None:
    from rich.markup import escape

    from vtoken.experiments.bench.show import closing_lines, suite_table

    for name, suite in result.suites.items():
        if suite.rows:
            run.out.print(suite_table(name, suite.rows))
    for line in closing_lines(result):
        run.out.print(escape(line))


def _listener(run: Run, bar: Any):
    from vtoken.experiments.bench.pairing import BenchListener

    class Listener(BenchListener):
        """Shows how a benchmark goes, on stderr."""

        def stage(self, text: str) -> None:
            run.out.note(text)

        def progress(self, done_tokens: float, total_tokens: float, text: str) -> None:
            bar.update(round(done_tokens), text, total=round(total_tokens))

    return Listener()

"""The planning half of `vtoken capacity-scan`: devices, traces and fleets that are not here.

capacity-scan --dry-run --device h100-80g --model ... [--target-concurrency N]
capacity-scan --dry-run --device ... --trace FILE [--replicas N|auto --router NAME]
capacity-scan --config examples/experiments/fig9_capacity.yaml        (cases: a list of scans)
"""

from __future__ import annotations

from typing import Any

from vtoken.errors import ConfigError
from vtoken_cli.options import Opt, Run
from vtoken_cli.parsers import choice, count, number
from vtoken_cli.planning_cases import run_cases
from vtoken_cli.planning_output import finish, plot_demand, rows_table, say_memory, step_cost


def _cases(value: Any, option: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(case, dict) for case in value):
        raise ConfigError(option, value, "a list of cases in a --config file")
    return value


def _replicas(value: Any, option: str) -> int | str:
    return "auto" if str(value) == "auto" else count(value, option)


PLANNING = (
    Opt("device", metavar="NAME", help="Plan for this device: h100-80g, a100-40g, l4, mi300x, ..."),
    Opt("cost_profile", metavar="DEVICE|FILE", default="the device's",
        help="Rates that modelled times come from."),
    Opt("target_concurrency", parse=count, metavar="N",
        help="Say what each mode needs for N requests at once."),
    Opt("target_context", parse=count, metavar="TOKENS", default="prompt and output together",
        help="Tokens of each of those requests."),
    Opt("trace", metavar="FILE", help="Replay a trace: Mooncake JSONL, Azure or ServeGen CSV."),
    Opt("num_requests", parse=count, metavar="N", default="all", help="First N of the trace."),
    Opt("rate_scale", parse=number, metavar="FACTOR", default="1",
        help="Replay the trace at FACTOR times its rate."),
    Opt("replicas", parse=_replicas, metavar="N|auto", default="1",
        help="Servers behind a router; auto: the fewest that meet the SLO."),
    Opt("router", parse=choice("round-robin", "least-loaded", "prefix"), metavar="NAME",
        default="round-robin", help="round-robin, least-loaded or prefix."),
    Opt("max_replicas", parse=count, metavar="N", default="64", help="Where auto gives up."),
    Opt("approximate", switch=True,
        help="Fleets on a quick model, calibrated on the real scheduler; marked."),
    Opt("slo_ttft", parse=number, metavar="SECONDS", default="5", help="SLO: to the first token."),
    Opt("slo_tpot", parse=number, metavar="SECONDS", default="0.05", help="SLO: per later token."),
    Opt("slo_share", parse=number, metavar="SHARE", default="0.95",
        help="SLO: requests that must be in time."),
    Opt("cases", parse=_cases, metavar="LIST", help="Several scans, in a --config file."),
)  # fmt: skip
_KEYS = [row.key for row in PLANNING]


def take_planning(run: Run) -> dict[str, Any] | None:
    """Take the planning options out of what the user gave; None where there are none.

    Raises:
        ConfigError: planning options without a device, or without --dry-run.
    """
    given = {key: run.own.pop(key) for key in _KEYS if key in run.own}
    if not given:
        return None
    option = "--" + next(iter(given)).replace("_", "-")
    if not run.own.get("dry_run"):
        raise ConfigError(option, given[next(iter(given))], "only together with --dry-run")
    if "device" not in given and "cases" not in given:
        raise ConfigError(option, given[next(iter(given))], "only together with --device")
    for only, needed in (
        ("target_context", "target_concurrency"), ("num_requests", "trace"),
        ("rate_scale", "trace"), ("replicas", "trace"), ("router", "trace"),
        ("approximate", "trace"),
    ):  # fmt: skip
        if only in given and needed not in given:
            name = "--" + only.replace("_", "-")
            raise ConfigError(name, given[only], f"only together with --{needed.replace('_', '-')}")
    if "cases" in given and len(given) > 1:
        raise ConfigError("cases", option, "the device belongs in each case")
    return given


def plan(run: Run, given: dict[str, Any], make_settings) -> bool:
    """Answer a planning question; False where nothing fits.

    Args:
        given: from `take_planning`.
        make_settings: turns a `Run` into `ScanSettings`.

    Raises:
        ConfigError: a setting is wrong.
    """
    from vtoken.experiments.capacity.planned_scan import check_score_free

    if "cases" in given:
        return run_cases(run, given["cases"], make_settings)
    settings = make_settings(run)
    if "trace" in given and settings.replay_scores is not None:
        raise ConfigError(
            "--replay-scores", settings.replay_scores,
            "not together with --trace: its requests are of other lengths than the recorded ones",
        )  # fmt: skip
    check_score_free(settings)
    if "trace" in given:
        return _run_trace(run, given, settings)
    if "target_concurrency" in given:
        return _run_inverse(run, given, settings)
    return _run_scan(run, given, settings)


def _run_scan(run: Run, given: dict[str, Any], settings) -> bool:
    from rich.markup import escape

    from vtoken.experiments.capacity.planned_scan import PlannedScan, boundary_rows, plan_for
    from vtoken.experiments.capacity.show import answer_lines, points_table, write_plots

    memory = plan_for(settings, given["device"])
    say_memory(run, memory)
    result = PlannedScan(settings, memory, step_cost(given, memory)).run()
    points, frontier = [r.point.row() for r in result.main.runs], result.main.frontier
    boundary = boundary_rows(points, frontier)
    run.out.print(points_table(result.main))
    columns = (
        "mode", "boundary_concurrency", "boundary_throughput", "peak_concurrency",
        "peak_throughput", "boundary_of_peak_frac",
    )  # fmt: skip
    run.out.print(
        rows_table("Throughput at the boundary against the mode's own peak", boundary, columns)
    )
    for line in answer_lines(result):
        run.out.print(escape(line))
    tables = {"points": points, "frontier": frontier, "boundary": boundary}
    finish(run, settings, given, memory, result.sections() | {"boundary": boundary}, tables)
    if run.output_dir is not None:
        write_plots(result, run.output_dir)
    return result.is_feasible


def _run_inverse(run: Run, given: dict[str, Any], settings) -> bool:
    from rich.markup import escape

    from vtoken.experiments.capacity.planned_scan import need_sentence, needs_for, plan_for

    memory = plan_for(settings, given["device"])
    context = given.get("target_context")
    if context is None:
        context = (settings.prompt_len or 256) + (settings.output_len or 768)
    needs = needs_for(
        settings, memory, num_requests=given["target_concurrency"], context_tokens=context
    )
    rows = [need.row() for need in needs]
    columns = (
        "mode",
        "policy",
        "blocks_per_request",
        "num_blocks",
        "kv_gib",
        "gpu_mem_util",
        "fits",
    )
    run.out.print(
        rows_table(f"{memory.model.name} on {memory.device.name}, modelled", rows, columns)
    )
    run.out.print(escape(need_sentence(needs, memory)))
    finish(run, settings, given, memory, {"needs": rows}, {"needs": rows})
    return any(need.fits for need in needs)


def _run_trace(run: Run, given: dict[str, Any], settings) -> bool:
    from rich.markup import escape

    from vtoken.experiments.capacity.planned_scan import plan_for
    from vtoken.experiments.planning.approximate_replica import ReplicaModel, calibrate
    from vtoken.experiments.planning.fleet import fleet_sentence, make_router, size_fleet
    from vtoken.experiments.planning.trace_replay import (
        Slo,
        TraceSetup,
        replay_trace,
        trace_sentence,
    )
    from vtoken.workloads import load_workload
    from vtoken.workloads.request import scale_rate, take

    memory = plan_for(settings, given["device"])
    requests = load_workload(given["trace"])
    requests = take(requests, given.get("num_requests"), given["trace"])
    requests = scale_rate(requests, given.get("rate_scale", 1.0))
    say_memory(run, memory)
    setup = TraceSetup(
        plan=memory, cost=step_cost(given, memory), config=settings.config,
        max_num_seqs=settings.engine.max_num_seqs or 1024,
    )  # fmt: skip
    replicas, router = given.get("replicas", 1), given.get("router", "round-robin")
    approximate = given.get("approximate", False)
    slo = Slo(ttft_s=given.get("slo_ttft", 5.0), tpot_s=given.get("slo_tpot", 0.05),
              share=given.get("slo_share", 0.95))  # fmt: skip
    rows, demand, needs = [], [], []
    for line in settings.series:
        run.out.note(f"replaying {len(requests):,} requests, {line}")
        if replicas == "auto":
            need = size_fleet(
                setup, line, requests, slo, router=router, approximate=approximate,
                max_replicas=given.get("max_replicas", 64),
            )  # fmt: skip
            needs.append(need)
            rows.append(need.row())
            demand += need.replay.demand
            continue
        made, extra = None, {}
        if approximate:
            calibration = calibrate(setup, line, requests)
            extra = calibration.row()

            def made(line=line, calibration=calibration):
                return ReplicaModel(setup, line, calibration)

        with run.out.progress(len(requests), str(line)) as bar:
            replay = replay_trace(
                setup, line, requests, replicas=replicas, router=make_router(router),
                make_replica=made, on_request=bar.update,
            )  # fmt: skip
        rows.append(replay.row() | {"met_share": replay.met_share(slo)} | extra)
        demand += replay.demand
    columns = ("mode", "policy", "replicas", "peak_residents", "vtoken_preemptions",
               "vtoken_evicted_tokens", "rejected", "prefix_hit_frac", "p95_queue_ms", "p95_ttft_ms", "mean_tpot_ms", "met_share")  # fmt: skip
    run.out.print(
        rows_table(f"{requests[0].dataset} on {memory.device.name}, modelled", rows, columns)
    )
    for row in rows:
        error = row.get("calibration_throughput_error_frac"), row.get("calibration_e2el_error_frac")
        if None not in error and max(map(abs, error)) > 0.03:
            run.out.warn(
                f"{row['mode']}: the approximate model is {100 * max(map(abs, error)):.1f} % off the "
                "real scheduler on the sample it was calibrated on"
            )
    sentence = fleet_sentence(needs, slo, setup) if needs else trace_sentence(rows, memory)
    run.out.print(escape(sentence))
    tables = {"trace": rows, "demand": demand}
    finish(run, settings, given, memory, {"trace": rows, "demand": demand}, tables)
    if run.output_dir is not None and demand:
        plot_demand(run, demand, memory)
    return not needs or any(need.replicas is not None for need in needs)

"""The planning half of `vtoken capacity-scan`: devices, traces and fleets that are not here.

capacity-scan --dry-run --device h100-80g --model ... [--target-concurrency N]
capacity-scan --dry-run --device ... --trace FILE [--replicas N|auto --router NAME]
capacity-scan --config examples/experiments/fig9_capacity.yaml        (cases: a list of scans)
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from vtoken.errors import ConfigError, nearest
from vtoken_cli.options import Opt, Run
from vtoken_cli.parsers import choice, count, number


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
    from vtoken.experiments.planning import check_score_free

    if "cases" in given:
        return _run_cases(run, given["cases"], make_settings)
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


def _cost(given: dict[str, Any], memory):
    from vtoken.experiments.cost_model import CostProfile, load_profile
    from vtoken.experiments.modelled_clock import StepCost

    profile = given.get("cost_profile")
    return StepCost(
        profile=CostProfile.from_device(memory.device)
        if profile is None
        else load_profile(profile),
        model=memory.model,
        tensor_parallel_size=memory.tensor_parallel_size,
    )


def _run_scan(run: Run, given: dict[str, Any], settings) -> bool:
    from rich.markup import escape

    from vtoken.experiments.capacity_view import answer_lines, points_table, write_plots
    from vtoken.experiments.planning import PlannedScan, boundary_rows, plan_for

    memory = plan_for(settings, given["device"])
    _say_memory(run, memory)
    result = PlannedScan(settings, memory, _cost(given, memory)).run()
    points, frontier = [r.point.row() for r in result.main.runs], result.main.frontier
    boundary = boundary_rows(points, frontier)
    run.out.print(points_table(result.main))
    columns = (
        "mode", "boundary_concurrency", "boundary_throughput", "peak_concurrency",
        "peak_throughput", "boundary_of_peak_frac",
    )  # fmt: skip
    run.out.print(
        _table("Throughput at the boundary against the mode's own peak", boundary, columns)
    )
    for line in answer_lines(result):
        run.out.print(escape(line))
    tables = {"points": points, "frontier": frontier, "boundary": boundary}
    _finish(run, settings, given, memory, result.sections() | {"boundary": boundary}, tables)
    if run.output_dir is not None:
        write_plots(result, run.output_dir)
    return result.is_feasible


def _run_inverse(run: Run, given: dict[str, Any], settings) -> bool:
    from rich.markup import escape

    from vtoken.experiments.planning import need_sentence, needs_for, plan_for

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
    run.out.print(_table(f"{memory.model.name} on {memory.device.name}, modelled", rows, columns))
    run.out.print(escape(need_sentence(needs, memory)))
    _finish(run, settings, given, memory, {"needs": rows}, {"needs": rows})
    return any(need.fits for need in needs)


def _run_trace(run: Run, given: dict[str, Any], settings) -> bool:
    from rich.markup import escape

    from vtoken.experiments.fleet import fleet_sentence, make_router, size_fleet
    from vtoken.experiments.fleet_model import ReplicaModel, calibrate
    from vtoken.experiments.planning import plan_for
    from vtoken.experiments.traces import Slo, TraceSetup, replay_trace, trace_sentence
    from vtoken.workloads import load_workload
    from vtoken.workloads.request import scale_rate, take

    memory = plan_for(settings, given["device"])
    requests = load_workload(given["trace"])
    requests = take(requests, given.get("num_requests"), given["trace"])
    requests = scale_rate(requests, given.get("rate_scale", 1.0))
    _say_memory(run, memory)
    setup = TraceSetup(
        plan=memory, cost=_cost(given, memory), config=settings.config,
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
    run.out.print(_table(f"{requests[0].dataset} on {memory.device.name}, modelled", rows, columns))
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
    _finish(run, settings, given, memory, {"trace": rows, "demand": demand}, tables)
    if run.output_dir is not None and demand:
        _plot_demand(run, demand, memory)
    return not needs or any(need.replicas is not None for need in needs)


def _plot_demand(run: Run, demand: list[dict[str, Any]], memory) -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        return run.out.warn("no plots: matplotlib is not installed")
    from vtoken.experiments.plots import demand_over_time

    first = [row for row in demand if row["replica"] == 0]
    demand_over_time(
        first, run.output_dir / "demand_over_time.png", pool_blocks=memory.num_usable_blocks
    )


_CASE_KEYS = ("name", "device", "model", "gpu_mem_util", "num_kv_blocks", "prompt_len", "output_len",
              "policy", "eviction_ratio", "paper", "note")  # fmt: skip


def _run_cases(run: Run, cases: list[dict[str, Any]], make_settings) -> bool:
    """Scan each case; next to each other the paper's figure, ours and the packed ideal."""
    from rich.markup import escape

    from vtoken.experiments.planning import PlannedScan, case_rows, plan_for

    rows, points = [], []
    for case in cases:
        for key in case:
            if key not in _CASE_KEYS:
                raise ConfigError("cases", key, nearest(str(key), _CASE_KEYS))
        settings = make_settings(_case_run(run, case))
        memory = plan_for(settings, str(case.get("device", "h100-80g")))
        run.out.note(f"{case.get('name', memory.model.name)}: {memory.describe()[0]}")
        result = PlannedScan(settings, memory, _cost({}, memory)).run()
        rows += case_rows(case, settings, memory, result.main.frontier)
        points += [{"case": case.get("name"), **r.point.row()} for r in result.main.runs]
        if case.get("note"):
            run.out.print(escape(f"{case.get('name')}: {case['note']}"))
    columns = ("case", "mode", "usable_blocks", "paper", "max_concurrency", "ideal")
    run.out.print(_table("Requests resident at once, modelled", rows, columns))
    found = ", ".join(f"{r['case']} {r['mode']} {r['max_concurrency']}" for r in rows)
    run.out.print(escape(f"Largest concurrency without a preemption: {found}; modelled."))
    _finish(run, settings, {"cases": cases}, None, {"frontier": rows, "points": points},
            {"frontier": rows, "points": points})  # fmt: skip
    return all(row["max_concurrency"] for row in rows)


def _case_run(run: Run, case: dict[str, Any]) -> Run:
    engine = dict(run.engine)
    for key, name in (("model", "model"), ("gpu_mem_util", "gpu_memory_utilization"),
                      ("num_kv_blocks", "num_kv_blocks")):  # fmt: skip
        if key in case:
            engine[name] = case[key]
    vtoken = dict(run.vtoken)
    if "eviction_ratio" in case:
        vtoken["eviction_ratio"] = case["eviction_ratio"]
    own = dict(run.own) | {k: case[k] for k in ("prompt_len", "output_len") if k in case}
    many = dict(run.many) | ({"policy": [case["policy"]]} if "policy" in case else {})
    return replace(run, engine=engine, vtoken=vtoken, own=own, many=many)


def _say_memory(run: Run, memory) -> None:
    for line in memory.describe():
        run.out.note(line)


def _table(title: str, rows: list[dict[str, Any]], columns: tuple[str, ...]):
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name.removeprefix("vtoken_").replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in columns))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _finish(run: Run, settings, given, memory, sections, tables) -> None:
    """Write the result where it is wanted."""
    from vtoken.experiments.results import collect_environment, make_result, save_result, utc_now

    pool = {} if memory is None else {
        "block_size": memory.block_size, "usable_kv_blocks": memory.num_usable_blocks,
    }  # fmt: skip
    config = settings.row() | {"planning": {k: str(v) if isinstance(v, Path) else v
                                            for k, v in given.items()}}  # fmt: skip
    if memory is not None:
        sections = {"memory_plan": memory.row()} | sections
    report = make_result(
        "capacity-scan", config, environment=collect_environment(**pool), started_at=utc_now(),
        modelled_only=True, **sections,
    )  # fmt: skip
    if run.output_dir is not None:
        save_result(report, run.output_dir, tables)
        run.out.note(f"result.json and tables are in {run.output_dir}")
    run.out.result(report)

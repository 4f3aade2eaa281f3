"""The planning half of `vtoken capacity-scan`: devices, traces and fleets that are not here.

capacity-scan --dry-run --device h100-80g --model ... [--target-concurrency N]
capacity-scan --dry-run --device ... --trace FILE [--replicas N|auto --router NAME]
capacity-scan --config examples/experiments/fig9_capacity.yaml        (cases: a list of scans)
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from vtoken.errors import ConfigError, nearest
from vtoken_cli.delivery import deliver
from vtoken_cli.given import Run
from vtoken_cli.options import Opt
from vtoken_cli.parsers import choice, count, number

_CASE_KEYS = ("name", "device", "model", "gpu_mem_util", "num_kv_blocks", "prompt_len", "output_len",
              "policy", "eviction_ratio", "paper", "note")  # fmt: skip


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
    Opt("trace", metavar="FILE",
        help="Replay a trace: Mooncake or Bailian JSONL; Azure, BurstGPT or ServeGen CSV."),
    Opt("hash_block_tokens", parse=count, metavar="TOKENS", default="Mooncake's 512, Bailian's 16",
        help="Prompt tokens that each of the trace's prefix hashes stands for."),
    Opt("time_unit", parse=choice("s", "ms", "us"), metavar="s|ms|us",
        default="Mooncake's ms, Bailian's s", help="Unit of such a trace's times."),
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
    """Take the planning options out of what the user gave; None where there are none."""
    given = {key: run.own.pop(key) for key in _KEYS if key in run.own}
    if not given:
        return None
    key = next(iter(given))
    option = _option(key)
    if not run.own.get("dry_run"):
        raise ConfigError(option, given[key], "only together with --dry-run")
    if "device" not in given and "cases" not in given:
        raise ConfigError(option, given[key], "only together with --device")
    for only, needed in (
        ("target_context", "target_concurrency"), ("num_requests", "trace"),
        ("rate_scale", "trace"), ("replicas", "trace"), ("router", "trace"),
        ("approximate", "trace"), ("hash_block_tokens", "trace"), ("time_unit", "trace"),
    ):  # fmt: skip
        if only in given and needed not in given:
            raise ConfigError(_option(only), given[only], f"only together with {_option(needed)}")
    if "cases" in given and len(given) > 1:
        raise ConfigError("cases", option, "the device belongs in each case")
    return given


def _option(key: str) -> str:
    return "--" + key.replace("_", "-")


def plan(run: Run, given: dict[str, Any], make_settings) -> bool:
    """Answer a planning question; False where nothing fits.

    Args:
        given: from `take_planning`.
        make_settings: turns a `Run` into `ScanSettings`.
    """
    from vtoken.experiments.capacity.planned_scan import check_score_free, plan_for

    if "cases" in given:
        return _run_cases(run, given["cases"], make_settings)
    settings = make_settings(run)
    if "trace" in given and settings.replay_scores is not None:
        raise ConfigError(
            "--replay-scores", settings.replay_scores,
            "not together with --trace: its requests are of other lengths than the recorded ones",
        )  # fmt: skip
    check_score_free(settings)
    memory = plan_for(settings, given["device"])
    if "target_concurrency" in given and "trace" not in given:
        return _run_inverse(run, given, settings, memory)
    for line in memory.describe():
        run.out.note(line)
    return (_run_trace if "trace" in given else _run_scan)(run, given, settings, memory)


def _step_cost(given: dict[str, Any], memory):
    """The cost model of a step, from a profile file or the device's own rates."""
    from vtoken.experiments.planning.cost_model import CostProfile, load_profile
    from vtoken.experiments.planning.modelled_clock import StepCost

    file = given.get("cost_profile")
    profile = CostProfile.from_device(memory.device) if file is None else load_profile(file)
    return StepCost(
        profile=profile, model=memory.model, tensor_parallel_size=memory.tensor_parallel_size
    )


def _finish(run: Run, settings, given, memory, sections, **delivered) -> None:
    """Deliver the result; `sections` that are rows are tables, too, unless others are given."""
    from vtoken.experiments.report.environment import collect_environment
    from vtoken.experiments.report.results import make_result, utc_now

    pool = {}
    if memory is not None:
        pool = {"block_size": memory.block_size, "usable_kv_blocks": memory.num_usable_blocks}
    report = make_result(
        "capacity-scan", settings.row() | {"planning": given},
        environment=collect_environment(**pool), started_at=utc_now(), modelled_only=True,
        **({} if memory is None else {"memory_plan": memory.row()}), **sections,
    )  # fmt: skip
    deliver(run, report, files="result.json and tables", **{"tables": sections, **delivered})


def _run_scan(run: Run, given: dict[str, Any], settings, memory) -> bool:
    from vtoken.experiments.capacity.planned_scan import PlannedScan, boundary_rows
    from vtoken.experiments.capacity.show import answer_lines, points_table, write_plots
    from vtoken.experiments.report.tables import columns_of, make_table

    result = PlannedScan(settings, memory, _step_cost(given, memory)).run()
    points, frontier = [r.point.row() for r in result.main.runs], result.main.frontier
    boundary = boundary_rows(points, frontier)
    columns = columns_of(
        "mode", "boundary_concurrency", "boundary_throughput", "peak_concurrency",
        "peak_throughput", "boundary_of_peak_frac",
    )  # fmt: skip
    title = "Throughput at the boundary against the mode's own peak"
    _finish(
        run, settings, given, memory, result.sections() | {"boundary": boundary},
        tables={"points": points, "frontier": frontier, "boundary": boundary},
        shown=(points_table(result.main), make_table(title, boundary, columns)),
        lines=answer_lines(result), write=lambda folder: write_plots(result, folder),
    )  # fmt: skip
    return result.is_feasible


def _run_inverse(run: Run, given: dict[str, Any], settings, memory) -> bool:
    from vtoken.experiments.capacity.planned_scan import need_sentence, needs_for
    from vtoken.experiments.report.tables import columns_of, make_table

    context = given.get("target_context")
    if context is None:
        context = (settings.prompt_len or 256) + (settings.output_len or 768)
    needs = needs_for(
        settings, memory, num_requests=given["target_concurrency"], context_tokens=context
    )
    rows = [need.row() for need in needs]
    columns = columns_of(
        "mode", "policy", "blocks_per_request", "num_blocks", "kv_gib", "gpu_mem_util", "fits"
    )
    title = f"{memory.model.name} on {memory.device.name}, modelled"
    _finish(
        run, settings, given, memory, {"needs": rows},
        shown=[make_table(title, rows, columns)], lines=[need_sentence(needs, memory)],
    )  # fmt: skip
    return any(need.fits for need in needs)


def _run_trace(run: Run, given: dict[str, Any], settings, memory) -> bool:
    from vtoken.experiments.planning.fleet import fleet_sentence, warn_of_errors
    from vtoken.experiments.planning.trace_replay import Slo, TraceSetup, trace_sentence
    from vtoken.experiments.report.tables import columns_of, make_table
    from vtoken.workloads import load_workload
    from vtoken.workloads.request import scale_rate, take

    options = {key: given[key] for key in ("hash_block_tokens", "time_unit") if key in given}
    requests = load_workload(given["trace"], **options)
    requests = take(requests, given.get("num_requests"), given["trace"])
    requests = scale_rate(requests, given.get("rate_scale", 1.0))
    setup = TraceSetup(
        plan=memory, cost=_step_cost(given, memory), config=settings.config,
        max_num_seqs=settings.engine.max_num_seqs or 1024,
    )  # fmt: skip
    slo = Slo(ttft_s=given.get("slo_ttft", 5.0), tpot_s=given.get("slo_tpot", 0.05),
              share=given.get("slo_share", 0.95))  # fmt: skip
    rows, demand, needs = _replay_lines(run, given, settings.series, setup, requests, slo)
    columns = columns_of(
        "mode", "policy", "replicas", "peak_residents", "vtoken_preemptions",
        "vtoken_evicted_tokens", "rejected", "prefix_hit_frac", "p95_queue_ms", "p95_ttft_ms",
        "mean_tpot_ms", "met_share",
    )  # fmt: skip
    for sentence in warn_of_errors(rows):
        run.out.warn(sentence)
    title = f"{requests[0].dataset} on {memory.device.name}, modelled"
    _finish(
        run, settings, given, memory, {"trace": rows, "demand": demand},
        write=lambda folder: _draw_demand(demand, folder, memory.num_usable_blocks),
        shown=[make_table(title, rows, columns)],
        lines=[fleet_sentence(needs, slo, setup) if needs else trace_sentence(rows, memory)],
    )  # fmt: skip
    return not needs or any(need.replicas is not None for need in needs)


def _replay_lines(run: Run, given: dict[str, Any], series, setup, requests, slo):
    """(rows, demand, fleets that were sized), a row per mode and policy."""
    from vtoken.experiments.planning.fleet import calibrate, replay_fleet, size_fleet

    replicas, router = given.get("replicas", 1), given.get("router", "round-robin")
    rows, demand, needs = [], [], []
    for line in series:
        run.out.note(f"replaying {len(requests):,} requests, {line}")
        calibration = calibrate(setup, line, requests) if given.get("approximate") else None
        if replicas == "auto":
            need = size_fleet(
                setup, line, requests, slo, router=router, calibration=calibration,
                max_replicas=given.get("max_replicas", 64),
            )  # fmt: skip
            needs.append(need)
            replay, row = need.replay, need.row()
        else:
            with run.out.progress(len(requests), str(line)) as bar:
                replay = replay_fleet(
                    setup, line, requests, replicas=replicas, router=router,
                    calibration=calibration, on_request=bar.update,
                )  # fmt: skip
            row = replay.row() | {"met_share": replay.met_share(slo)}
        rows.append(row if calibration is None else row | calibration.row())
        demand += replay.demand
    return rows, demand, needs


def _draw_demand(demand: list[dict[str, Any]], folder, pool_blocks: int) -> bool:
    """Draw the first server's blocks over time."""
    from vtoken.experiments.report.plot_style import has_matplotlib
    from vtoken.experiments.report.plots import demand_over_time

    first = [row for row in demand if row["replica"] == 0]
    if first and has_matplotlib():
        demand_over_time(first, folder / "demand_over_time.png", pool_blocks=pool_blocks)
    return has_matplotlib()


# ---- several scans in one command --------------------------------------------------------------


def _run_cases(run: Run, cases: list[dict[str, Any]], make_settings) -> bool:
    """Scan each case; next to each other the paper's figure, ours and the packed ideal."""
    from vtoken.experiments.capacity.planned_scan import PlannedScan, case_rows, plan_for
    from vtoken.experiments.capacity.show import write_plots
    from vtoken.experiments.report.tables import columns_of, make_table

    rows, points, lines = [], [], []
    for case in cases:
        for key in case:
            if key not in _CASE_KEYS:
                raise ConfigError("cases", key, nearest(str(key), _CASE_KEYS))
        settings = make_settings(_case_run(run, case))
        memory = plan_for(settings, str(case.get("device", "h100-80g")))
        name = str(case.get("name") or memory.model.name)
        run.out.note(f"{name}: {memory.describe()[0]}")
        result = PlannedScan(settings, memory, _step_cost({}, memory)).run()
        if run.output_dir is not None:  # a folder of its own
            folder = run.output_dir / "-".join(re.findall(r"[a-z0-9.]+", name.lower()))
            folder.mkdir(parents=True, exist_ok=True)
            write_plots(result, folder)
        rows += case_rows(case, settings, memory, result.main.frontier)
        points += [{"case": case.get("name"), **r.point.row()} for r in result.main.runs]
        if case.get("note"):
            lines.append(f"{case.get('name')}: {case['note']}")
    columns = columns_of("case", "mode", "usable_blocks", "paper", "max_concurrency", "ideal")
    found = ", ".join(f"{r['case']} {r['mode']} {r['max_concurrency']}" for r in rows)
    lines.append(f"Largest concurrency without a preemption: {found}; modelled.")
    _finish(
        run, settings, {"cases": cases}, None, {"frontier": rows, "points": points},
        shown=[make_table("Requests resident at once, modelled", rows, columns)], lines=lines,
    )  # fmt: skip
    return all(row["max_concurrency"] for row in rows)


def _case_run(run: Run, case: dict[str, Any]) -> Run:
    """The run with a case's settings over the command's own."""
    engine_keys = {"model": "model", "gpu_mem_util": "gpu_memory_utilization",
                   "num_kv_blocks": "num_kv_blocks"}  # fmt: skip
    return replace(
        run,
        engine=run.engine | {name: case[key] for key, name in engine_keys.items() if key in case},
        vtoken=run.vtoken | {k: case[k] for k in ("eviction_ratio",) if k in case},
        own=run.own | {k: case[k] for k in ("prompt_len", "output_len") if k in case},
        many=run.many | ({"policy": [case["policy"]]} if "policy" in case else {}),
    )

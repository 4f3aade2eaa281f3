"""SLA suite: the throughput that each mode sustains within a latency limit, in the same pool.

Paper: section 5.3, Figure 8. The limit is 1.05 x naive's p95 end-to-end latency at 8 requests at
once, in the pool at hand. Two pools: naive's exact demand at 8, and 75 % of it. C_sel is the
concurrency of highest throughput among those that meet the limit, not the largest one.
"""

from __future__ import annotations

from vtoken.errors import ConfigError
from vtoken.experiments.bench.bench_options import BenchSettings, Case
from vtoken.experiments.bench.context import Context, SuiteResult
from vtoken.experiments.bench.named_workloads import Workload
from vtoken.experiments.bench.open_engines import Pool
from vtoken.experiments.bench.pairing import Comparison, PairRunner
from vtoken.experiments.bench.suites.sla_scan import (
    MAX_CONCURRENCY,
    PoolScan,
    auto_limit,
    requests_of_run,
    scanned_points,
)

PAPER = "section 5.3, Figure 8"
PAPER_GAINS = {"h2o": 10, "random": 37, "scissorhands": 33}  # per cent, section 5.3
DEFAULT_WORKLOADS = ("text:96+64",)
MARKED_PERCENT = 10  # by which steps get longer with more requests, where that is worth a word


def largest_run(settings: BenchSettings) -> int:
    """Requests of the largest run that there has to be: of the reference, or of a listed point.

    A point above two misses may be left out, but that is not known before. What `auto` tries
    beyond the reference follows the rows there are (`auto_limit`).
    """
    is_auto = settings.concurrency == "auto"
    points = set() if is_auto else set(scanned_points(settings))
    if is_auto or settings.slo_p95_e2el_ms is None:
        points.add(settings.ref_concurrency)
    return max(requests_of_run(settings, point) for point in points)


def run_sla(context: Context, result: SuiteResult) -> None:
    """Run the suite, into the result."""
    settings = context.settings
    if settings.request_rate is not None:
        raise ConfigError(
            "--request-rate", settings.request_rate, "not with --suite sla, which is closed loop"
        )
    if "naive" not in settings.modes:
        raise ConfigError("--mode", ",".join(settings.modes), "naive among them: it sets the limit")
    workloads = context.workloads(DEFAULT_WORKLOADS, largest_run(settings), result.notes)
    longest = max(w.max_tokens for w in workloads)
    is_auto = settings.concurrency == "auto"
    at_once = max(*scanned_points(settings), settings.ref_concurrency)
    with context.session(max_tokens=longest, max_num_seqs=at_once) as session:
        runner = context.runner(session)
        for workload in workloads:
            if is_auto and (limit := auto_limit(settings, workload)) < MAX_CONCURRENCY:
                result.notes.append(
                    f"{workload.name} has rows for at most {limit} requests at once: auto tries no "
                    "more."
                )
            for policy in context.policies():
                demand = _demand(context, runner, workload, policy)
                for frac in settings.pool_fracs:
                    _check_pool(context, demand, frac, workload, policy)
                    pool = Pool(num_kv_blocks=int(frac * demand), block_size=context.block_size)
                    scan = PoolScan(context, runner, workload, policy, pool, frac)
                    try:
                        scan.run()
                    finally:  # after Ctrl-C: the points there are
                        result.rows += scan.rows()
    result.nothing_met = bool(result.rows) and not any(row["feasible"] for row in result.rows)


def _demand(context: Context, runner: PairRunner, workload: Workload, policy: str) -> int:
    """Blocks that naive holds at most, with the reference number of requests at once."""
    num = context.settings.ref_concurrency
    comparison = Comparison(
        suite="sla-demand", workload=workload, pool=context.ample_pool(num, workload.max_tokens),
        cases=[Case(mode="naive", policy=policy)], num_requests=num, repeats=1,
    )  # fmt: skip
    runner.plan_comparison(comparison)
    records = runner.run(comparison)[comparison.cases[0].key]
    runner.raise_if_interrupted()
    (record,) = records
    return int(record.values["vtoken_peak_blocks"])


def _check_pool(context: Context, demand: int, frac: float, workload: Workload, policy: str):
    """Refuse a pool that cannot hold one request in every mode."""
    needed = -(-workload.max_tokens // context.block_size)
    if int(frac * demand) < needed:
        raise ConfigError(
            "--pool-fracs", frac,
            f"a share that leaves {needed} blocks for one request; naive's demand with {policy} on "
            f"{workload.name} is {demand}",
        )  # fmt: skip


def sentences(rows: list[dict[str, object]]) -> list[str]:
    """What was selected, what it gains, and what did not meet the limit."""
    lines = []
    if rows and not any(row["feasible"] for row in rows):
        limits = sorted({round(row["sla_p95_e2el_ms"]) for row in rows})
        listed = ", ".join(f"{limit:,}" for limit in limits)
        lines.append(
            f"Nothing meets the limit of {listed} ms on p95 latency, in any mode and pool."
        )
        return lines
    met: dict[tuple, bool] = {}
    for row in rows:
        policy = "" if row["mode"] == "native" else f" {row['policy']}"
        what = (row["workload"], row["mode"] + policy, row["pool_blocks"])
        met[what] = met.get(what, False) or row["feasible"]
    lines += [
        f"{workload}, {blocks:,} blocks: {mode} meets the limit at no concurrency."
        for (workload, mode, blocks), is_met in met.items()
        if not is_met
    ]
    for row in rows:
        if row["mode"] != "vtoken" or not row["is_selected"]:
            continue
        where = f"{row['workload']}, {row['policy']}, {row['pool_blocks']:,} blocks"
        parts = []
        if (gain := row["gain_over_naive"]) is not None:
            paper = PAPER_GAINS.get(row["policy"])
            seen = f" (paper: {paper} %)" if paper else ""
            parts.append(f"{100 * gain:+.0f} % over naive at its C_sel{seen}")
        if (gain := row["gain_over_native"]) is not None:
            parts.append(f"{100 * gain:+.0f} % over native at its C_sel")
        if (ratio := row.get("p95_e2el_over_naive")) is not None:
            parts.append(f"p95 {100 * (ratio - 1):+.0f} % against naive at the same concurrency")
        lines.append(f"{where}: C_sel {row['concurrency']}, {', '.join(parts)}.")
        if bound := _bound(row, _selected_naive(rows, row)):
            lines.append(f"{where}: {bound}")
    return lines


def _selected_naive(rows: list[dict[str, object]], like: dict) -> dict[str, object] | None:
    """Naive's row at its own C_sel, of the same workload, policy and pool."""
    same = ("workload", "policy", "pool_blocks")
    for row in rows:
        is_naive = row["mode"] == "naive" and row["is_selected"]
        if is_naive and all(row[key] == like[key] for key in same):
            return row
    return None


def _bound(row: dict[str, object], naive: dict[str, object] | None) -> str | None:
    """What kept the gain from being that of the steps that were saved, where something did."""
    if naive is None or row["concurrency"] <= naive["concurrency"]:
        return None
    if not (row.get("num_steps") and naive.get("num_steps")):
        return None
    steps, step_s = (
        [r[of] / r[per] for r in (row, naive)]
        for of, per in (("num_steps", "completed"), ("duration", "num_steps"))
    )
    fewer, longer = 100 * (1 - steps[0] / steps[1]), 100 * (step_s[0] / step_s[1] - 1)
    if fewer <= 0 or longer < MARKED_PERCENT:
        return None
    return (
        f"a request takes {fewer:.0f} % fewer steps than in naive at its C_sel, but a step of "
        f"{row['concurrency']} requests takes {longer:.0f} % longer than one of "
        f"{naive['concurrency']}: compute, not memory, is the limit here; with steps as long the "
        f"gain would be {100 * (steps[1] / steps[0] - 1):.0f} %."
    )

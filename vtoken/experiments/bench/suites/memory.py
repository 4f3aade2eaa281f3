"""Memory suite: what eviction leaves in the blocks, and what packing makes of it.

Paper: section 5.2, Figure 7 (a: memory utilisation, b: retained blocks).

Rows are (mode, policy, ratio, workload). `native` has a row per policy and ratio as well, with
`shadow`: what that policy would have freed there, from its own paired run: tokens that would be
dead, and blocks that the live ones would not need. What a policy drops depends on what the model
attends to without the tokens that it dropped before, so a run that evicts has to say it: that of
naive, or else of vtoken, which runs for these rows alone where no mode that evicts was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from vtoken.experiments.bench.bench_options import (
    DEFAULT_RATIO,
    DEFAULT_RATIOS,
    Case,
)
from vtoken.experiments.bench.context import Context, SuiteResult
from vtoken.experiments.bench.measure import Record
from vtoken.experiments.bench.open_engines import Pool
from vtoken.experiments.bench.pairing import Comparison, Runs
from vtoken.experiments.bench.rows import compared_rows, make_row
from vtoken.modes import EVICTING_MODES

PAPER = "section 5.2, Figure 7"
DEFAULT_WORKLOADS = ("text:128+64", "random:192+48")
NUM_REQUESTS = 4
SHADOW_MODE = "vtoken"  # the one that runs on GPUs, too
RETAINED = "vtoken_retained_blocks_per_request"


def run_memory(context: Context, result: SuiteResult) -> None:
    """Run the suite, into the result."""
    num = context.settings.num_requests or NUM_REQUESTS
    workloads = context.workloads(DEFAULT_WORKLOADS, num, result.notes)
    points = context.settings.points
    longest = max(w.max_tokens for w in workloads)
    at_once = max(points or (num,))
    with context.session(max_tokens=longest, max_num_seqs=at_once) as session:
        runner = context.runner(session)
        pool = context.ample_pool(at_once, longest)  # one for all: engines stay open
        comparisons = [
            comparison
            for workload in workloads
            for comparison in _comparisons(context, workload, num, at_once, pool)
        ]
        native: dict[str, list[Record]] = {}  # by workload; only the first comparison has it
        for comparison, runs in runner.run_all(comparisons, watch_layouts=True):
            name = comparison.workload.name
            _add(context, result, comparison, runs, native.setdefault(name, runs.get("native", [])))


def _comparisons(
    context: Context, workload, num: int, at_once: int, pool: Pool
) -> list[Comparison]:
    """The first ratio with all modes and repeats; the others with one pair, for the span."""
    settings = context.settings
    head, *others = _ratios(context)
    common = {
        "suite": "memory", "workload": workload, "pool": pool, "num_requests": num,
        "max_concurrency": None if at_once >= num else at_once,
    }  # fmt: skip
    changes = {} if head is None else {"eviction_ratio": head}
    evicting = [mode for mode in settings.modes if mode in EVICTING_MODES]
    if "native" in settings.modes and not evicting:
        evicting = [SHADOW_MODE]
    found = [
        Comparison(
            cases=context.cases((*settings.modes, *evicting), context.policies(), **changes),
            repeats=settings.repeats,
            **common,
        )
    ]
    for ratio in others:
        cases = context.cases(evicting, context.policies(), eviction_ratio=ratio)
        found.append(Comparison(cases=cases, repeats=1, **common))
    return [comparison for comparison in found if comparison.cases]


def _ratios(context: Context) -> list[float | None]:
    """The ratio of the full comparison first; None where the user gave a budget."""
    settings = context.settings
    if settings.config.kv_budget_tokens is not None:
        return [None, *settings.ratios]
    ratios = list(settings.ratios or DEFAULT_RATIOS)
    first = settings.config.eviction_ratio
    if first is None:
        first = DEFAULT_RATIO if DEFAULT_RATIO in ratios else ratios[0]
    return [first, *(ratio for ratio in ratios if ratio != first)]


def _add(
    context: Context,
    result: SuiteResult,
    comparison: Comparison,
    runs: Runs,
    native: Sequence[Record],
) -> None:
    workload, pool = comparison.workload.name, comparison.pool
    fields = {"block_size": pool.block_size, "concurrency": comparison.num_requests}
    if context.settings.dry_run:
        fields["modelled"] = True
    asked = [case for case in comparison.cases if case.mode in context.settings.modes]
    rows = compared_rows(asked, runs, workload, **fields)
    for row in rows:
        if row.get(RETAINED) is not None:
            row["blocks_above_ideal"] = row[RETAINED] - row["ideal_blocks_per_request"]
    result.rows += rows + _shadow_rows(comparison, runs, native, fields)
    for case in asked:
        head = {"mode": case.mode, "policy": case.policy, "workload": workload, **case.changes}
        if not runs[case.key]:
            continue
        first = runs[case.key][0]
        result.tables.setdefault("block_shares", []).extend(
            head | row for row in _thinned(first.shares)
        )
        total = sum(first.histogram) or 1
        result.tables.setdefault("block_histogram", []).extend(
            head | {"live_tokens": n, "blocks_frac": count / total}
            for n, count in enumerate(first.histogram)
        )


def _thinned(rows: list, most: int = 100) -> list:
    return rows[:: -(-len(rows) // most)] if rows else []


def _shadow_rows(
    comparison: Comparison, runs: Runs, native: Sequence[Record], fields: dict
) -> list[dict[str, object]]:
    """What each policy would have freed in native, by pairs."""
    has_naive = any(case.mode == "naive" for case in comparison.cases)
    rows = []
    for case in comparison.cases:
        records = runs[case.key]
        if case.mode != ("naive" if has_naive else SHADOW_MODE) or not records or not native:
            continue
        row = make_row(
            Case(mode="native", policy=case.policy), comparison.workload.name,
            native[: len(records)], shadow=True, **fields, **case.changes,
        )  # fmt: skip
        evicting = make_row(case, "", records)
        own, packed = row.get(RETAINED), evicting.get("ideal_blocks_per_request")
        if not own or packed is None:
            continue
        row["shadow_freeable_blocks_per_request"] = own - packed
        row["shadow_freeable_frac"] = 1 - packed / own
        if has_naive:  # packing leaves no dead tokens to count
            for name in ("fully_dead", "partly_dead", "not_dead"):
                row[f"shadow_blocks_{name}_frac"] = evicting.get(f"vtoken_blocks_{name}_frac")
        rows.append(row)
    return rows


def sentences(rows: list[dict[str, object]]) -> list[str]:
    """What the rows say, against the paper's figures."""
    return _against_naive(rows) + _freeable(rows)


def _against_naive(rows: list[dict[str, object]]) -> list[str]:
    pairs = [r for r in rows if r["mode"] == "vtoken" and r.get("retained_over_naive") is not None]
    if not pairs:
        return []
    lines = []
    for where, group in _by_ratio(pairs):
        fewer = [100 * (1 - r["retained_over_naive"]) for r in group]
        lines.append(
            f"{where} vToken retained {min(fewer):.1f} % to "
            f"{max(fewer):.1f} % fewer blocks than naive, at most "
            f"{max(r['blocks_above_ideal'] for r in group):.2f} blocks a request above the packed "
            "ideal (paper, over its settings: 27.2 % to 72.3 % fewer)."
        )
    points = [r["utilization_points_over_naive"] for r in pairs]
    lines.append(
        f"Memory utilisation was {sum(points) / len(points):.1f} points above naive's on average "
        f"(paper: 21.9), from {min(points):.1f} to {max(points):.1f}."
    )
    return lines


def _freeable(rows: list[dict[str, object]]) -> list[str]:
    lines = []
    for where, group in _by_ratio([r for r in rows if r.get("shadow")]):
        freed = [100 * r["shadow_freeable_frac"] for r in group]
        span = " to ".join(dict.fromkeys(f"{share:.0f} %" for share in (min(freed), max(freed))))
        lines.append(
            f"{where} these policies would leave {span} of native's blocks to be freed by packing."
        )
    return lines


def _by_ratio(rows: list[dict[str, object]]) -> list[tuple[str, list[dict[str, object]]]]:
    """(where, rows) by eviction ratio, in ascending order."""
    ratios = sorted({r.get("eviction_ratio") for r in rows}, key=lambda r: r or 0)
    return [
        (
            "At the given budget" if ratio is None else f"At ratio {ratio:g}",
            [r for r in rows if r.get("eviction_ratio") == ratio],
        )
        for ratio in ratios
    ]

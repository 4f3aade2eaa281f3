"""Sensitivity suite: one factor at a time around a default, the others held.

Paper: section 5.6, Figure 12: block size, eviction ratio, fragmentation threshold; retained KV
capacity (blocks x block size), throughput and p95 latency, normalised to the default. The paper's
default block is 16 tokens; here it is the smallest that every mode takes on this platform.

The eviction interval is a block, so it follows the block size unless it is given.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from vtoken.experiments.bench.bench_options import (
    DEFAULT_RATIO,
    DEFAULT_RATIOS,
    Case,
)
from vtoken.experiments.bench.context import Context, SuiteResult
from vtoken.experiments.bench.measure import Record
from vtoken.experiments.bench.pairing import Comparison
from vtoken.experiments.bench.rows import make_row, pair_ratios

PAPER = "section 5.6, Figure 12"
DEFAULT_WORKLOADS = ("text:128+64",)
DEFAULT_POLICIES = ("h2o",)
NUM_REQUESTS = 4
FACTORS = ("block_size", "eviction_ratio", "fragmentation_threshold")


def run_sensitivity(context: Context, result: SuiteResult) -> None:
    """Run the suite, into the result."""
    settings = context.settings
    num = settings.num_requests or NUM_REQUESTS
    workloads = context.workloads(DEFAULT_WORKLOADS, num, result.notes)
    at_once = max(settings.points or (num,))
    longest = max(w.max_tokens for w in workloads)
    # The cases take turns, so the engines of all block sizes are open at once.
    num_engines = len({context.block_size, *settings.block_sizes})
    with context.session(max_tokens=longest, max_num_seqs=at_once, max_open=num_engines) as session:
        variants = {p: _variants(context, p) for p in context.policies(DEFAULT_POLICIES)}
        comparisons = [
            Comparison(
                suite="sensitivity", workload=workload, cases=_distinct(found), num_requests=num,
                pool=_pool(context, at_once, workload.max_tokens), repeats=settings.repeats,
                max_concurrency=None if at_once >= num else at_once,
            )
            for workload in workloads
            for found in variants.values()
        ]  # fmt: skip
        for comparison, runs in context.runner(session).run_all(comparisons):
            found = variants[comparison.cases[0].policy]
            result.rows += _rows(context, comparison, found, runs)


def _default(context: Context, policy: str) -> Case:
    config = context.settings.config
    ratio = DEFAULT_RATIO if config.eviction_ratio is None else config.eviction_ratio
    return Case(
        mode="vtoken",
        policy=policy,
        changes={
            "eviction_ratio": ratio, "fragmentation_threshold": config.fragmentation_threshold,
        },
        block_size=context.block_size,
    )  # fmt: skip


def _variants(context: Context, policy: str) -> list[tuple[str, object, Case]]:
    """(factor, value, case), the default's value of a factor among its variants."""
    settings, default = context.settings, _default(context, policy)
    values = {
        "block_size": {*settings.block_sizes, context.block_size},
        "eviction_ratio": {
            *(settings.ratios or DEFAULT_RATIOS), default.changes["eviction_ratio"],
        },
        "fragmentation_threshold": {
            *settings.thresholds, default.changes["fragmentation_threshold"],
        },
    }  # fmt: skip
    found = []
    for factor in FACTORS:
        for value in sorted(values[factor]):
            if factor == "block_size":
                case = replace(default, block_size=value)
            else:
                case = replace(default, changes={**default.changes, factor: value})
            found.append((factor, value, case))
    return found


def _distinct(variants: list[tuple[str, object, Case]]) -> list[Case]:
    return list({case.key: case for _, _, case in variants}.values())


def _pool(context: Context, at_once: int, max_tokens: int):
    """An ample pool of default blocks that is ample in blocks of every size, too."""
    largest = max(context.block_size, *context.settings.block_sizes)
    return context.ample_pool(at_once, max_tokens + largest)


def _rows(context: Context, comparison: Comparison, variants, runs) -> list[dict[str, object]]:
    default = _default(context, variants[0][2].policy)
    base = runs[default.key]
    rows = []
    for factor, value, case in variants:
        records = runs[case.key]
        if not records:
            continue
        row = make_row(
            case, comparison.workload.name, records, factor=factor, value=value,
            is_default=case.key == default.key, block_size=case.block_size, **case.changes,
            concurrency=comparison.max_concurrency or comparison.num_requests,
        )  # fmt: skip
        if context.settings.dry_run:
            row["modelled"] = True
        row["retained_capacity_tokens"] = _capacity(row, case)
        row["normalized_retained_capacity"] = _normalised(
            records, base, "vtoken_retained_blocks_per_request",
            case.block_size / default.block_size,
        )  # fmt: skip
        row["normalized_output_throughput"] = _normalised(records, base, "output_throughput")
        row["normalized_p95_e2el"] = _normalised(records, base, "p95_e2el_ms")
        rows.append(row)
    return rows


def _capacity(row: dict, case: Case) -> float | None:
    blocks = row.get("vtoken_retained_blocks_per_request")
    return None if blocks is None else blocks * case.block_size


def _normalised(
    records: list[Record], base: list[Record], key: str, factor: float = 1.0
) -> float | None:
    ratios = pair_ratios(records, base, key)
    return factor * median(ratios) if ratios else None


def sentences(rows: list[dict[str, object]]) -> list[str]:
    """How far each factor moves capacity and throughput, in the range that was measured."""
    lines = []
    for factor in FACTORS:
        group = [r for r in rows if r["factor"] == factor]
        for name, key in (
            ("retained capacity", "normalized_retained_capacity"),
            ("throughput", "normalized_output_throughput"),
        ):
            known = [r for r in group if r.get(key) is not None]
            if len(known) < 2:
                continue
            low, high = min(known, key=lambda r: r[key]), max(known, key=lambda r: r[key])
            lines.append(
                f"{factor.replace('_', ' ')}: {name} from {low[key]:.2f} of the default's (at "
                f"{low['value']:g}) to {high[key]:.2f} (at {high['value']:g})."
            )
    return lines

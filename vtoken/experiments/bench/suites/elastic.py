"""Elastic suite: what `evict_when: pressure` costs while there is room, and gives when there is none.

Stock vLLM and vToken take turns over the same prompts. At the concurrency that native holds the
tokens must be the same and the throughput should be; at twice that, native preempts. The pool is
6.5 peaks of a request for 6 requests, and in that proportion for others; both have as many slots,
in the smallest blocks that each takes on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from vtoken.engine.cpu import STOCK_BLOCK_TOKENS
from vtoken.experiments.bench.bench_options import BenchSettings, Case
from vtoken.experiments.bench.context import Context, SuiteResult
from vtoken.experiments.bench.measure import Record
from vtoken.experiments.bench.open_engines import Pool
from vtoken.experiments.bench.pairing import Comparison
from vtoken.experiments.bench.rows import Row, add_ratios, make_row, pair_ratios
from vtoken.experiments.report.statistics import median_interval
from vtoken.units import cdiv

PAPER = "not in the paper"
DEFAULT_WORKLOADS = ("text:256+256",)
DEFAULT_POLICIES = ("h2o",)
CONCURRENCY = 6
NATIVE_PEAKS_PER_REQUEST = 6.5 / 6
VTOKEN_BLOCK_TOKENS = 16


def concurrencies(settings: BenchSettings) -> tuple[int, int]:
    """The requests at once that native holds, and twice as many."""
    held = max(settings.points or (CONCURRENCY,))
    return held, 2 * held


def largest_run(settings: BenchSettings) -> int:
    """Requests of the largest run."""
    return concurrencies(settings)[1]


def stock_pool(concurrency: int, max_tokens: int) -> Pool:
    """The pool, in native's blocks."""
    peak = cdiv(max_tokens, STOCK_BLOCK_TOKENS)
    blocks = int(NATIVE_PEAKS_PER_REQUEST * concurrency * peak)
    return Pool(num_kv_blocks=blocks, block_size=STOCK_BLOCK_TOKENS)


def run_elastic(context: Context, result: SuiteResult) -> None:
    """Run the suite, into the result."""
    settings = context.settings
    held, twice = concurrencies(settings)
    workloads = context.workloads(DEFAULT_WORKLOADS, twice, result.notes)
    longest = max(w.max_tokens for w in workloads)
    with context.session(max_tokens=longest, max_num_seqs=twice) as session:
        runner = context.runner(session)
        comparisons = [
            Comparison(
                suite="elastic", workload=workload, pool=stock_pool(held, workload.max_tokens),
                cases=_cases(policy), num_requests=num, repeats=settings.repeats,
            )
            for workload in workloads
            for policy in context.policies(DEFAULT_POLICIES)
            for num in (held, twice)
        ]  # fmt: skip
        for comparison, runs in runner.run_all(comparisons):
            result.rows += _rows(comparison, *(runs[case.key] for case in comparison.cases))


def _cases(policy: str) -> list[Case]:
    changes = {"evict_when": "pressure"}
    vtoken = Case(
        mode="vtoken", policy=policy, changes=changes, block_size=VTOKEN_BLOCK_TOKENS
    )  # fmt: skip
    return [Case(mode="native"), vtoken]


def _rows(comparison: Comparison, native: list[Record], vtoken: list[Record]) -> list[Row]:
    rows = []
    for case, records in zip(comparison.cases, (native, vtoken), strict=True):
        if records:
            pool = comparison.pool_of(case)
            rows.append(
                make_row(
                    case, comparison.workload.name, records, concurrency=comparison.num_requests,
                    block_size=pool.block_size, pool_blocks=pool.num_kv_blocks, **case.changes,
                )
            )  # fmt: skip
    if native and vtoken:
        add_ratios(rows[1], vtoken, native, "native")
        ratios = pair_ratios(vtoken, native, "output_throughput")
        _, rows[1]["ci95_low"], rows[1]["ci95_high"] = median_interval(ratios)
        rows[1]["pairs"], rows[1]["identical_pairs"] = _count_identical(native, vtoken)
    return rows


def _count_identical(native: Sequence[Record], vtoken: Sequence[Record]) -> tuple[int, int]:
    """(pairs, those with the same tokens), of the pairs that ran now: a journal has no tokens."""
    known = [(a.outputs, b.outputs) for a, b in zip(native, vtoken, strict=False) if a.outputs]
    known = [(a, b) for a, b in known if b]
    return len(known), sum(a == b for a, b in known)


def sentences(rows: list[Row]) -> list[str]:
    """What it costs while there is room, and gives when there is none."""
    return [
        f"{row['workload']}, {row['policy']}, {row['concurrency']} requests at once: "
        f"{row['throughput_over_native']:.3f} of native's throughput (95 %: {row['ci95_low']:.3f} to "
        f"{row['ci95_high']:.3f}), the same tokens in {row['identical_pairs']} of {row['pairs']} "
        f"pairs, {row['vtoken_evicted_tokens']:,.0f} tokens dropped."
        for row in rows
        if row.get("throughput_over_native") is not None
    ]

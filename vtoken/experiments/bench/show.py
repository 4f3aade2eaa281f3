"""Show a benchmark to people: Rich tables by suite, then notes and advice as sentences."""

from __future__ import annotations

from collections.abc import Sequence

from vtoken.experiments.bench.run import BenchResult
from vtoken.experiments.report.tables import Column, Row, make_table
from vtoken.modes import EVICTING_MODES

_HEAD = (
    Column("workload", "workload", digits=None),
    Column("policy", "policy", digits=None),
    Column("mode", "mode", digits=None),
)
_LOAD = (
    Column("output_throughput", "tok/s"),
    Column("p95_e2el_ms", "p95 s", 0.001),
)
_PREEMPTIONS = Column("vtoken_preemptions", "preempt", digits=0)

COLUMNS: dict[str, tuple[Column, ...]] = {
    "memory": (
        *_HEAD,
        Column("eviction_ratio", "ratio"),
        Column("vtoken_retained_blocks_per_request", "blocks/req", digits=2),
        Column("blocks_above_ideal", "over ideal", digits=2),
        Column("retained_over_naive", "of naive %", 100),
        Column("vtoken_memory_utilization", "util %", 100),
        Column("utilization_points_over_naive", "+points"),
        Column("vtoken_blocks_fully_dead_frac", "dead %", 100),
        Column("vtoken_blocks_partly_dead_frac", "partly %", 100),
        Column("vtoken_blocks_expected_partly_dead_frac", "by chance", 100),
        Column("shadow_freeable_frac", "freeable %", 100),
        *_LOAD,
    ),
    "sla": (
        *_HEAD,
        Column("pool_blocks", "pool", digits=0),
        Column("concurrency", "C", digits=0),
        *_LOAD,
        Column("sla_p95_e2el_ms", "limit s", 0.001),
        Column("feasible", "meets", digits=None),
        Column("is_selected", "C_sel", digits=None),
        _PREEMPTIONS,
        Column("gain_over_naive", "over naive %", 100),
        Column("gain_over_native", "over native %", 100),
        Column("request_goodput", "goodput/s", digits=2),
    ),
    "sensitivity": (
        *_HEAD,
        Column("factor", "factor", digits=None),
        Column("value", "value", digits=None),
        Column("normalized_retained_capacity", "capacity", digits=3),
        Column("normalized_output_throughput", "throughput", digits=3),
        Column("normalized_p95_e2el", "p95", digits=3),
        Column("vtoken_retained_blocks_per_request", "blocks/req", digits=2),
        *_LOAD,
    ),
    "prefix": (
        *_HEAD,
        Column("sharing_degree", "degree", digits=0),
        Column("shared_prefix", "shared", digits=None),
        Column("prefix_hit_frac", "hits %", 100),
        Column("vtoken_retained_blocks_per_request", "blocks/req", digits=2),
        Column("retained_over_naive", "of naive %", 100),
        Column("vtoken_shared_tokens_skipped", "skipped", digits=0),
        *_LOAD,
        Column("throughput_over_naive", "x naive", digits=2),
    ),
    "quality": (
        Column("task", "task", digits=None),
        Column("policy", "policy", digits=None),
        Column("mode", "mode", digits=None),
        Column("budget_frac", "kept %", 100, 0),
        Column("accuracy", "accuracy %", 100),
        Column("full_kv", "full KV %", 100),
        Column("mean_rouge_l", "ROUGE-L"),
        Column("identical_frac", "same text %", 100, 0),
        Column("num_questions", "n", digits=0),
    ),
    "peers": (
        Column("engine", "engine", digits=None),
        *_HEAD,
        Column("concurrency", "C", digits=0),
        Column("pool_tokens", "pool", digits=0),
        Column("budget_tokens", "budget", digits=0),
        *_LOAD,
        Column("throughput_over_stock", "x stock", digits=2),
        Column("peer_version", "version", digits=None),
        Column("eviction", "evicts", digits=None),
        Column("reason", "why not", digits=None),
    ),
    "elastic": (
        *_HEAD,
        Column("concurrency", "C", digits=0),
        *_LOAD,
        Column("throughput_over_native", "x native", digits=3),
        Column("ci95_low", "from", digits=3),
        Column("ci95_high", "to", digits=3),
        Column("identical_pairs", "same", digits=0),
        Column("vtoken_peak_residents", "at once", digits=0),
        _PREEMPTIONS,
        Column("vtoken_evicted_tokens", "dropped", digits=0),
    ),
    "sharing": (
        *_HEAD,
        Column("shared_prefix", "shared", digits=None),
        Column("retained_blocks", "blocks"),
        Column("retained_reduction_frac", "below naive %", 100),
        Column("prefix_hit_frac", "hits %", 100, 0),
        Column("least_protected_tokens", "protected", digits=0),
        Column("shared_tokens_skipped", "skipped", digits=0),
        Column("dropped_blocks", "dropped", digits=0),
        Column("vtoken_released_blocks", "released", digits=0),
        Column("copies", "copies", digits=0),
        Column("copies_declined", "declined", digits=0),
        Column("cached_prefix_blocks", "cached", digits=0),
        Column("inconsistencies", "wrong", digits=0),
    ),
}

# Terminals are narrow; the HTML page has them.
_ON_THE_PAGE_ONLY = {
    "vtoken_blocks_fully_dead_frac", "vtoken_blocks_partly_dead_frac",
    "vtoken_blocks_expected_partly_dead_frac", "peer_version", "eviction",
    "shared_tokens_skipped", "dropped_blocks", "copies_declined",
}  # fmt: skip


def filled_columns(suite: str, rows: Sequence[Row]) -> list[Column]:
    """The suite's columns that have a value."""
    return [c for c in COLUMNS[suite] if any(row.get(c.key) not in (None, "") for row in rows)]


def suite_table(suite: str, rows: Sequence[Row]):
    """A Rich table of a suite's rows; of a dataset its file's name, not the folders."""
    columns = [c for c in filled_columns(suite, rows) if c.key not in _ON_THE_PAGE_ONLY]
    shown = [{**row, "workload": str(row["workload"]).rpartition("/")[2]} for row in rows]
    return make_table(suite, shown, columns, is_bold=lambda row: bool(row.get("is_selected")))


def closing_lines(result: BenchResult) -> list[str]:
    """Notes and advice of all suites, and how the benchmark ended."""
    said = [line for suite in result.suites.values() for line in suite.notes + suite.advice]
    return said + ending_lines(result)


def ending_lines(result: BenchResult) -> list[str]:
    """What holds for all suites: runs that evicted nothing, and how the benchmark ended."""
    lines = []
    evicted_nothing = [
        f"{row['mode']}, {row['policy']} on {row['workload']}"
        for suite in result.suites.values()
        for row in suite.rows
        if row.get("note") and row["mode"] in EVICTING_MODES
    ]
    if evicted_nothing:
        lines.append("Evicted nothing, being within budget: " + "; ".join(evicted_nothing) + ".")
    if result.num_resumed:
        lines.append(f"{result.num_resumed} runs were read from the earlier benchmark.")
    if result.interrupted:
        lines.append("interrupted: these are the comparisons that were complete")
    return lines

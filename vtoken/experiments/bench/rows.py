"""From records of paired runs to the flat rows of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from vtoken.experiments.bench.bench_options import Case
from vtoken.experiments.bench.measure import Record

Row = dict[str, object]

SPREAD = (
    "output_throughput", "p95_e2el_ms", "mean_ttft_ms", "request_goodput",
    "vtoken_retained_blocks_per_request", "vtoken_memory_utilization",
)  # fmt: skip
"""Fields whose least and most over the repeats stand beside the median."""

_SUMS = ("vtoken_preemptions",)
RATIOS = {
    "throughput": "output_throughput",
    "p95_e2el": "p95_e2el_ms",
    "retained": "vtoken_retained_blocks_per_request",
}
"""Name of a ratio -> field: `throughput_over_naive` is the median over pairs."""


def make_row(case: Case, workload: str, records: Sequence[Record], **fields: object) -> Row:
    """A row of one case: medians over its repeats, counts of preemptions added up.

    Args:
        fields: further fields, put first.
    """
    row: Row = {"mode": case.mode, "policy": case.policy, "workload": workload, **fields}
    row["repeats"] = len(records)
    for key in _all_keys(records):
        values = [r.values[key] for r in records if r.values.get(key) is not None]
        numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
        if key in _SUMS:
            row[key] = sum(numbers)
        elif numbers:
            row[key] = median(numbers)
            if key in SPREAD and len(numbers) > 1:
                row[f"{key}_min"], row[f"{key}_max"] = min(numbers), max(numbers)
        elif values:
            row[key] = " / ".join(dict.fromkeys(map(str, values)))
    return row


def add_ratios(
    row: Row, records: Sequence[Record], others: Sequence[Record] | None, name: str
) -> None:
    """Add `<ratio>_over_<name>`, the median of a / b over pairs, with the least and the most.

    Utilisation is compared by difference, in points of 100.
    """
    if not others:
        return
    for ratio, field in RATIOS.items():
        _add(row, f"{ratio}_over_{name}", pair_ratios(records, others, field))
    key = "vtoken_memory_utilization"
    points = [
        100 * (a.values[key] - b.values[key])
        for a, b in zip(records, others, strict=False)
        if a.values.get(key) is not None and b.values.get(key) is not None
    ]
    _add(row, f"utilization_points_over_{name}", points)


def pair_ratios(a: Sequence[Record], b: Sequence[Record], field: str) -> list[float]:
    """a / b of every pair that has both."""
    return [
        x.values[field] / y.values[field]
        for x, y in zip(a, b, strict=False)
        if x.values.get(field) is not None and y.values.get(field)
    ]


def _add(row: Row, key: str, values: Sequence[float]) -> None:
    if values:
        row[key] = median(values)
        if len(values) > 1:
            row[f"{key}_min"], row[f"{key}_max"] = min(values), max(values)


def _all_keys(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(key for record in records for key in record.values))


def compared_rows(
    cases: Sequence[Case], runs: Mapping[str, list[Record]], workload: str, **fields: object
) -> list[Row]:
    """Rows of a comparison's cases, each with its ratios to its naive twin and to native."""
    rows = []
    for case in cases:
        records = runs.get(case.key, [])
        if not records:
            continue
        row = make_row(case, workload, records, **fields, **case.changes)
        if case.mode != "naive" and case.policy:
            add_ratios(row, records, runs.get(case.with_mode("naive").key), "naive")
        if case.mode != "native":
            native = next((r for k, r in runs.items() if k.split("/")[0] == "native"), None)
            add_ratios(row, records, native, "native")
        rows.append(row)
    return rows

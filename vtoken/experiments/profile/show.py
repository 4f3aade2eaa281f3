"""What a profile shows to people: tables, and the answers in a sentence each."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from vtoken.experiments.profile.boundaries import OURS, PHASES
from vtoken.experiments.profile.rows import Row
from vtoken.experiments.profile.run import ProfileResult

TITLES = {
    "overhead": "Overhead: hooks, relocation events, reclaim against naive",
    "kernels": "Kernels, fastest of many; ratio to stock attention on the same live tokens, packed",
    "scale": "Scale: the scheduler's side, no model behind it",
}


def tables(result: ProfileResult) -> Iterator[Table]:
    """A table per suite."""
    for suite, rows in result.rows.items():
        yield phases_table(result.step_profiles) if suite == "step" else rows_table(suite, rows)


def rows_table(suite: str, rows: list[Row]) -> Table:
    """Rows as they are, numbers to four digits."""
    table = Table(title=TITLES[suite], title_justify="left")
    table.add_column("name")
    for name in ("value", "p50", "p95"):
        table.add_column(name, justify="right")
    table.add_column("unit")
    table.add_column("x stock", justify="right")
    for row in rows:
        numbers = [_number(row.get(key)) for key in ("value", "p50", "p95")]
        interval = ""
        if "ci95_low" in row:
            interval = f" ({row['ci95_low']:+.2%} .. {row['ci95_high']:+.2%})"
        ratio = row.get("ratio_to_stock")
        table.add_row(
            row["name"], *numbers, row["unit"] + interval, "" if ratio is None else f"{ratio:.3f}"
        )
    return table


def phases_table(profiles: list) -> Table:
    """Milliseconds per phase and mode, and their share of the step."""
    at = f"{profiles[0].concurrency} running requests" if profiles else ""
    table = Table(title=f"A decode step, mean milliseconds, {at}", title_justify="left")
    table.add_column("phase")
    for p in profiles:
        table.add_column(p.mode, justify="right")
        table.add_column("", justify="right")
    for phase in PHASES:
        cells = [p.phase_ms(phase) for p in profiles]
        if not any(ms.any() for ms in cells):
            continue
        shown: list[str] = []
        for ms, p in zip(cells, profiles, strict=True):
            share = ms.sum() / p.total_ms.sum()
            shown += [f"{ms.mean():.3f}", f"{share:.1%}"] if ms.any() else ["", ""]
        table.add_row(f"{phase} *" if phase in OURS else phase, *shown)
    totals = [cell for p in profiles for cell in (f"{p.total_ms.mean():.3f}", "")]
    table.add_row("step", *totals, style="bold")
    table.caption = "* not in stock vLLM"
    return table


def answer_lines(result: ProfileResult) -> Iterator[str]:
    """The questions that the suites answer, one sentence each."""
    rows = {r["name"]: r for r in result.rows.get("overhead", ())}
    for c in result.settings.concurrencies:
        share = rows.get(f"indirection/hook_share/c{c}")
        if share is not None:
            slow = rows[f"indirection/slowdown_from_native/c{c}"]
            yield (
                f"Hooks without eviction take {share['value']:.2%} of a step at {c} running "
                f"requests; in paired steps it is {slow['value']:+.2%} slower than native "
                f"(95 %: {slow['ci95_low']:+.2%} to {slow['ci95_high']:+.2%})."
            )
    event = rows.get(f"event/planner/c{result.settings.concurrencies[0]}")
    if event is not None:
        name = event["name"].replace("planner", "{}")
        parts = [f"{what} {rows[name.format(what)]['p50']:,.0f} µs" for what in
                 ("planner", "launch", "rewrite")]  # fmt: skip
        yield f"A relocation event takes (median): {', '.join(parts)}."
    steps = {p.mode: p for p in result.step_profiles}
    for mode, p in steps.items():
        ours = sum(p.phase_ms(phase).sum() for phase in OURS) / p.total_ms.sum()
        if ours:
            yield f"Of a step in mode {mode}, {ours:.1%} is work that stock vLLM does not have."


def _number(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"

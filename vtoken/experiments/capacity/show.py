"""Show a capacity scan: Rich tables, the frontier in sentences, CSV tables and plots."""

from __future__ import annotations

from pathlib import Path

from vtoken.experiments.capacity.scan_result import ScanHalf, ScanResult
from vtoken.experiments.report import plots
from vtoken.experiments.report.plot_style import has_matplotlib
from vtoken.experiments.report.tables import Column, Row, make_table
from vtoken.modes import MODES

_COLUMNS = (
    Column("concurrency", "requests", digits=0),
    Column("line", "mode", digits=None),
    Column("fits", "fits", digits=None),
    Column("output_throughput", "tok/s"),
    Column("vtoken_peak_blocks", "peak blocks", digits=0),
    Column("vtoken_retained_blocks_per_request", "blocks/req"),
    Column("ideal_blocks_per_request", "packed ideal"),
    Column("reason", "why not", digits=None, wraps=True),
)


def points_table(half: ScanHalf):
    """A Rich table of concurrency x mode; the frontier of each mode is in bold."""
    rows = [run.point.row() for run in half.runs]
    several = len({row["policy"] for row in rows if row["policy"]}) > 1
    for row in rows:
        row["line"] = (
            f"{row['mode']}, {row['policy']}" if several and row["policy"] else row["mode"]
        )
        row["fits"] = "[green]yes[/]" if row["feasible"] else "[red]no[/]"
        row["vtoken_peak_blocks"] = row["vtoken_peak_blocks"] or None  # nothing ran
    rows.sort(key=lambda r: (r["concurrency"], MODES.index(r["mode"]), r["policy"]))
    frontier = {(r["mode"], r["policy"], r["max_concurrency"]) for r in half.frontier}
    return make_table(
        f"{half.pool}, {'modelled' if half.modelled else 'measured'}", rows, _COLUMNS,
        is_bold=lambda row: (row["mode"], row["policy"], row["concurrency"]) in frontier,
    )  # fmt: skip


def frontier_sentence(half: ScanHalf) -> str:
    """The answer of one half: "native 6, naive 6, vtoken 12 (2.0x native)"."""
    frontier = half.frontier
    several = len({row["policy"] for row in frontier if row["policy"]}) > 1
    native = next((r["max_concurrency"] for r in frontier if r["mode"] == "native"), 0)
    parts = [_frontier_part(row, native, several) for row in frontier]
    known = {row["mode"] for row in frontier}
    parts += [
        f"{m} not run" for m in dict.fromkeys(x.mode for x in half.left_out) if m not in known
    ]
    return ", ".join(parts) or "no point was run"


def _frontier_part(row: Row, native: int, several: bool) -> str:
    name = f"{row['mode']} ({row['policy']})" if several and row["policy"] else row["mode"]
    found, above = row["max_concurrency"], row["next_infeasible"]
    if not found and above is not None and above > 1:
        return f"{name} below {above:,}"
    text = f"{name} {found:,}" if above is not None else f"{name} at least {found:,}"
    if row["mode"] == "vtoken" and native and found:
        text += f" ({found / native:.1f}x native)"
    return text


def answer_lines(result: ScanResult) -> list[str]:
    """What the scan found, as sentences; the last one gives the answer of every half."""
    assert result.main is not None
    lines = list(result.notes)
    for half in (result.modelled, result.main):
        if half is not None and half.left_out:
            limit = result.settings.time_limit_s
            left = "; ".join(x.describe() for x in half.left_out)
            lines.append(f"left out by --time-limit {limit:g}s: {left}")
    if result.interrupted:
        lines.append("interrupted: these are the points measured so far")
    return [*lines, _last_sentence(result)]


def _last_sentence(result: ScanResult) -> str:
    main, modelled = result.main, result.modelled
    verb = "modelled" if main.modelled else "measured"
    text = (
        f"Requests of up to {result.max_tokens:,} tokens at once without a preemption: "
        f"{frontier_sentence(main)}, {verb} in {main.pool}"
    )
    if modelled is not None:
        text += (
            f"; {frontier_sentence(modelled)}, modelled in the {modelled.pool} that vLLM would make"
        )
    return text + "."


def csv_tables(result: ScanResult) -> dict[str, list[Row]]:
    """Flat tables by name, for `save_result`."""
    halves = [half for half in (result.main, result.modelled) if half is not None]
    tables = {
        "points": [run.point.row() for half in halves for run in half.runs],
        "frontier": [row for half in halves for row in half.frontier],
        "demand": demand_rows(result.main),
    }
    return {name: rows for name, rows in tables.items() if rows}


def demand_rows(half: ScanHalf) -> list[Row]:
    """Blocks in use over the steps of each line's frontier point."""
    frontier = {(r["mode"], r["policy"], r["max_concurrency"]) for r in half.frontier}
    return [
        {
            "mode": p.mode, "policy": p.policy, "concurrency": p.concurrency, "step": step,
            "blocks": blocks, "running": running,
        }
        for run in half.runs
        for p in (run.point,)
        if (p.mode, p.policy, p.concurrency) in frontier
        for step, blocks, running in run.demand
    ]  # fmt: skip


def write_plots(result: ScanResult, folder: str | Path) -> list[Path]:
    """Draw what there is to draw; an empty list where matplotlib is not installed."""
    if not has_matplotlib():
        return []
    paths = []
    for half, prefix in ((result.main, ""), (result.modelled, "modelled_")):
        if half is not None and half.runs:
            paths += _plots_of_half(half, Path(folder), prefix)
    return paths


def _plots_of_half(half: ScanHalf, folder: Path, prefix: str) -> list[Path]:
    points = [run.point.row() for run in half.runs]
    pool_blocks = half.pool.usable_blocks
    paths = [
        plots.frontier_bars(half.frontier, folder / f"{prefix}frontier.png"),
        plots.block_demand(points, folder / f"{prefix}block_demand.png", pool_blocks=pool_blocks),
    ]
    if any(point["output_throughput"] is not None for point in points):
        path = folder / f"{prefix}throughput.png"
        paths.append(plots.throughput_by_concurrency(points, path))
    if demand := demand_rows(half):
        path = folder / f"{prefix}demand_over_time.png"
        paths.append(plots.demand_over_time(demand, path, pool_blocks=pool_blocks, time_key="step"))
    return paths

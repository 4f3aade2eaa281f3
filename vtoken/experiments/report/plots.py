"""Plots of result rows, as PNG files.

Each function takes plain rows (dicts as in result files), writes one file and returns its path;
nothing is computed here that the rows do not say. matplotlib is imported on the first plot, and
no global state of it is touched (no pyplot, no backend), so this works in any process.

Colours stand for modes and are safe for colour-blind readers; line styles and hatches stand for
policies. A cross marks an infeasible point. Rows with `modelled: true` are said to be modelled.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from vtoken.experiments.report.bar_plots import bars, grouped_bars
from vtoken.experiments.report.plot_style import (
    COLOURS,
    DASHES,
    MARKERS,
    POLICY_COLOURS,
    Row,
    by_mode,
    by_series,
    latency_label,
    line_label,
    new_figure,
    policies_of,
    pool_line,
    save,
    series_style,
)


def frontier_bars(
    frontier: Iterable[Row],
    path: str | Path,
    *,
    title: str = "Requests resident at once without a preemption",
) -> Path:
    """Bars of `max_concurrency` per (mode, policy)."""
    rows = by_mode(frontier)
    return bars(
        rows, path, key="max_concurrency", title=title, ylabel="concurrent requests", form="d"
    )


def throughput_by_concurrency(
    points: Iterable[Row], path: str | Path, *, title: str = "Throughput by concurrency"
) -> Path:
    """`output_throughput` over `concurrency`, one line per (mode, policy).

    An infeasible point is a cross: at its throughput where that was measured, else at 0.
    """
    return _concurrency_lines(
        points, path, title=title, key="output_throughput", ylabel="output tokens per second"
    )


def block_demand(
    points: Iterable[Row],
    path: str | Path,
    *,
    pool_blocks: int,
    title: str = "Demand for KV blocks by concurrency",
) -> Path:
    """`vtoken_peak_blocks` over `concurrency` against the pool, and the packed ideal.

    The ideal line is concurrency x `ideal_blocks_per_request`, from the rows of mode vtoken.
    """
    rows = list(points)

    def extras(axes) -> None:
        ideal = sorted(
            (row["concurrency"], row["concurrency"] * row["ideal_blocks_per_request"])
            for row in rows
            if row["mode"] == "vtoken" and row.get("ideal_blocks_per_request") is not None
        )
        if ideal:
            axes.plot(
                *zip(*ideal, strict=True), color="#b8336a", linestyle="--", linewidth=1.4,
                label="packed ideal", zorder=1.5,
            )  # fmt: skip
        pool_line(axes, pool_blocks, [row.get("vtoken_peak_blocks") for row in rows])

    return _concurrency_lines(
        rows, path, title=title, key="vtoken_peak_blocks", ylabel="peak KV blocks in use",
        extras=extras, legend_place="lower right",
    )  # fmt: skip


def latency_by_concurrency(
    rows: Iterable[Row],
    path: str | Path,
    *,
    key: str = "p95_e2el_ms",
    sla_ms: float | None = None,
    title: str = "Latency by concurrency",
) -> Path:
    """A latency in ms over `concurrency`, with the SLA as a line."""

    def extras(axes) -> None:
        if sla_ms is not None:
            axes.axhline(sla_ms, color="#b8336a", linestyle="--", linewidth=1.4)
            line_label(axes, sla_ms, f"SLA {sla_ms:,.0f} ms", "#b8336a")

    return _concurrency_lines(
        rows, path, title=title, key=key, ylabel=latency_label(key), extras=extras
    )


def demand_over_time(
    rows: Iterable[Row],
    path: str | Path,
    *,
    pool_blocks: int | None = None,
    time_key: str = "time_s",
    title: str = "Demand for KV blocks over time",
) -> Path:
    """Blocks over time (`time_key` "time_s" or "step"), one line per (mode, policy)."""
    rows = list(rows)
    figure, axes = new_figure(title, rows, width=7.6)
    policies = policies_of(rows)
    for group in by_series(rows).values():
        group.sort(key=lambda row: row[time_key])
        style = series_style(group[0], policies) | {"marker": "", "linewidth": 1.5}
        axes.step(
            [row[time_key] for row in group], [row["blocks"] for row in group], where="post",
            **style,
        )  # fmt: skip
    axes.set_xlabel("step" if time_key == "step" else "time (s)")
    axes.set_ylabel("KV blocks in use")
    axes.margins(x=0.01)
    axes.set_ylim(bottom=0)
    if pool_blocks is not None:
        pool_line(axes, pool_blocks, [row["blocks"] for row in rows])
    return save(figure, axes, path, legend=bool(rows))


def utilisation_bars(rows: Iterable[Row], path: str | Path) -> Path:
    """Bars of memory utilisation in percent."""
    return grouped_bars(
        rows, path, key="vtoken_memory_utilization", factor=100, top=112,
        title="Live tokens per slot of allocated blocks", ylabel="memory utilisation (%)",
    )  # fmt: skip


def pareto(
    rows: Iterable[Row],
    path: str | Path,
    *,
    title: str = "Throughput against latency",
) -> Path:
    """`output_throughput` against p95 latency; each point bears its concurrency."""
    latency_key = "p95_e2el_ms"
    rows = [r for r in rows if r.get(latency_key) is not None and r.get("output_throughput")]
    figure, axes = new_figure(title, rows)
    policies = policies_of(rows)
    series = by_series(rows)
    for (mode, _), group in series.items():
        group.sort(key=lambda row: row["concurrency"])
        axes.plot(
            [row[latency_key] for row in group], [row["output_throughput"] for row in group],
            **series_style(group[0], policies),
        )  # fmt: skip
        # Close curves would write over each other: above one mode's points, below the other's,
        # and where there are many curves only at their ends.
        above = mode in ("vtoken", "indirection")
        for row in group if len(series) <= 3 else group[-1:]:
            axes.annotate(
                f"{row['concurrency']}", (row[latency_key], row["output_throughput"]),
                xytext=(0, 6 if above else -12), textcoords="offset points", ha="center",
                fontsize=7.5, color=COLOURS.get(mode, "black"),
            )  # fmt: skip
    axes.set_xlabel(latency_label(latency_key))
    axes.set_ylabel("output tokens per second")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.06, y=0.12)
    axes.text(
        0.99, 0.02, "figures at the points: concurrency", transform=axes.transAxes, ha="right",
        fontsize=8, color="#5b6472",
    )  # fmt: skip
    return save(figure, axes, path, legend=bool(rows))


def quality_by_budget(
    rows: Iterable[Row],
    path: str | Path,
    *,
    title: str = "Quality by budget",
) -> Path:
    """`accuracy` over the kept share of tokens, one line per policy.

    `full_kv`, the accuracy with full KV, is a line where all rows agree on it, with a band of 2
    points below it.
    """
    rows = [row for row in rows if row.get("accuracy") is not None]
    figure, axes = new_figure(title, rows)
    full = {row["full_kv"] for row in rows if row.get("full_kv") is not None}
    if len(full) == 1:
        level = 100 * full.pop()
        axes.axhspan(level - 2, level, color="#5b6472", alpha=0.15, lw=0)
        axes.axhline(
            level, color="#5b6472", linestyle="--", linewidth=1.2, label="full KV (band: 2 points)"
        )
    for number, policy in enumerate(policies_of(rows)):
        group = sorted((r for r in rows if r["policy"] == policy), key=lambda r: r["budget_frac"])
        axes.plot(
            [100 * row["budget_frac"] for row in group], [100 * row["accuracy"] for row in group],
            color=POLICY_COLOURS[number % len(POLICY_COLOURS)], label=policy,
            marker=MARKERS[number % len(MARKERS)],
            linestyle=DASHES[number // len(POLICY_COLOURS) % len(DASHES)],
        )  # fmt: skip
    axes.set_xlabel("KV budget (% of tokens kept)")
    axes.set_ylabel("accuracy (%)")
    axes.set_ylim(bottom=0)
    return save(figure, axes, path, legend=bool(rows), legend_below=len(policies_of(rows)) > 4)


def _concurrency_lines(
    points: Iterable[Row],
    path: str | Path,
    *,
    title: str,
    key: str,
    ylabel: str,
    extras=None,
    legend_place: str = "best",
) -> Path:
    rows = list(points)
    figure, axes = new_figure(title, rows)
    policies = policies_of(rows)
    crosses = False
    for group in by_series(rows).values():
        group.sort(key=lambda row: row["concurrency"])
        style = series_style(group[0], policies)
        good = [r for r in group if r.get("feasible", True) and r.get(key) is not None]
        axes.plot(
            [row["concurrency"] for row in good], [row[key] for row in good], **style
        )  # fmt: skip
        bad = [row for row in group if not row.get("feasible", True)]
        axes.plot(
            [row["concurrency"] for row in bad], [row.get(key) or 0 for row in bad],
            color=style["color"], linestyle="", marker="x", markersize=2 * style["markersize"] - 3,
            markeredgewidth=2, clip_on=False, zorder=4,
        )  # fmt: skip
        crosses |= bool(bad)
    if crosses:
        axes.plot([], [], "x", color="black", markeredgewidth=2, label="infeasible")
    axes.set_xlabel("concurrent requests")
    axes.set_ylabel(ylabel)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(bottom=0)
    if extras:
        extras(axes)
    return save(figure, axes, path, legend=bool(rows), legend_place=legend_place)

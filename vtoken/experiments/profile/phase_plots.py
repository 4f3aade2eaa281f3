"""Pictures of a profile, as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vtoken.experiments.profile.boundaries import PHASES
from vtoken.experiments.profile.rows import Row
from vtoken.experiments.profile.step import StepProfile
from vtoken.experiments.report.plot_style import HATCHES, MARKERS, POLICY_COLOURS, new_figure, save


def phase_bars(profiles: Sequence[StepProfile], path: str | Path) -> Path:
    """One bar per mode, stacked from the phases' mean milliseconds in a decode step."""
    title = f"Where a decode step's time goes, {profiles[0].concurrency} running requests"
    figure, axes = new_figure(title, [{}], width=max(6.6, 3.0 + 1.3 * len(profiles)))
    bottom = [0.0] * len(profiles)
    for number, phase in enumerate(PHASES):
        heights = [float(p.phase_ms(phase).mean()) for p in profiles]
        if not any(heights):
            continue
        axes.bar(
            range(len(profiles)), heights, 0.55, bottom=bottom, label=phase,
            color=POLICY_COLOURS[number % len(POLICY_COLOURS)],
            hatch=HATCHES[number // len(POLICY_COLOURS)], edgecolor="white", linewidth=0.4,
        )  # fmt: skip
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    for x, total in enumerate(bottom):
        axes.annotate(
            f"{total:.1f}", (x, total), xytext=(0, 3), textcoords="offset points", ha="center",
            fontweight="bold",
        )  # fmt: skip
    axes.set_xticks(range(len(profiles)), [p.mode for p in profiles])
    axes.set_ylabel("milliseconds per step")
    axes.set_ylim(0, 1.12 * max(bottom))
    return save(figure, axes, path, grid_axis="y", legend=True, legend_below=True)


def cost_lines(
    rows: Sequence[Row], x_key: str, path: str | Path, *, title: str, xlabel: str, ylabel: str
) -> Path:
    """`value` over a key of the rows, both logarithmic, one line per `series`."""
    figure, axes = new_figure(title, rows)
    names = list(dict.fromkeys(row["series"] for row in rows))
    for number, name in enumerate(names):
        points = [(row[x_key], row["value"]) for row in rows if row["series"] == name]
        axes.plot(
            *zip(*points, strict=True), label=name, marker=MARKERS[number % len(MARKERS)],
            color=POLICY_COLOURS[number % len(POLICY_COLOURS)],
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    return save(figure, axes, path, legend=bool(names))

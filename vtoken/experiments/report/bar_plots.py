"""Bars of a field of result rows: one per row, or a group per policy with a bar per mode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from vtoken.experiments.report.plot_style import (
    COLOURS,
    HATCHES,
    PEER_COLOUR,
    Row,
    new_figure,
    policies_of,
    policy_number,
    save,
    series_label,
)
from vtoken.modes import MODES


def bars(
    rows: Sequence[Row],
    path: str | Path,
    *,
    key: str,
    title: str,
    ylabel: str,
    form: str,
    breaks: Sequence[tuple[str, str]] = ((", ", "\n"),),
) -> Path:
    """A bar per row with its value above it; lines from the least of its repeats to the most.

    Args:
        form: of the value above a bar.
        breaks: what in labels is broken into lines, and how.
    """
    policies = policies_of([row for row in rows if row.get("policy")])
    figure, axes = new_figure(title, rows, width=max(5.0, 1.6 + 1.15 * len(rows)))
    spread_label, tops = "least and most of the repeats", [1.0]
    for x, row in enumerate(rows):
        height = row[key]
        low, high = row.get(f"{key}_min", height), row.get(f"{key}_max", height)
        number = policy_number(row, policies) if row.get("policy") else 0
        axes.bar(
            x, height, 0.62, color=COLOURS.get(row["mode"], PEER_COLOUR),
            hatch=HATCHES[number % len(HATCHES)], edgecolor="white", linewidth=0.8,
        )  # fmt: skip
        if low < high:
            axes.errorbar(
                x, height, [[height - low], [high - height]], color="black", linewidth=1.2,
                capsize=4, label=spread_label,
            )  # fmt: skip
            spread_label = None  # said once
        axes.annotate(
            f"{height:{form}}", (x, high), xytext=(0, 3), textcoords="offset points", ha="center",
            fontweight="bold",
        )  # fmt: skip
        tops.append(high)
    labels = [series_label(row, policies) for row in rows]
    for separator, broken in breaks:
        labels = [label.replace(separator, broken) for label in labels]
    axes.set_xticks(range(len(rows)), labels)
    axes.set_ylabel(ylabel)
    axes.set_ylim(0, 1.18 * max(tops))
    axes.yaxis.get_major_locator().set_params(integer=True)
    return save(figure, axes, path, legend=spread_label is None, grid_axis="y", legend_below=True)


def grouped_bars(
    rows: Iterable[Row],
    path: str | Path,
    *,
    key: str,
    title: str,
    ylabel: str,
    factor: float = 1.0,
    top: float | None = None,
) -> Path:
    """A group per policy (and workload), a bar per mode: the mean of the rows.

    Args:
        factor: on all values; top: of the y axis.
    """
    rows = [row for row in rows if row.get(key) is not None]
    groups = list(dict.fromkeys((row["policy"], row.get("workload", "")) for row in rows))
    modes = [mode for mode in MODES if any(row["mode"] == mode for row in rows)]
    figure, axes = new_figure(title, rows, width=max(5.0, 1.8 + 0.75 * len(groups) * len(modes)))
    width = 0.8 / max(1, len(modes))
    for number, mode in enumerate(modes):
        for x, group in enumerate(groups):
            found = [
                factor * r[key] for r in rows
                if (r["policy"], r.get("workload", ""), r["mode"]) == (*group, mode)
            ]  # fmt: skip
            if not found:
                continue
            mean = sum(found) / len(found)
            at = x + (number - (len(modes) - 1) / 2) * width
            axes.bar(at, mean, 0.92 * width, color=COLOURS[mode])
            axes.annotate(
                f"{mean:.3g}", (at, mean), xytext=(0, 2), textcoords="offset points", ha="center",
                fontsize=8,
            )  # fmt: skip
        axes.bar(0, 0, color=COLOURS[mode], label=mode)  # the legend's entry, even with gaps
    axes.set_xticks(range(len(groups)), ["\n".join(filter(None, g)) for g in groups])
    axes.set_ylabel(ylabel)
    if top is not None:
        axes.set_ylim(0, top)
    return save(figure, axes, path, legend=bool(rows), grid_axis="y", legend_below=True)

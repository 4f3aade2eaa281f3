"""How our plots look: colours, line styles, labels, and saving. Used by everything that draws."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from vtoken.errors import ConfigError
from vtoken.experiments.report.results import write_bytes
from vtoken.modes import EVICTING_MODES, MODES

Row = Mapping[str, object]

COLOURS = {
    "native": "#5b6472",
    "indirection": "#6fa8dc",
    "naive": "#d98324",
    "vtoken": "#0f766e",
}
PEER_COLOUR = "#4457a5"  # of engines that have no mode
POLICY_COLOURS = ("#0f766e", "#d98324", "#4457a5", "#b8336a", "#5b6472", "#8a6d1d", "#6fa8dc")
# Modes often coincide: the earlier ones are drawn wider, so that they stay visible underneath.
WIDTHS = {"native": 4.0, "indirection": 3.2, "naive": 2.4, "vtoken": 1.5}
DASHES = ("-", "--", ":", "-.")
HATCHES = ("", "///", "...", "xx", "\\\\\\")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def has_matplotlib() -> bool:
    """Whether plots can be drawn here."""
    return find_spec("matplotlib") is not None


def new_figure(title: str, rows: Sequence[Row], width: float = 6.6):
    """A figure of `width` inches and its axes; the title says whether the rows are modelled."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        allowed = f"an environment with matplotlib: pip install 'vtoken[plots]' ({error})"
        raise ConfigError("plots", title, allowed) from error

    figure = Figure(figsize=(width, 4.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    if rows and all(row.get("modelled") for row in rows):
        title += " (modelled)"
    elif any(row.get("modelled") for row in rows):
        title += " (partly modelled)"
    axes.set_title(title, fontsize=11, loc="left", fontweight="bold")
    if not rows:
        axes.text(0.5, 0.5, "no points", transform=axes.transAxes, ha="center", color="#5b6472")
    return figure, axes


def save(
    figure,
    axes,
    path: str | Path,
    *,
    legend: bool = False,
    grid_axis: str = "both",
    legend_place: str = "best",
    legend_below: bool = False,
) -> Path:
    """Finish a figure and write it as PNG, atomically."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid_axis, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    for axis in (axes.yaxis, axes.xaxis)[: 1 if grid_axis == "y" else 2]:
        axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    if legend and legend_below:
        columns = min(4, len(axes.get_legend_handles_labels()[1]))
        figure.legend(loc="outside lower center", frameon=False, fontsize=9, ncols=columns)
    elif legend:
        axes.legend(frameon=True, framealpha=0.9, edgecolor="none", fontsize=9, loc=legend_place)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return write_bytes(path, out.getvalue())


def by_series(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by (mode, policy), modes in their usual order."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in by_mode(rows):
        groups.setdefault((row["mode"], row.get("policy", "")), []).append(row)
    return groups


def by_mode(rows: Iterable[Row]) -> list[Row]:
    """Rows with modes in their usual order, otherwise as they came."""
    order = {mode: number for number, mode in enumerate(MODES)}
    return sorted(rows, key=lambda row: order.get(row["mode"], len(order)))


def policies_of(rows: Iterable[Row]) -> list[str]:
    """Policies of the rows that evict, in order of appearance."""
    return list(dict.fromkeys(row.get("policy", "") for row in rows if _may_evict(row)))


def _may_evict(row: Row) -> bool:
    """Also of engines that have no mode."""
    return row.get("mode") not in set(MODES) - set(EVICTING_MODES)


def policy_number(row: Row, policies: Sequence[str]) -> int:
    """A row's policy as a number; 0 where the mode does not evict, whatever the row says."""
    return policies.index(row.get("policy", "")) if _may_evict(row) else 0


def series_label(row: Row, policies: Sequence[str]) -> str:
    """The mode, and the policy where there are several of them."""
    several = _may_evict(row) and row.get("policy") and len(policies) > 1
    return f"{row['mode']}, {row['policy']}" if several else str(row["mode"])


def series_style(row: Row, policies: Sequence[str]) -> dict[str, object]:
    """Line style of a series, for `plot` and `step`."""
    number, width = policy_number(row, policies), WIDTHS.get(row["mode"], 1.5)
    return {
        "color": COLOURS.get(row["mode"], "black"),
        "linewidth": width,
        "linestyle": DASHES[number % len(DASHES)],
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": 4 + width,
        "label": series_label(row, policies),
    }


def latency_label(key: str) -> str:
    """An axis label for a field named as in `vllm bench serve`, such as `p95_e2el_ms`."""
    names = {"e2el": "end-to-end latency", "ttft": "time to first token",
             "tpot": "time per output token", "itl": "inter-token latency"}  # fmt: skip
    statistic, _, rest = key.removesuffix("_ms").partition("_")
    return f"{statistic} {names.get(rest, rest.replace('_', ' '))} (ms)"


def pool_line(axes, pool_blocks: int, values: Iterable[object]) -> None:
    """Draw the pool, and make room for it and for everything that exceeds it."""
    highest = max([float(v) for v in values if v is not None and math.isfinite(v)], default=0)
    axes.axhline(pool_blocks, color="black", linewidth=1.4)
    axes.set_ylim(0, 1.15 * max(pool_blocks, highest))
    line_label(axes, pool_blocks, f"pool: {pool_blocks:,} blocks", "black")


def line_label(axes, y: float, text: str, colour: str) -> None:
    """Write on a horizontal line's left end, inside the axes, just above it."""
    axes.annotate(
        text, (0.01, y), xycoords=axes.get_yaxis_transform(), xytext=(0, 3),
        textcoords="offset points", ha="left", va="bottom", fontsize=9, color=colour,
    )  # fmt: skip

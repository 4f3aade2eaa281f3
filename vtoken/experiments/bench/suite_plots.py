"""Plots of a benchmark's suites; files are named SUITE_WHAT.png."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from vtoken.experiments.bench.context import SuiteResult
from vtoken.experiments.report import plots
from vtoken.experiments.report.plot_style import (
    COLOURS,
    DASHES,
    HATCHES,
    POLICY_COLOURS,
    new_figure,
    policies_of,
    save,
    series_label,
)

Row = Mapping[str, object]
PEER_COLOUR = "#4457a5"


def draw_memory(suite: SuiteResult, folder: Path) -> list[Path]:
    """Utilisation (Figure 7a), retained blocks (7b), live tokens per block, dead blocks."""
    ratios = [r["eviction_ratio"] for r in suite.rows if r.get("eviction_ratio") is not None]
    first = ratios[0] if ratios else None
    rows = [
        row for row in suite.rows
        if row["mode"] in ("naive", "vtoken") and row.get("eviction_ratio") == first
    ]  # fmt: skip
    if not rows:  # native alone
        return []
    paths = [plots.utilisation_bars(rows, folder / "memory_utilisation.png")]
    retained = "vtoken_retained_blocks_per_request"
    paths.append(
        bars_by_mode(
            rows,
            folder / "memory_retained_blocks.png",
            key=retained,
            ylabel="blocks per request",
            title="Retained blocks per request",
        )
    )
    histogram = suite.tables.get("block_histogram", [])
    chosen = [r for r in histogram if r["mode"] == "naive" or r["mode"] == "vtoken"]
    if chosen:
        paths.append(_histogram(chosen, first, folder / "memory_live_per_block.png"))
    shares = [
        row for row in suite.tables.get("block_shares", [])
        if row["mode"] == "naive" and row.get("eviction_ratio") == first
    ]  # fmt: skip
    if shares:
        paths.append(_shares(shares, folder / "memory_dead_blocks.png"))
    return paths


def bars_by_mode(rows: Sequence[Row], path: Path, *, key: str, ylabel: str, title: str) -> Path:
    """Bars of a field: a group per policy and workload, a bar per mode."""
    rows = [row for row in rows if row.get(key) is not None]
    groups = list(dict.fromkeys((row["policy"], row["workload"]) for row in rows))
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    figure, axes = new_figure(title, rows, width=max(5.0, 1.8 + 0.75 * len(groups) * len(modes)))
    width = 0.8 / max(1, len(modes))
    for number, mode in enumerate(modes):
        at, heights = [], []
        for x, group in enumerate(groups):
            for row in rows:
                if (row["policy"], row["workload"]) == group and row["mode"] == mode:
                    at.append(x + (number - (len(modes) - 1) / 2) * width)
                    heights.append(row[key])
        axes.bar(at, heights, 0.92 * width, color=COLOURS[mode], label=mode)
    axes.set_xticks(range(len(groups)), ["\n".join(filter(None, group)) for group in groups])
    axes.set_ylabel(ylabel)
    return save(figure, axes, path, legend=bool(rows), grid_axis="y", legend_below=True)


def _histogram(rows: Sequence[Row], ratio: object, path: Path) -> Path:
    """Share of held blocks by their live tokens, the mean over policies and workloads."""
    rows = [row for row in rows if row.get("eviction_ratio") == ratio]
    figure, axes = new_figure("Live tokens per held block", rows)
    for mode in ("naive", "vtoken"):
        group = [row for row in rows if row["mode"] == mode]
        counts = sorted({row["live_tokens"] for row in group})
        means = [
            100 * sum(r["blocks_frac"] for r in group if r["live_tokens"] == n)
            / max(1, sum(r["live_tokens"] == n for r in group))
            for n in counts
        ]  # fmt: skip
        axes.step(counts, means, where="mid", color=COLOURS[mode], label=mode)
    axes.set_xlabel("live tokens in a block")
    axes.set_ylabel("blocks (%)")
    axes.set_ylim(bottom=0)
    return save(figure, axes, path, legend=True)


def _shares(rows: Sequence[Row], path: Path) -> Path:
    """Share of partly dead blocks over steps under naive; dashes: were victims drawn by chance."""
    figure, axes = new_figure("Blocks with live and dead tokens, naive", rows)
    lines = list(dict.fromkeys((row["policy"], row["workload"]) for row in rows))
    for number, (policy, workload) in enumerate(lines):
        group = [r for r in rows if (r["policy"], r["workload"]) == (policy, workload)]
        colour = POLICY_COLOURS[number % len(POLICY_COLOURS)]
        steps = [row["step"] for row in group]
        label = f"{policy}, {workload}"
        axes.plot(steps, [100 * r["partly_dead"] for r in group], color=colour, label=label)
        axes.plot(
            steps, [100 * r.get("expected_partly_dead", float("nan")) for r in group],
            color=colour, linestyle="--", linewidth=1,
        )  # fmt: skip
    axes.plot([], [], color="black", linestyle="--", linewidth=1, label="by chance")
    axes.set_xlabel("step")
    axes.set_ylabel("partly dead blocks (%)")
    axes.set_ylim(0, 105)
    return save(figure, axes, path, legend=True, legend_below=True)


def draw_sla(suite: SuiteResult, folder: Path) -> list[Path]:
    """Per workload and pool: throughput, latency with the limit, and one against the other."""
    paths = []
    pools = list(
        dict.fromkeys((r["workload"], r["pool_policy"], r["pool_frac"]) for r in suite.rows)
    )
    for number, (workload, policy, frac) in enumerate(pools):
        rows = [
            r for r in suite.rows
            if (r["workload"], r["pool_policy"], r["pool_frac"]) == (workload, policy, frac)
        ]  # fmt: skip
        where = f"{workload}, {policy}, pool {100 * frac:.0f} % of naive's demand"
        name = f"{number}_{policy}_{100 * frac:.0f}"
        limit = rows[0]["sla_p95_e2el_ms"]
        paths += [
            plots.latency_by_concurrency(
                rows, folder / f"sla_latency_{name}.png", sla_ms=limit, title=f"Latency: {where}"
            ),
            plots.throughput_by_concurrency(
                rows, folder / f"sla_throughput_{name}.png", title=f"Throughput: {where}"
            ),
            plots.pareto(rows, folder / f"sla_pareto_{name}.png", title=f"Pareto: {where}"),
        ]
        known = [row for row in rows if row.get("vtoken_peak_blocks") is not None]
        paths.append(
            plots.block_demand(
                known,
                folder / f"sla_blocks_{name}.png",
                pool_blocks=rows[0]["pool_blocks"],
                title=f"Block demand: {where}",
            )
        )
    return paths


def draw_quality(suite: SuiteResult, folder: Path) -> list[Path]:
    """Accuracy by budget, a plot per task."""
    paths = []
    for task in dict.fromkeys(row["task"] for row in suite.rows):
        rows = [row for row in suite.rows if row["task"] == task and row["policy"]]
        path = folder / f"quality_{task}.png"
        paths.append(plots.quality_by_budget(rows, path, title=f"Accuracy by budget: {task}"))
    return paths


def draw_sensitivity(suite: SuiteResult, folder: Path) -> list[Path]:
    """Figure 12: a plot per factor, values relative to the default."""
    paths = []
    names = {
        "normalized_retained_capacity": "retained capacity",
        "normalized_output_throughput": "throughput",
        "normalized_p95_e2el": "p95 latency",
    }
    for factor in dict.fromkeys(row["factor"] for row in suite.rows):
        rows = [row for row in suite.rows if row["factor"] == factor]
        figure, axes = new_figure(f"Sensitivity to the {factor.replace('_', ' ')}", rows)
        groups = list(dict.fromkeys((row["policy"], row["workload"]) for row in rows))
        for number, (policy, workload) in enumerate(groups):
            group = [r for r in rows if (r["policy"], r["workload"]) == (policy, workload)]
            for colour, (key, name) in zip(POLICY_COLOURS, names.items(), strict=False):
                known = [row for row in group if row.get(key) is not None]
                label = name if len(groups) == 1 else f"{name}, {policy}, {workload}"
                axes.plot(
                    [row["value"] for row in known], [row[key] for row in known],
                    color=colour, marker="o", linestyle=DASHES[number % len(DASHES)], label=label,
                )  # fmt: skip
        axes.axhline(1.0, color="#5b6472", linewidth=0.8)
        axes.set_xlabel(factor.replace("_", " "))
        axes.set_ylabel("relative to the default")
        axes.set_ylim(bottom=0)
        paths.append(
            save(figure, axes, folder / f"sensitivity_{factor}.png", legend=True, legend_below=True)
        )
    return paths


def draw_prefix(suite: SuiteResult, folder: Path) -> list[Path]:
    """Retained blocks per request by sharing degree."""
    rows = [row for row in suite.rows if row.get("vtoken_retained_blocks_per_request") is not None]
    figure, axes = new_figure("Retained blocks by sharing degree", rows)
    groups = list(
        dict.fromkeys((r["mode"], r["policy"], r.get("shared_prefix") or "") for r in rows)
    )
    for number, (mode, policy, kind) in enumerate(groups):
        group = [
            r for r in rows
            if (r["mode"], r["policy"], r.get("shared_prefix") or "") == (mode, policy, kind)
        ]  # fmt: skip
        label = ", ".join(filter(None, (mode, policy, kind if mode == "vtoken" else "")))
        axes.plot(
            [row["sharing_degree"] for row in group],
            [row["vtoken_retained_blocks_per_request"] for row in group],
            color=COLOURS[mode], linestyle=DASHES[number % len(DASHES)], marker="o", label=label,
        )  # fmt: skip
    axes.set_xlabel("requests that share a prefix")
    axes.set_ylabel("blocks per request")
    axes.set_ylim(bottom=0)
    return [save(figure, axes, folder / "prefix_retained_blocks.png", legend=True)]


def draw_peers(suite: SuiteResult, folder: Path) -> list[Path]:
    """Throughput of the peers and of our modes, a plot per workload."""
    paths = []
    for number, workload in enumerate(dict.fromkeys(row["workload"] for row in suite.rows)):
        rows = [row for row in suite.rows if row["workload"] == workload]
        path = folder / f"peers_throughput_{number}.png"
        paths.append(throughput_bars(rows, path, title=f"Throughput: {workload}"))
    return paths


def throughput_bars(rows: Sequence[Row], path: Path, *, title: str) -> Path:
    """Bars of `output_throughput` (tokens/s), a bar per row; lines from the least to the most."""
    key = "output_throughput"
    rows = [row for row in rows if row.get(key) is not None]
    policies = policies_of([row for row in rows if row["policy"]])
    figure, axes = new_figure(title, rows, width=max(5.0, 1.6 + 1.15 * len(rows)))
    spread_label, tops = "least and most of the repeats", [1.0]
    for x, row in enumerate(rows):
        height = row[key]
        low, high = row.get(f"{key}_min", height), row.get(f"{key}_max", height)
        number = policies.index(row["policy"]) if row["policy"] else 0
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
            f"{height:,.1f}", (x, high), xytext=(0, 3), textcoords="offset points", ha="center",
            fontweight="bold",
        )  # fmt: skip
        tops.append(high)
    labels = [series_label(row, policies) for row in rows]
    for separator, broken in ((", ", "\n"), (":", "\n"), ("-", "-\n")):
        labels = [label.replace(separator, broken) for label in labels]
    axes.set_xticks(range(len(rows)), labels)
    axes.set_ylabel("output tokens per second")
    axes.set_ylim(0, 1.18 * max(tops))
    return save(figure, axes, path, legend=spread_label is None, grid_axis="y", legend_below=True)

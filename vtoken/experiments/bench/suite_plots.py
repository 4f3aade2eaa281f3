"""Plots of a benchmark's suites; files are named SUITE_WHAT.png."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from vtoken.experiments.bench.context import SuiteResult
from vtoken.experiments.report import plots
from vtoken.experiments.report.bar_plots import bars, grouped_bars
from vtoken.experiments.report.plot_style import (
    COLOURS,
    DASHES,
    POLICY_COLOURS,
    new_figure,
    save,
)

Row = Mapping[str, object]


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
        grouped_bars(
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
    key = "output_throughput"
    return [
        bars(
            [r for r in suite.rows if r["workload"] == workload and r.get(key) is not None],
            folder / f"peers_throughput_{number}.png", key=key, title=f"Throughput: {workload}",
            ylabel="output tokens per second", form=",.1f",
            breaks=((", ", "\n"), (":", "\n"), ("-", "-\n")),
        )
        for number, workload in enumerate(dict.fromkeys(row["workload"] for row in suite.rows))
    ]  # fmt: skip

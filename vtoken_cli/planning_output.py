"""What planning commands have in common: their cost model, tables, plots and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vtoken_cli.options import Run


def step_cost(given: dict[str, Any], memory):
    """The cost model of a step, from a profile file or the device's own rates."""
    from vtoken.experiments.planning.cost_model import CostProfile, load_profile
    from vtoken.experiments.planning.modelled_clock import StepCost

    profile = given.get("cost_profile")
    return StepCost(
        profile=CostProfile.from_device(memory.device)
        if profile is None
        else load_profile(profile),
        model=memory.model,
        tensor_parallel_size=memory.tensor_parallel_size,
    )


def plot_demand(run: Run, demand: list[dict[str, Any]], memory) -> None:
    """Draw the first server's blocks over time."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        return run.out.warn("no plots: matplotlib is not installed")
    from vtoken.experiments.report.plots import demand_over_time

    first = [row for row in demand if row["replica"] == 0]
    demand_over_time(
        first, run.output_dir / "demand_over_time.png", pool_blocks=memory.num_usable_blocks
    )


def say_memory(run: Run, memory) -> None:
    """Note how the pool's size comes about."""
    for line in memory.describe():
        run.out.note(line)


def rows_table(title: str, rows: list[dict[str, Any]], columns: tuple[str, ...]):
    """A Rich table of some columns of result rows."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name.removeprefix("vtoken_").replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in columns))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def finish(run: Run, settings, given, memory, sections, tables) -> None:
    """Write the result where it is wanted."""
    from vtoken.experiments.report.results import (
        collect_environment,
        make_result,
        save_result,
        utc_now,
    )

    pool = {} if memory is None else {
        "block_size": memory.block_size, "usable_kv_blocks": memory.num_usable_blocks,
    }  # fmt: skip
    config = settings.row() | {"planning": {k: str(v) if isinstance(v, Path) else v
                                            for k, v in given.items()}}  # fmt: skip
    if memory is not None:
        sections = {"memory_plan": memory.row()} | sections
    report = make_result(
        "capacity-scan", config, environment=collect_environment(**pool), started_at=utc_now(),
        modelled_only=True, **sections,
    )  # fmt: skip
    if run.output_dir is not None:
        save_result(report, run.output_dir, tables)
        run.out.note(f"result.json and tables are in {run.output_dir}")
    run.out.result(report)

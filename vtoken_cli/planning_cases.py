"""Several scans in one command: a list of cases in a --config file."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from vtoken.errors import ConfigError, nearest
from vtoken_cli.options import Run
from vtoken_cli.planning_output import finish, rows_table, step_cost

_CASE_KEYS = ("name", "device", "model", "gpu_mem_util", "num_kv_blocks", "prompt_len", "output_len",
              "policy", "eviction_ratio", "paper", "note")  # fmt: skip


def run_cases(run: Run, cases: list[dict[str, Any]], make_settings) -> bool:
    """Scan each case; next to each other the paper's figure, ours and the packed ideal."""
    from rich.markup import escape

    from vtoken.experiments.capacity.planned_scan import PlannedScan, case_rows, plan_for

    rows, points = [], []
    for case in cases:
        for key in case:
            if key not in _CASE_KEYS:
                raise ConfigError("cases", key, nearest(str(key), _CASE_KEYS))
        settings = make_settings(_case_run(run, case))
        memory = plan_for(settings, str(case.get("device", "h100-80g")))
        run.out.note(f"{case.get('name', memory.model.name)}: {memory.describe()[0]}")
        result = PlannedScan(settings, memory, step_cost({}, memory)).run()
        if run.output_dir is not None:
            _write_plots(run, case.get("name") or memory.model.name, result)
        rows += case_rows(case, settings, memory, result.main.frontier)
        points += [{"case": case.get("name"), **r.point.row()} for r in result.main.runs]
        if case.get("note"):
            run.out.print(escape(f"{case.get('name')}: {case['note']}"))
    columns = ("case", "mode", "usable_blocks", "paper", "max_concurrency", "ideal")
    run.out.print(rows_table("Requests resident at once, modelled", rows, columns))
    found = ", ".join(f"{r['case']} {r['mode']} {r['max_concurrency']}" for r in rows)
    run.out.print(escape(f"Largest concurrency without a preemption: {found}; modelled."))
    finish(run, settings, {"cases": cases}, None, {"frontier": rows, "points": points},
            {"frontier": rows, "points": points})  # fmt: skip
    return all(row["max_concurrency"] for row in rows)


def _case_run(run: Run, case: dict[str, Any]) -> Run:
    engine = dict(run.engine)
    for key, name in (("model", "model"), ("gpu_mem_util", "gpu_memory_utilization"),
                      ("num_kv_blocks", "num_kv_blocks")):  # fmt: skip
        if key in case:
            engine[name] = case[key]
    vtoken = dict(run.vtoken)
    if "eviction_ratio" in case:
        vtoken["eviction_ratio"] = case["eviction_ratio"]
    own = dict(run.own) | {k: case[k] for k in ("prompt_len", "output_len") if k in case}
    many = dict(run.many) | ({"policy": [case["policy"]]} if "policy" in case else {})
    return replace(run, engine=engine, vtoken=vtoken, own=own, many=many)


def _write_plots(run: Run, name: str, result) -> None:
    """Plots of one case, in a folder of its own."""
    from vtoken.experiments.capacity.show import write_plots

    folder = run.output_dir / "-".join(re.findall(r"[a-z0-9.]+", str(name).lower()))
    folder.mkdir(parents=True, exist_ok=True)
    write_plots(result, folder)

"""`vtoken env`: what is installed, which kernels will be used, what is supported and why not."""

from __future__ import annotations

from typing import Any

from vtoken.experiments.report.environment import collect_environment
from vtoken.vllm_plugin.support_list import SUPPORT
from vtoken_cli.command import command
from vtoken_cli.given import Run

_SHOWN_CPU_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")
_STYLES = {"works": "green", "untested": "yellow", "refused": "red", "unavailable": "red"}


@command(config=False)
def env(run: Run) -> None:
    """Show versions, processor, compiler, kernels and the support matrix."""
    run.out.detail("loading the kernels; the first time they are compiled")
    report = collect_environment(kernels=kernels_in_use())
    report["compiler"] = _compiler()
    report["cpu"]["flags"] = _cpu_flags()
    report["openmp"] = _openmp()
    report["support"] = [row.as_row() for row in SUPPORT]
    _print_report(run, report)
    run.out.result(report)


def kernels_in_use() -> dict[str, str]:
    """Load the kernels as an engine would, and say which they are and why."""
    try:
        from vtoken.kernels import describe, load

        return describe(load())  # imports torch
    except ImportError as error:
        return {"attention": "none", "reason": f"{error.name} is not installed"}


def _compiler() -> dict[str, str | None]:
    try:
        from vtoken.kernels.build import BuildError, compiler_version, find_compiler
    except ImportError:
        return {"path": None, "version": None}
    path = find_compiler()
    try:
        return {"path": path, "version": compiler_version(path) if path else None}
    except BuildError as error:
        return {"path": path, "version": str(error)}


def _cpu_flags() -> list[str]:
    try:
        from vtoken.kernels.build import cpu_flags
    except ImportError:
        return []
    return [flag for flag in _SHOWN_CPU_FLAGS if flag in cpu_flags()]


def _openmp() -> str | None:
    from vtoken_cli.cpu_runtime import find_intel_openmp, runs_on_cpu

    library = find_intel_openmp() if runs_on_cpu() else None
    return str(library) if library else None


def _print_report(run: Run, report: dict[str, Any]) -> None:
    from rich.table import Table

    facts = Table("", "", show_header=False, title="Environment", title_justify="left")
    for name, version in report["versions"].items():
        facts.add_row(name, version)
    cpu, compiler = report["cpu"], report["compiler"]
    facts.add_row("system", report["system"])
    facts.add_row("CPU", f"{cpu['model']}, {cpu['num_cores']} cores, "
                         f"{cpu['memory_bytes'] / 2**30:.1f} GiB")  # fmt: skip
    facts.add_row("CPU flags", " ".join(cpu["flags"]) or "none of interest")
    facts.add_row("GPUs", ", ".join(gpu["name"] for gpu in report["gpus"]) or "none")
    facts.add_row("compiler", compiler["version"] or "none found")
    facts.add_row("kernels", report["kernels"]["reason"])
    facts.add_row("they serve", report["kernels"].get("serves", "nothing"))
    facts.add_row("Intel OpenMP", report["openmp"] or "not used")
    support = Table("feature", "state", "test or reason", title="Support", title_justify="left")
    for row in report["support"]:
        state = f"[{_STYLES[row['state']]}]{row['state']}[/]"
        support.add_row(row["feature"], state, row.get("test") or row.get("reason"))
    run.out.print(facts)
    run.out.print(support)

"""Imports point one way: packages in one order, no circle of files, and vLLM in three packages only.

A module may import its own package and those before it. Imports inside functions and under
TYPE_CHECKING count like all others: a circle that is hidden in them is a circle all the same.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*(ROOT / "vtoken").rglob("*.py"), *(ROOT / "vtoken_cli").rglob("*.py")])

# Low to high. Files that stand alone in `vtoken` (errors, units, ...) count as packages.
ORDER = (
    "vtoken", "vtoken.errors", "vtoken.units", "vtoken.modes", "vtoken.policies", "vtoken.core",
    "vtoken.config", "vtoken.workloads", "vtoken.models", "vtoken.recording", "vtoken.scheduling",
    "vtoken.kernels", "vtoken.checks", "vtoken.server", "vtoken.vllm_plugin", "vtoken.engine",
    "vtoken.verify", "vtoken.testing", "vtoken.experiments", "vtoken_cli",
)  # fmt: skip
NUMPY_ONLY = ("vtoken.policies", "vtoken.core")
NEITHER_TORCH_NOR_VLLM = ("vtoken.recording", "vtoken.scheduling")
VLLM_AT_RUN_TIME = ("vtoken.vllm_plugin", "vtoken.engine", "vtoken.server")
# Circles among these are allowed, with the reason.
ALLOWED_CIRCLES: dict[frozenset[str], str] = {}

Imported = tuple[str, int, bool]
"""(module, line, whether it is imported at run time)."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, top_level_only: bool = False) -> list[Imported]:
    """All modules that a file imports; those in functions and under TYPE_CHECKING too."""
    tree = ast.parse(path.read_text(), str(path))
    found: list[Imported] = []
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]

    def visit(node: ast.AST, at_run_time: bool) -> None:
        if top_level_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                visit(child, False)
            for child in node.orelse:
                visit(child, at_run_time)
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, node.lineno, at_run_time) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from vtoken import core` imports vtoken.core.
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
            found.extend((name, node.lineno, at_run_time) for name in names)
        for child in ast.iter_child_nodes(node):
            visit(child, at_run_time)

    visit(tree, True)
    return found


def package_of(module: str) -> str:
    """The entry of ORDER that a module of ours belongs to; itself where none is listed."""
    parts = module.split(".")
    return parts[0] if parts[0] == "vtoken_cli" else ".".join(parts[:2])


def within(module: str, packages: Iterable[str]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in packages)


def is_ours(module: str) -> bool:
    return within(module, ("vtoken", "vtoken_cli"))


def is_module(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return (path / "__init__.py").exists() or path.with_suffix(".py").exists()


def offences(allowed: Callable[[str, str, bool], bool]) -> list[str]:
    """Imports of `FILES` that `allowed(importer, imported, at_run_time)` does not allow."""
    return [
        f"{path.relative_to(ROOT)}:{line} imports {imported}"
        for path in FILES
        for imported, line, at_run_time in imports(path)
        if not allowed(module_name(path), imported, at_run_time)
    ]


def test_there_is_something_to_check():
    assert len(FILES) > 30
    names = {imported for path in FILES for imported, _, _ in imports(path)}
    assert {"numpy", "vllm.v1.core.sched.scheduler", "torch"} <= names


def test_every_package_has_its_place():
    found = {package_of(module_name(path)) for path in FILES}
    assert found <= set(ORDER), "name them in ORDER"


def test_packages_import_those_before_them():
    def allowed(importer: str, imported: str, at_run_time: bool) -> bool:
        if not is_ours(imported) or not is_module(imported) or imported == "vtoken":
            return True
        return ORDER.index(package_of(imported)) <= ORDER.index(package_of(importer))

    assert offences(allowed) == []


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach one another (Tarjan's strongly connected components)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for other in edges[module]:
            if other not in order:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], order[other])
        if low[module] == order[module]:
            at = stack.index(module)
            group = sorted(stack[at:])
            del stack[at:]
            if len(group) > 1 or module in edges[module]:
                found.append(group)

    for module in sorted(edges):
        if module not in order:
            visit(module)
    return found


def file_edges() -> dict[str, set[str]]:
    """module -> modules of ours that its file names in an import."""
    names = {module_name(path) for path in FILES}
    edges: dict[str, set[str]] = {}
    for path in FILES:
        found = {imported for imported, _, _ in imports(path)} & names
        # `from vtoken.core import table` names the package too, but needs nothing of its __init__.
        via = {n for n in found if any(o.startswith(n + ".") and o in found for o in found)}
        edges[module_name(path)] = found - via - {"vtoken"}
    return edges


def test_no_circle_of_files():
    assert [c for c in circles(file_edges()) if frozenset(c) not in ALLOWED_CIRCLES] == []


def test_core_and_policies_import_numpy_only():
    def allowed(importer: str, imported: str, at_run_time: bool) -> bool:
        # A `bench` or `__main__` is a command line for development: it prints with anything.
        is_command_line = importer.split(".")[-1] in ("bench", "__main__")
        if not within(importer, NUMPY_ONLY) or is_command_line or is_ours(imported):
            return True
        top = imported.split(".")[0]
        return top == "numpy" or top in sys.stdlib_module_names

    assert offences(allowed) == []


def test_decisions_need_neither_torch_nor_vllm():
    def allowed(importer: str, imported: str, at_run_time: bool) -> bool:
        is_heavy = imported.split(".")[0] in ("torch", "vllm")
        return not (is_heavy and within(importer, NEITHER_TORCH_NOR_VLLM))

    assert offences(allowed) == []


def test_vllm_is_imported_at_run_time_in_three_packages_only():
    def allowed(importer: str, imported: str, at_run_time: bool) -> bool:
        is_vllm = imported.split(".")[0] == "vllm"
        return not (is_vllm and at_run_time) or within(importer, VLLM_AT_RUN_TIME)

    assert offences(allowed) == []


HEAVY = {"torch", "vllm", "transformers", "matplotlib", "pydantic"}


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if within(module_name(p), ("vtoken_cli", "vtoken.models", "vtoken.errors"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_heavy_libraries_are_imported_late(path):
    """Commands and what they import at once must not pull in what takes seconds to load."""
    found = imports(path, top_level_only=True)
    assert not {name.split(".")[0] for name, _, at_run_time in found if at_run_time} & HEAVY


# ---- the rules above hold nothing if these are wrong --------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import vllm.v1.core as c", {("vllm.v1.core", True)}),
        ("def f():\n    from vllm import LLM", {("vllm", True), ("vllm.LLM", True)}),
        ("from ..core import table", {("vtoken.core", True), ("vtoken.core.table", True)}),
        ("from . import base", {("vtoken.kernels", True), ("vtoken.kernels.base", True)}),
        (
            "if TYPE_CHECKING:\n    import vllm\nelse:\n    import numpy",
            {("vllm", False), ("numpy", True)},
        ),
    ],
)
def test_the_reader_of_imports(monkeypatch, tmp_path, source, expected):
    path = tmp_path / "vtoken" / "kernels" / "sample.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert {(name, at_run_time) for name, _, at_run_time in imports(path)} == expected


def test_the_finder_of_circles():
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert sorted(circles(edges)) == [["a", "b", "c"], ["d", "e"]]
    assert circles({"a": {"a"}}) == [["a"]]


def test_a_circle_hidden_in_a_function_or_a_type_is_found(monkeypatch, tmp_path):
    folder = tmp_path / "vtoken" / "core"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "one.py").write_text("def f():\n    from vtoken.core import two")
    (folder / "two.py").write_text("if TYPE_CHECKING:\n    from vtoken.core.one import One")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "FILES", sorted(folder.glob("*.py")))
    assert circles(file_edges()) == [["vtoken.core.one", "vtoken.core.two"]]

"""Imports point one way. The rule, by package, of what may be imported from outside it.

core and policies: numpy. kernels: numpy and torch, never vLLM. vLLM only where it is adapted to
(`vllm_plugin`) and where engines and servers are built from it (`engine`); and in the one file of
the command line that reads options with vLLM's parser.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*(ROOT / "vtoken").rglob("*.py"), *(ROOT / "vtoken_cli").rglob("*.py")])

NUMPY_ONLY = ("vtoken.core", "vtoken.policies")
OWN_BASICS = {"vtoken.errors", "vtoken.units", "vtoken"}
VLLM_ALLOWED = ("vtoken.vllm_plugin", "vtoken.engine", "vtoken_cli.vllm_args")
# Test support drives real engines and vLLM's own scheduler.
VLLM_IN_TESTING = ("vtoken.testing",)
# Command lines of their own, for development: they may print with anything.
COMMAND_LINES = {"bench", "__main__"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, top_level_only: bool = False) -> list[tuple[str, int]]:
    """All modules that a file imports, with line numbers; those under TYPE_CHECKING apart."""
    tree = ast.parse(path.read_text(), str(path))
    found: list[tuple[str, int]] = []
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return [visit(child) for child in node.orelse] and None
        if top_level_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return None
        if isinstance(node, ast.Import):
            found.extend((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.append((module, node.lineno))
            # `from vtoken import core` imports vtoken.core.
            found.extend((f"{module}.{alias.name}", node.lineno) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)
        return None

    visit(tree)
    return found


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in packages)


def is_module(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def offences(allowed) -> list[str]:
    """Imports of `FILES` that `allowed(importer, imported)` does not allow."""
    return [
        f"{path.relative_to(ROOT)}:{line} imports {imported}"
        for path in FILES
        for imported, line in imports(path)
        if not allowed(module_name(path), imported)
    ]


def test_there_is_something_to_check():
    assert len(FILES) > 30
    names = {imported for path in FILES for imported, _ in imports(path)}
    assert {"numpy", "vllm.v1.core.sched.scheduler", "torch"} <= names


def test_core_and_policies_import_numpy_only():
    def allowed(importer: str, imported: str) -> bool:
        if not within(importer, NUMPY_ONLY) or importer.split(".")[-1] in COMMAND_LINES:
            return True
        top = imported.split(".")[0]
        if top in ("vtoken", "vtoken_cli"):
            return (
                imported in OWN_BASICS
                or within(imported, (*NUMPY_ONLY, "vtoken.errors", "vtoken.units"))
                or not is_module(imported)
            )
        return top == "numpy" or top in sys.stdlib_module_names

    assert offences(allowed) == []


def test_kernels_never_import_vllm():
    def allowed(importer: str, imported: str) -> bool:
        if not within(importer, ("vtoken.kernels",)):
            return True
        return imported.split(".")[0] != "vllm" and not within(
            imported, ("vtoken.vllm_plugin", "vtoken.engine")
        )

    assert offences(allowed) == []


def test_vllm_is_imported_where_it_is_adapted_to_and_nowhere_else():
    def allowed(importer: str, imported: str) -> bool:
        return imported.split(".")[0] != "vllm" or within(
            importer, (*VLLM_ALLOWED, *VLLM_IN_TESTING)
        )

    assert offences(allowed) == []


def test_the_library_does_not_know_its_command_line():
    def allowed(importer: str, imported: str) -> bool:
        return importer.startswith("vtoken_cli") or imported.split(".")[0] != "vtoken_cli"

    assert offences(allowed) == []


HEAVY = {"torch", "vllm", "transformers", "matplotlib", "pydantic"}


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if within(module_name(p), ("vtoken_cli", "vtoken.models", "vtoken.errors"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_heavy_libraries_are_imported_late(path):
    """Commands and what they import at once must not pull in what takes seconds to load."""
    at_once = {imported.split(".")[0] for imported, _ in imports(path, top_level_only=True)}
    assert not at_once & HEAVY


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import vllm.v1.core as c", {"vllm.v1.core"}),
        ("def f():\n    from vllm import LLM", {"vllm", "vllm.LLM"}),
        ("from ..core import table", {"vtoken.core", "vtoken.core.table"}),
        ("from . import base", {"vtoken.kernels", "vtoken.kernels.base"}),
        ("if TYPE_CHECKING:\n    import vllm\nelse:\n    import numpy", {"numpy"}),
    ],
)
def test_the_reader_of_imports(monkeypatch, tmp_path, source, expected):
    """The rules above hold nothing if this misses an import."""
    path = tmp_path / "vtoken" / "kernels" / "sample.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert {name for name, _ in imports(path)} == expected

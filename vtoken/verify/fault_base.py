"""What a fault is, and how one is registered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from vtoken.config import VTokenConfig
from vtoken.verify.base import invariant_of
from vtoken.verify.workloads import sharing_prompts, staggered_prompts

# Live tokens swing between three and four blocks: every event moves tokens and frees a block.
PACKED = {"kv_budget_tokens": 44, "eviction_interval_tokens": 8}
# Evictions leave holes, and compaction comes late.
HOLES = {**PACKED, "fragmentation_threshold": 0.5}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Attributes:
    name: in the words of the result's table.
    check: which check must report it.
    inject: context manager that takes the engine and puts the fault in.
    config: VTokenConfig fields of the run.
    shared: requests share prefixes, two and two.
    """

    name: str
    check: str
    inject: Callable[[object], object]
    config: dict = field(default_factory=lambda: dict(PACKED))
    shared: bool = False

    @property
    def invariant(self) -> str:
        return invariant_of(self.check)

    def settings(self) -> VTokenConfig:
        return VTokenConfig(policy="h2o", hash_kv_every=1, **self.config)

    def requests(self, vocab_size: int, seed: int = 0) -> list:
        make = sharing_prompts if self.shared else staggered_prompts
        return make(4, 64 if self.shared else 36, 40, vocab_size, seed, 0)


FAULTS: list[Fault] = []


def fault(name: str, check: str, **attributes):
    """Register a context manager as a fault."""

    def register(inject):
        FAULTS.append(Fault(name=name, check=check, inject=contextmanager(inject), **attributes))
        return inject

    return register


@contextmanager
def replaced(owner, name: str, new) -> Iterator[None]:
    """Put something else in the place of a method or attribute that an object has."""
    assert hasattr(owner, name), f"{type(owner).__name__} has no {name}: the fault would do nothing"
    missing = object()
    before = owner.__dict__.get(name, missing)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

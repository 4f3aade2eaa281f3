"""What a fault is, and the places in an engine where faults are put in.

`vtoken.verify.catalogue` lists all faults, `vtoken.verify.suites.run_fault` runs one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from operator import attrgetter

from vtoken.checks.base import invariant_of
from vtoken.config import VTokenConfig
from vtoken.core.scalar_ops import ScalarOps
from vtoken.verify.workloads import sharing_prompts, staggered_prompts

SCHEDULER, KERNEL, WORKER, PLAN = "scheduler", "copy kernel", "worker", "plan on its way"

# What faults replace: an attribute as reached from a real engine, or `module:attribute`.
SEAMS = {
    "table operations": "hooks.evictor.ops",
    "begin step": "hooks.begin",
    "end step": "hooks.finish",
    "place changes": "hooks.evictor.ops.place",
    "place step": "hooks.evictor.place",
    "shared blocks": "hooks.prefix.shared",
    "free blocks": "hooks.pool.free_blocks",
    "copy slots": "runner.vtoken_attention.kernels.move",
    "move": "runner.vtoken_move",
    "apply plan": "runner._vtoken_apply",
    "apply layouts": "runner.vtoken_layouts.apply",
    "rewrite row": "runner._vtoken_rewrite_block_table",
    "use lengths": "runner._vtoken_use_physical_lengths",
    "sample": "runner.sample_tokens",
}

Wrapper = Callable[[Callable], object]
"""Takes what stands at a seam and returns what is put there instead."""

# Live tokens swing between three and four blocks: every event moves tokens and frees a block.
PACKED = {"kv_budget_tokens": 44, "eviction_interval_tokens": 8}
# Evictions leave holes, and compaction comes late.
HOLES = {**PACKED, "fragmentation_threshold": 0.5}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something broken on purpose; a check that no fault can trip proves nothing.

    Attributes:
        name: in the words of the result's table.
        where: SCHEDULER, KERNEL or WORKER of a real engine; PLAN: between the two, where a dry
            engine with a worker model checks itself (`vtoken.testing.engines`).
        check: which check must report it; in a PLAN, which invariants may (`A or B`).
        make: takes the engine and returns {seam: wrapper}; in a PLAN, takes the StepPlan and a
            generator, and says whether there was anything to damage.
        config: VTokenConfig fields of the run.
        shared: requests share prefixes, two and two.
        in_plain_python: table operations are not the compiled ones.
    """

    name: str
    where: str
    check: str
    make: Callable
    config: Mapping = field(default_factory=lambda: dict(PACKED))
    shared: bool = False
    in_plain_python: bool = False

    @property
    def invariant(self) -> str:
        return invariant_of(self.check)

    def settings(self) -> VTokenConfig:
        return VTokenConfig(policy="h2o", hash_kv_every=1, **self.config)

    def requests(self, vocab_size: int, seed: int = 0) -> list:
        make = sharing_prompts if self.shared else staggered_prompts
        return make(4, 64 if self.shared else 36, 40, vocab_size, seed, 0)

    @contextmanager
    def inject(self, engine) -> Iterator[None]:
        """Have the fault in a real engine."""
        with ExitStack() as stack:
            if self.in_plain_python:
                stack.enter_context(replaced(engine, "table operations", lambda ops: ScalarOps()))
            for seam, wrapper in self.make(engine).items():
                stack.enter_context(replaced(engine, seam, wrapper))
            yield


REGISTERED: list[Fault] = []


def fault(name: str, where: str, check: str, *, also_compiled: bool = False, **attributes):
    """Register a function as a fault's `make`.

    Args:
        also_compiled: it is put in with table operations in plain Python, and once more with those
            in force.
    """

    def register(make):
        row = Fault(name=name, where=where, check=check, make=make, **attributes)
        REGISTERED.append(replace(row, in_plain_python=True) if also_compiled else row)
        if also_compiled:
            REGISTERED.append(replace(row, name=f"{name}, compiled"))
        return make

    return register


@contextmanager
def replaced(engine, seam: str, wrapper: Wrapper) -> Iterator[None]:
    """Put something else in the place of what stands at a seam."""
    module, _, path = SEAMS[seam].rpartition(":")
    root = import_module(module) if module else engine
    owner_path, _, name = path.rpartition(".")
    owner = attrgetter(owner_path)(root) if owner_path else root
    own = name in vars(owner)
    stock = getattr(owner, name)
    setattr(owner, name, wrapper(stock))
    try:
        yield
    finally:
        setattr(owner, name, stock) if own else delattr(owner, name)

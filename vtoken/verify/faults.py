"""Faults put into a real engine, each with the check that must see it.

A fault replaces one inner part of the scheduler's or the worker's side (a kernel call, a table
update, a release) by a wrong one, below the places where the checks record what happens. A check
that nothing can trip proves nothing: `run_fault` must end in a violation, reported by the check
that the fault names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

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
    """Put another function in the place of a method of one object."""
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


# ---- in the copy kernel -------------------------------------------------------------------------


@contextmanager
def _kernel(engine, change) -> Iterator[None]:
    """Call `change(copy, kvs, source, destination, layout, scores)` instead of the copy kernel."""
    kernels = engine.runner.vtoken_attention.kernels
    stock = kernels.move

    def move(kvs, source, destination, *, layout, scores=(), **kwargs):
        def copy(kvs, source, destination, scores=scores):
            stock(kvs, source, destination, layout=layout, scores=scores, **kwargs)

        change(copy, kvs, source, destination, layout, scores)

    with replaced(kernels, "move", move):
        yield


@fault("a copy skipped", "I1.relocated")
def copy_skipped(engine):
    def change(copy, kvs, source, destination, layout, scores):
        copy(kvs, source[1:], destination[1:])
        for array in scores:
            array[destination[:1]] = array[source[:1]]

    with _kernel(engine, change):
        yield


@fault("K copied but not V", "I1.relocated")
def values_left(engine):
    def change(copy, kvs, source, destination, layout, scores):
        before = [layout.gather(kv, destination)[1] for kv in kvs]
        copy(kvs, source, destination)
        for kv, v in zip(kvs, before, strict=True):
            layout.scatter(kv, destination, layout.gather(kv, destination)[0], v)

    with _kernel(engine, change):
        yield


@fault("one layer missed", "I1.relocated")
def layer_missed(engine):
    with _kernel(engine, lambda copy, kvs, s, d, layout, scores: copy(kvs[:-1], s, d)):
        yield


@fault("source and destination swapped", "I1.relocated")
def swapped(engine):
    with _kernel(engine, lambda copy, kvs, s, d, layout, scores: copy(kvs, d, s)):
        yield


@fault("the score accumulator not moved", "scores")
def scores_left(engine):
    with _kernel(engine, lambda copy, kvs, s, d, layout, scores: copy(kvs, s, d, ())):
        yield


@fault("a neighbour's block overwritten", "I1.written")
def neighbour_overwritten(engine):
    runner, N = engine.runner, engine.block_size

    def change(copy, kvs, source, destination, layout, scores):
        copy(kvs, source, destination)
        planned = set(runner.vtoken_plan.req_ids)
        others = [
            r for r in runner.input_batch.req_ids if r not in planned and r in runner.requests
        ]
        for req_id in others[:1]:
            victim = (
                source[:1] * 0 + runner.requests[req_id].block_ids[0][0] * N
            )  # its id 0, a sink
            for kv in kvs:
                layout.scatter(kv, victim, *layout.gather(kv, source[:1]))

    with _kernel(engine, change):
        yield


# ---- in the worker ------------------------------------------------------------------------------


@fault("attention before the copy", "I3.order")
def attention_first(engine):
    runner, put_off = engine.runner, []
    move, sample = runner.vtoken_move, runner.sample_tokens

    def sample_tokens(*args, **kwargs):
        while put_off:
            move(*put_off.pop(0))
        return sample(*args, **kwargs)

    with (
        replaced(runner, "vtoken_move", lambda s, d: put_off.append((s, d))),
        replaced(runner, "sample_tokens", sample_tokens),
    ):
        yield


@fault("a block released before its copy", "I3.order")
def released_early(engine):
    """The next owner of a released block clears it while its tokens are still to be copied."""
    runner = engine.runner
    apply = runner._vtoken_apply

    def _vtoken_apply(scheduler_output):
        plan = getattr(scheduler_output, "vtoken", None)
        for r, req_id in enumerate(plan.req_ids if plan is not None else ()):
            if plan.rewrites_row[r]:
                row = np.asarray(runner.requests[req_id].block_ids[0])
                gone = np.setdiff1d(row, row[plan.row_of(r)])
                if len(gone):
                    runner._zero_block_ids(gone.tolist())
        apply(scheduler_output)

    with replaced(runner, "_vtoken_apply", _vtoken_apply):
        yield


@fault("a live bit flipped", "I1.ids", config=HOLES)
def live_bit_flipped(engine):
    layouts = engine.runner.vtoken_layouts
    apply = layouts.apply

    def flip(plan):
        apply(plan)
        for mask in layouts.masks.values():
            mask[0] = False  # id 0, a sink

    with replaced(layouts, "apply", flip):
        yield


@fault("a row rewritten in another order", "I2.worker")
def row_misordered(engine):
    runner = engine.runner
    rewrite = runner._vtoken_rewrite_row
    with replaced(
        runner, "_vtoken_rewrite_row", lambda r, kept, *rest: rewrite(r, kept[::-1], *rest)
    ):
        yield


@fault("positions taken from physical indices", "positions")
def physical_positions(engine):
    runner = engine.runner
    use = runner._vtoken_use_physical_lengths

    def use_physical(scheduler_output):
        use(scheduler_output)
        batch, starts = runner.input_batch, runner.query_start_loc.np
        for row, req_id in enumerate(batch.req_ids):
            shift = runner.vtoken_layouts.num_reclaimed.get(req_id, 0)
            runner.positions[int(starts[row]) : int(starts[row + 1])] -= shift

    with replaced(runner, "_vtoken_use_physical_lengths", use_physical):
        yield


# ---- in the scheduler ---------------------------------------------------------------------------


def _one_by_one(engine):
    """Take evictions through the planner of single requests, where the fault is."""
    return replaced(engine.hooks.chooser, "_joins", False)


@contextmanager
def _placement(engine, change) -> Iterator[None]:
    """Call `change(table, step)` after a request's tokens were placed."""
    planner = engine.hooks.planner
    stock = planner.finalize

    def finalize(state, *args, **kwargs):
        step = stock(state, *args, **kwargs)
        if step is not None:
            change(state.table, step)
        return step

    with _one_by_one(engine), replaced(planner, "finalize", finalize):
        yield


def _ids_in(table, slots: np.ndarray) -> np.ndarray:
    """Logical ids of live tokens in vLLM slots."""
    ids = table.live_ids()
    held = table.slots_of(table.index_of[ids])
    order = np.argsort(held)
    return ids[order][np.searchsorted(held[order], slots)]


@fault("two tokens in one slot", "I2.table")
def two_in_one_slot(engine):
    def change(table, step):
        if step.move_source is not None and len(step.move_source) > 1:
            first, second = _ids_in(table, step.move_destination[:2])
            table.index_of[second] = table.index_of[first]
            step.move_destination[1] = step.move_destination[0]

    with _placement(engine, change):
        yield


@fault("table not updated", "I2.table")
def table_not_updated(engine):
    planner = engine.hooks.planner
    finalize = planner.finalize

    def finalize_without_table(state, *args, **kwargs):
        table = state.table
        before = table.index_of.copy()
        step = finalize(state, *args, **kwargs)
        if step is not None and step.move_source is not None:
            ids = _ids_in(table, step.move_destination)
            table.index_of[ids] = before[ids]
        return step

    with _one_by_one(engine), replaced(planner, "finalize", finalize_without_table):
        yield


@contextmanager
def _placement_together(engine, change) -> Iterator[None]:
    """Call `change(tables, steps)` after the tokens of all requests of a step were placed."""
    evictor = engine.hooks.evictor
    stock = evictor._finish_batch

    def finish(num_scheduled):
        tables = [] if evictor._event is None else [s.table for s in evictor._event.states]
        before = [t.index_of.copy() for t in tables]
        steps = stock(num_scheduled)
        if steps is not None and len(steps.move_source):
            change(tables, before, steps)
        return steps

    with replaced(evictor, "_finish_batch", finish):
        yield


def _moves_of(steps, tables) -> Iterator[tuple[object, slice]]:
    """The table of every request that moves tokens, and where its moves are in the step's."""
    for req_id, (first, end) in zip(
        steps.req_ids, pairwise(steps.move_start.tolist()), strict=True
    ):
        if end > first:
            yield next(t for t in tables if t.req_id == req_id), slice(first, end)


@fault("two tokens in one slot, many requests at once", "I2.table")
def two_in_one_slot_together(engine):
    def change(tables, before, steps):
        for table, moves in _moves_of(steps, tables):
            if moves.stop - moves.start > 1:
                first, second = _ids_in(table, steps.move_destination[moves][:2])
                table.index_of[second] = table.index_of[first]
                steps.move_destination[moves.start + 1] = steps.move_destination[moves.start]
                return

    with _placement_together(engine, change):
        yield


@fault("table not updated, many requests at once", "I2.table")
def table_not_updated_together(engine):
    def change(tables, before, steps):
        for table, moves in _moves_of(steps, tables):
            old = before[[t is table for t in tables].index(True)]
            ids = _ids_in(table, steps.move_destination[moves])
            table.index_of[ids] = old[ids]

    with _placement_together(engine, change):
        yield


@fault("a neighbour's moves taken, many requests at once", "I4.snapshot")
def moves_of_a_neighbour(engine):
    """The moves of two requests end up under each other's name."""

    def change(tables, before, steps):
        parts = [moves for _, moves in _moves_of(steps, tables)]
        if len(parts) > 1:
            steps.move_source[:] = np.roll(steps.move_source, parts[0].stop)

    with _placement_together(engine, change):
        yield


@fault("a hole forgotten", "conservation.request", config=HOLES)
def hole_forgotten(engine):
    def change(table, step):
        table.holes = table.holes[1:]

    with _placement(engine, change):
        yield


@fault("block released twice", "conservation.pool")
def released_twice(engine):
    hooks, gone = engine.hooks, []
    give_back, finalize = hooks._give_back, hooks.finalize

    def remember(req_id, blocks, released):
        gone.extend(released)
        give_back(req_id, blocks, released)

    def again(scheduler_output):
        hooks.pool.free_blocks(gone)
        gone.clear()
        return finalize(scheduler_output)

    with (
        _one_by_one(engine),
        replaced(hooks, "_give_back", remember),
        replaced(hooks, "finalize", again),
    ):
        yield


@fault("block released twice, many requests at once", "conservation.pool")
def released_twice_together(engine):
    pool, finalize, gone = engine.hooks.pool, engine.hooks.finalize, []
    free_blocks, execute_batch = pool.free_blocks, engine.hooks.evictor.execute_batch

    def execute(*args):
        def free(blocks):
            gone.extend(blocks)
            free_blocks(blocks)

        with replaced(pool, "free_blocks", free):
            execute_batch(*args)

    def again(scheduler_output):
        free_blocks(gone)
        gone.clear()
        return finalize(scheduler_output)

    with (
        replaced(engine.hooks.evictor, "execute_batch", execute),
        replaced(engine.hooks, "finalize", again),
    ):
        yield


@fault("a shared prefix block rewritten", "I4.plan", shared=True)
def shared_rewritten(engine):
    with replaced(engine.hooks.shares, "shared", lambda blocks: None):
        yield


@fault("a stale plan applied after preemption", "I4.snapshot")
def stale_plan(engine):
    """Keep a request's plan, preempt everybody, and send the plan once the request runs again."""
    from vtoken.vllm_plugin import hooks as hooks_module

    kept, hooks, build = [], engine.hooks, hooks_module.build_step_plan
    begin = hooks.begin_step

    def begin_step():
        if kept and not hooks.counters.preemptions:
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        begin()

    def build_step_plan(step_seq, steps, *args, **kwargs):
        moving = [s for s in steps if s.move_source is not None]
        if not kept and moving:
            kept.append(moving[0])
        elif kept and hooks.counters.preemptions and kept[0].req_id in hooks.states:
            stale = kept[0]
            if all(s.req_id != stale.req_id for s in steps):
                steps = [*steps, stale]
        return build(step_seq, steps, *args, **kwargs)

    with (
        _one_by_one(engine),
        replaced(hooks, "begin_step", begin_step),
        replaced(hooks_module, "build_step_plan", build_step_plan),
    ):
        yield


# ---- running them -------------------------------------------------------------------------------


@dataclass(frozen=True)
class FaultResult:
    """Attributes:
    reported_check: the check that stopped the run; None: nothing did.
    report: the violation's report.
    """

    fault: Fault
    reported_check: str | None
    report: dict

    @property
    def detected(self) -> bool:
        """Whether the right check saw it."""
        return self.reported_check == self.fault.check

    def row(self) -> dict[str, object]:
        reported = self.reported_check
        return {
            "name": self.fault.name,
            "detected": self.detected,
            "reported_as": None if reported is None else invariant_of(reported),
            "expected": self.fault.invariant,
            "check": reported,
        }


def run_fault(holder, this: Fault, *, off=(), seed: int = 0) -> FaultResult:
    """Run one fault on the holder's engine; leaves the holder with an engine that works.

    Args:
        holder: vtoken.verify.runs.EngineHolder.
        off: checks to leave out.
    """
    from vtoken.verify.runs import recover, run_checked

    engine = holder.get()
    vocab_size = engine.vllm_config.model_config.get_vocab_size()
    requests = this.requests(vocab_size, seed)
    injected = []

    def put_in(engine) -> None:
        context = this.inject(engine)
        context.__enter__()
        injected.append(context)

    failed: str | None = None
    report: dict = {}
    try:
        outcome = run_checked(engine, this.settings(), requests, off=off, before_run=put_in)
        if outcome.violation is not None:
            report = outcome.violation.report
            failed = report.get("check", outcome.violation.invariant)
    except Exception as error:  # noqa: BLE001 - the engine's own assertions, where a check is off
        failed, report = None, {"message": f"{type(error).__name__}: {error}"}
    finally:
        for context in injected:
            context.__exit__(None, None, None)
    if not recover(engine, [r.request_id for r in requests]):
        holder.close()
    return FaultResult(this, failed, report)

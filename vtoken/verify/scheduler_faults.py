"""Faults in the scheduler's tables, plans and releases; see vtoken.verify.faults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np

from vtoken.verify.fault_base import HOLES, fault, replaced


def _one_by_one(engine):
    """Take evictions through the planner of single requests, where the fault is."""
    return replaced(engine.hooks.chooser, "joins", False)


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
        elif kept and hooks.counters.preemptions and kept[0].req_id in hooks.requests.by_id:
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

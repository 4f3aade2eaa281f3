"""Faults in the scheduler's tables, plans and releases; see vtoken.verify.catalogue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from vtoken.verify.fault import HOLES, SCHEDULER, fault, replaced


@dataclass
class _Placed:
    """One request whose tokens were placed in a step; `source` and `destination` are its moves."""

    table: object
    index_before: np.ndarray
    source: np.ndarray
    destination: np.ndarray

    def moved_ids(self) -> np.ndarray:
        """Logical ids in the moves' destinations, by the table."""
        ids = self.table.live_ids()
        held = self.table.slots_of(self.table.index_of[ids])
        order = np.argsort(held)
        return ids[order][np.searchsorted(held[order], self.destination)]


def _placements(engine, change: Callable[[list[_Placed]], None]) -> dict:
    """Call `change` with the requests that move tokens, once they were placed."""

    def one(finalize):
        def place(state, *args, **kwargs):
            before = state.table.index_of.copy()
            step = finalize(state, *args, **kwargs)
            if step is not None and step.move_source is not None:
                change([_Placed(state.table, before, step.move_source, step.move_destination)])
            return step

        return place

    def many(finish):
        def place(num_scheduled):
            event = engine.hooks.evictor._event
            tables = {} if event is None else {s.table.req_id: s.table for s in event.states}
            before = {req_id: table.index_of.copy() for req_id, table in tables.items()}
            steps = finish(num_scheduled)
            if steps is not None and len(steps.move_source):
                spans = zip(steps.req_ids, pairwise(steps.move_start.tolist()), strict=True)
                change([
                    _Placed(tables[req_id], before[req_id], steps.move_source[first:end],
                            steps.move_destination[first:end])
                    for req_id, (first, end) in spans if end > first
                ])  # fmt: skip
            return steps

        return place

    return {"place one": one, "place many": many}


@fault("two tokens in one slot", SCHEDULER, "I2.table", also_many=True)
def two_in_one_slot(engine):
    def change(placed):
        for p in placed:
            if len(p.destination) > 1:
                first, second = p.moved_ids()[:2]
                p.table.index_of[second] = p.table.index_of[first]
                p.destination[1] = p.destination[0]
                return

    return _placements(engine, change)


@fault("table not updated", SCHEDULER, "I2.table", also_many=True)
def table_not_updated(engine):
    def change(placed):
        for p in placed:
            ids = p.moved_ids()
            p.table.index_of[ids] = p.index_before[ids]

    return _placements(engine, change)


@fault("a neighbour's moves taken, many requests at once", SCHEDULER, "I4.snapshot")
def moves_of_a_neighbour(engine):
    """The moves of two requests end up under each other's name."""

    def change(placed):
        if len(placed) > 1:
            sources = np.concatenate([p.source for p in placed])
            rolled = np.roll(sources, len(placed[0].source))
            ends = np.cumsum([len(p.source) for p in placed])
            for p, part in zip(placed, np.split(rolled, ends[:-1]), strict=True):
                p.source[:] = part

    return _placements(engine, change)


@fault("a hole forgotten", SCHEDULER, "conservation.request", config=HOLES, one_by_one=True)
def hole_forgotten(engine):
    def forgetful(finalize):
        def place(state, *args, **kwargs):
            step = finalize(state, *args, **kwargs)
            if step is not None:
                state.table.holes = state.table.holes[1:]
            return step

        return place

    return {"place one": forgetful}


@fault("block released twice", SCHEDULER, "conservation.pool", also_many=True)
def released_twice(engine):
    """What evictions release at the head of a step is released again at its end."""
    gone = []

    def remembering(free_blocks):
        def free(blocks):
            gone.extend(blocks := list(blocks))
            free_blocks(blocks)

        return free

    def watched(begin_step):
        def begin():
            with replaced(engine, "free blocks", remembering):
                begin_step()

        return begin

    def again(finalize):
        def finish(scheduler_output):
            engine.hooks.pool.free_blocks(gone)
            gone.clear()
            return finalize(scheduler_output)

        return finish

    return {"begin step": watched, "end step": again}


@fault("a shared prefix block rewritten", SCHEDULER, "I4.plan", shared=True)
def shared_rewritten(engine):
    return {"shared blocks": lambda shared: lambda blocks: None}


@fault("a stale plan applied after preemption", SCHEDULER, "I4.snapshot", one_by_one=True)
def stale_plan(engine):
    """Keep a request's plan, preempt all, and send the plan once the request runs again."""
    kept, hooks = [], engine.hooks

    def preempting(begin_step):
        def begin():
            if kept and not hooks.counters.preemptions:
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            begin_step()

        return begin

    def repeating(build_step_plan):
        def build(step_seq, steps, *args, **kwargs):
            if not kept:
                kept.extend([s for s in steps if s.move_source is not None][:1])
            elif hooks.counters.preemptions:
                planned = {s.req_id for s in steps}
                if kept[0].req_id in hooks.states.keys() - planned:
                    steps = [*steps, kept[0]]
            return build_step_plan(step_seq, steps, *args, **kwargs)

        return build

    return {"begin step": preempting, "build plan": repeating}

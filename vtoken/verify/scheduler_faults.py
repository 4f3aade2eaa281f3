"""Faults in the scheduler's tables, plans and releases; see vtoken.verify.catalogue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vtoken.core.messages import Layout, joined, plan_of_layouts
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


def _placements(change: Callable[[list[_Placed]], None]) -> dict:
    """Call `change` with the requests that move tokens, once they were placed."""

    def wrapper(place):
        def placing(changes, *args):
            tables = {c.table.req_id: c.table for c in changes}
            before = {req_id: table.index_of.copy() for req_id, table in tables.items()}
            plan = place(changes, *args)
            moving = [r for r, count in enumerate(plan.num_moves()) if count]
            if moving:
                ids = [plan.req_ids[r] for r in moving]
                moves = [plan.moves_of(r) for r in moving]
                change([_Placed(tables[i], before[i], *m) for i, m in zip(ids, moves, strict=True)])
            return plan

        return placing

    return {"place changes": wrapper}


@fault("two tokens in one slot", SCHEDULER, "I2.table", also_compiled=True)
def two_in_one_slot(engine):
    def change(placed):
        for p in placed:
            if len(p.destination) > 1:
                first, second = p.moved_ids()[:2]
                p.table.index_of[second] = p.table.index_of[first]
                p.destination[1] = p.destination[0]
                return

    return _placements(change)


@fault("table not updated", SCHEDULER, "I2.table", also_compiled=True)
def table_not_updated(engine):
    def change(placed):
        for p in placed:
            ids = p.moved_ids()
            p.table.index_of[ids] = p.index_before[ids]

    return _placements(change)


@fault("a neighbour's moves taken", SCHEDULER, "I4.snapshot")
def moves_of_a_neighbour(engine):
    """The moves of two requests end up under each other's name."""

    def change(placed):
        if len(placed) > 1:
            sources = np.concatenate([p.source for p in placed])
            rolled = np.roll(sources, len(placed[0].source))
            ends = np.cumsum([len(p.source) for p in placed])
            for p, part in zip(placed, np.split(rolled, ends[:-1]), strict=True):
                p.source[:] = part

    return _placements(change)


@fault("a hole forgotten", SCHEDULER, "conservation.request", config=HOLES)
def hole_forgotten(engine):
    def forgetful(place):
        def placing(changes, *args):
            plan = place(changes, *args)
            for change in changes:
                change.table.holes = change.table.holes[1:]
            return plan

        return placing

    return {"place changes": forgetful}


@fault("block released twice", SCHEDULER, "conservation.pool", also_compiled=True)
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


@fault("a stale plan applied after preemption", SCHEDULER, "I4.snapshot")
def stale_plan(engine):
    """Keep a request's plan, preempt all, and send the plan once the request runs again."""
    kept: list[Layout] = []
    step = engine.hooks

    def preempting(begin):
        def begun():
            if kept and not step.counters.preemptions:
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            begin()

        return begun

    def repeating(place):
        def placed(num_scheduled):
            plan = place(num_scheduled)
            moving = [] if plan is None else np.flatnonzero(np.diff(plan.move_start)).tolist()
            if not kept and moving:
                kept.append(_layout_of(plan, moving[0]))
            elif kept and step.counters.preemptions:
                planned = set() if plan is None else set(plan.req_ids)
                if kept[0].req_id in step.requests.by_id.keys() - planned:
                    stale = plan_of_layouts(kept)
                    plan = stale if plan is None else joined(plan, stale)
            return plan

        return placed

    return {"begin step": preempting, "place step": repeating}


def _layout_of(plan, r: int) -> Layout:
    """One packed request's entry of a plan, as it was before it was flattened."""
    source, destination = plan.moves_of(r)
    return Layout(
        plan.req_ids[r], int(plan.num_reclaimed[r]), int(plan.new_token_index[r]),
        kept=plan.kept_of(r) if plan.rewrites_block_table[r] else None,
        move_source=source, move_destination=destination,
    )  # fmt: skip

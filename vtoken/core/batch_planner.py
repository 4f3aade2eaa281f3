"""Carry out the evictions of many requests in one step: execute and finalize, in batch.

For requests that fill all their holes at once and share no block; `RequestPlanner` has the general
case. Legend as in vtoken.core.batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vtoken.core.batch import Rows, Tables, choose_rows
from vtoken.core.batch_packing import pack
from vtoken.core.events import BatchSteps, Counters
from vtoken.core.planner import RequestState


@dataclass(slots=True)
class BatchEvent:
    """What `execute_batch` did and `finalize_batch` goes on with.

    Attributes:
        states: E requests.
        rows: which blocks stay.
        holes, hole_owner: local slots of the victims, and whose they are.
    """

    states: list[RequestState]
    rows: Rows
    holes: np.ndarray
    hole_owner: np.ndarray

    def only(self, stays: np.ndarray) -> BatchEvent:
        """The event of some requests: bool[E]."""
        mine = stays[self.hole_owner]
        number = stays.cumsum() - 1
        states = [s for s, stay in zip(self.states, stays.tolist(), strict=True) if stay]
        return BatchEvent(
            states, self.rows.only(stays), self.holes[mine], number[self.hole_owner[mine]]
        )

    def rewritten(self) -> tuple[list[int], list[int]]:
        """(request, old row position) of blocks that stay and will be written into."""
        rows, found = self.rows, []
        tables = [s.table for s in self.states]
        positions: list[set[int]] = []
        for e, table in enumerate(tables):
            beyond = table.num_live_tokens // table.block_size  # overwritten after moving out
            positions.append(set(rows.kept_of(e)[beyond:].tolist()))
        batch = Tables(tables)
        holed = batch.arena.pos_of[batch.blocks[self.hole_owner] + self.holes // batch.block_size]
        for e, pos in zip(self.hole_owner.tolist(), holed.tolist(), strict=True):
            positions[e].add(pos)
        for e, some in enumerate(positions):
            found += [(e, pos) for pos in sorted(some.difference(rows.gone[e]))]
        return [e for e, _ in found], [pos for _, pos in found]


def execute_batch(
    states: Sequence[RequestState],
    ids: np.ndarray,
    counts: np.ndarray,
    num_new: int,
    counters: Counters,
) -> BatchEvent:
    """Mark victims dead and choose the blocks that go back; as `RequestPlanner.execute`.

    Args:
        states: their tables in step, without holes.
        ids: victims, ragged with `counts`, ascending within a request, at least one each.
        num_new: tokens about to be scheduled, of every request.
    """
    batch = Tables([s.table for s in states])
    holes, owner = batch.evict(ids, counts)
    live = np.array([t.num_live_tokens for t in batch.tables])
    num_blocks = np.array([t.num_blocks for t in batch.tables])
    num_keep = np.minimum(num_blocks, -(-(live + num_new) // batch.block_size))
    rows = choose_rows(batch, num_keep, holes, owner)
    released = num_blocks - num_keep
    counters.evicted_tokens += len(ids)
    counters.eviction_events += len(states)
    counters.dropped_blocks += int(released.sum())
    for state, count in zip(states, released.tolist(), strict=True):
        state.executed = state.packs = True
        state.num_released = count
    return BatchEvent(list(states), rows, holes, owner)


def finalize_batch(
    event: BatchEvent,
    num_new: Sequence[int],
    row_from: Callable[[int, int], Sequence[int]],
    counters: Counters,
) -> BatchSteps:
    """Place survivors and new tokens; as `RequestPlanner.finalize`.

    Args:
        event: of requests that are all still running.
        num_new: tokens scheduled in this step, by request.
        row_from: gives vLLM's row of the e-th request, after allocation, from a position on.
    """
    rows, states = event.rows, event.states
    batch = Tables([s.table for s in states])
    packed = pack(batch, rows, event.holes, event.hole_owner, np.array(num_new))
    for e in np.flatnonzero(packed.num_appended).tolist():
        table = states[e].table
        new_ids = row_from(e, table.num_blocks)
        table.sync(new_ids, table.num_computed_tokens + int(packed.num_appended[e]))
    moved, released = packed.move_counts > 0, rows.num_keep < rows.num_blocks
    counters.moved_tokens += len(packed.source)
    counters.repacking_moves += int(packed.move_counts[~released].sum())
    counters.relocation_events += int((moved | released).sum())
    counters.reused_slots += packed.num_reused
    for state in states:
        state.executed = state.packs = False
        state.num_released = 0
    row_kept = rows.kept
    if not rows.changed.all():
        row_kept = row_kept[rows.changed.repeat(rows.num_keep)]
    return BatchSteps(
        req_ids=[t.req_id for t in batch.tables],
        num_reclaimed=np.array([t.num_reclaimed_tokens for t in batch.tables]),
        new_token_index=packed.new_token_index,
        rewrites_row=rows.changed,
        row_counts=np.where(rows.changed, rows.num_keep, 0),
        row_kept=row_kept,
        move_counts=packed.move_counts,
        move_source=packed.source,
        move_destination=packed.destination,
    )

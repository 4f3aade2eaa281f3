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

    def released(self) -> list[list[int]]:
        """Row positions that go, ascending, by request."""
        gone: list[list[int]] = [[] for _ in self.states]
        pairs = zip(self.rows.gone_owner.tolist(), self.rows.gone_pos.tolist(), strict=True)
        for e, pos in pairs:
            gone[e].append(pos)
        return gone

    def last_kept(self) -> list[int]:
        """Old position of each new row's last block; the others stay in order."""
        return self.rows.kept[self.rows.start[1:] - 1].tolist()

    def rewritten(self) -> tuple[list[int], list[int]]:
        """(request, old row position) of blocks that stay and will be written into."""
        batch, rows = Tables([s.table for s in self.states]), self.rows
        N = batch.block_size
        holed = batch.arena.pos_of[batch.blocks[self.hole_owner] + self.holes // N]
        live = np.array([t.num_live_tokens for t in batch.tables])
        beyond = rows.rank >= live[rows.owner] // N  # new tokens overwrite what moves out
        marked = np.zeros(rows.new_pos.shape, bool)
        marked[self.hole_owner, holed] = True
        marked[rows.owner[beyond], rows.kept[beyond]] = True
        owner, pos = np.nonzero(marked & (rows.new_pos >= 0))
        return owner.tolist(), pos.tolist()


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
    rows = choose_rows(batch, np.minimum(num_blocks, -(-(live + num_new) // batch.block_size)))
    counters.evicted_tokens += len(ids)
    counters.eviction_events += len(states)
    counters.dropped_blocks += len(rows.gone_pos)
    for state, released in zip(states, (num_blocks - rows.num_keep).tolist(), strict=True):
        state.executed = state.packs = True
        state.num_released = released
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
    is_new = rows.changed[rows.owner]
    return BatchSteps(
        req_ids=[t.req_id for t in batch.tables],
        num_reclaimed=np.array([t.num_reclaimed_tokens for t in batch.tables]),
        new_token_index=packed.new_token_index,
        rewrites_row=rows.changed,
        row_counts=np.where(rows.changed, rows.num_keep, 0),
        row_kept=rows.kept if is_new.all() else rows.kept[is_new],
        move_counts=packed.move_counts,
        move_source=packed.source,
        move_destination=packed.destination,
    )

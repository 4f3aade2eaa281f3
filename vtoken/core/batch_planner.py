"""Carry out the evictions of many requests in one step: execute and finalize, in batch.

For requests that fill all their holes at once and share no block; `RequestPlanner` has the general
case. Legend as in vtoken.core.batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from vtoken.core.batch import Eviction, Tables
from vtoken.core.events import BatchSteps, Counters
from vtoken.core.planner import RequestState


@dataclass(slots=True)
class BatchEvent:
    """What `execute_batch` did and `finalize_batch` goes on with.

    Attributes:
        states: E requests, whose ids are `req_ids`.
        eviction: what died, and which blocks stay.
        num_evicted: ids that each has lost so far, these ones counted.
    """

    states: list[RequestState]
    req_ids: list[str]
    eviction: Eviction
    num_evicted: list[int]

    def only(self, stays: Sequence[bool]) -> BatchEvent:
        """The event of some requests: bool[E]."""
        parts = (self.states, self.req_ids, self.num_evicted)
        states, req_ids, num_evicted = (list(compress(part, stays)) for part in parts)
        return BatchEvent(states, req_ids, self.eviction.only(np.array(stays)), num_evicted)

    def rewritten(self) -> tuple[list[int], list[int]]:
        """(request, old row position) of blocks that stay and will be written into."""
        eviction, found = self.eviction, []
        parts = zip(self.states, eviction.gone_lists(), eviction.last.tolist(), strict=True)
        holes = np.split(eviction.holes, eviction.counts.cumsum()[:-1])
        for e, (state, gone, last) in enumerate(parts):
            table, N = state.table, state.table.block_size
            kept = [p for p in range(table.num_blocks) if p != last]
            for pos in reversed(gone):
                del kept[pos - (pos > last)]
            kept.append(last)
            written = set(kept[table.num_live_tokens // N :])  # overwritten after moving out
            written.update(table.pos_of[holes[e] // N].tolist())
            found += [(e, pos) for pos in sorted(written.difference(gone))]
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
    eviction = batch.arena.ops.execute(batch, ids, counts, num_new)
    released = (eviction.num_blocks - eviction.num_keep).tolist()
    counters.evicted_tokens += len(ids)
    counters.eviction_events += len(states)
    counters.dropped_blocks += sum(released)
    for state, count in zip(states, released, strict=True):
        state.executed = state.packs = True
        state.num_released = count
    num_evicted = batch.number("num_computed_tokens") - batch.number("num_live_tokens")
    req_ids = [t.req_id for t in batch.tables]
    return BatchEvent(list(states), req_ids, eviction, num_evicted.tolist())


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
    states, eviction = event.states, event.eviction
    batch = Tables([s.table for s in states])
    packed = batch.arena.ops.pack(batch, eviction, np.array(num_new))
    if packed.num_appended.any():
        for e in np.flatnonzero(packed.num_appended).tolist():
            table = states[e].table
            new_ids = row_from(e, table.num_blocks)
            table.sync(new_ids, table.num_computed_tokens + int(packed.num_appended[e]))
    moves, moved = packed.move_counts, packed.move_counts > 0
    released = eviction.num_keep < eviction.num_blocks
    counters.moved_tokens += len(packed.source)
    counters.repacking_moves += int(moves[~released].sum())
    counters.relocation_events += int((moved | released).sum())
    counters.reused_slots += packed.num_reused
    for state in states:
        state.executed = state.packs = False
        state.num_released = 0
    reclaimed = batch.number("num_computed_tokens") - batch.number("num_physical_tokens")
    return BatchSteps(
        req_ids=event.req_ids,
        num_reclaimed=reclaimed,
        new_token_index=packed.new_token_index,
        rewrites_row=packed.rewrites_row,
        row_counts=packed.row_counts,
        row_kept=packed.row_kept,
        move_counts=moves,
        move_source=packed.source,
        move_destination=packed.destination,
    )

"""Carry out the evictions of many requests in one step: execute and finalize, in batch.

For requests that fill all their holes at once and share no block; `RequestPlanner` has the general
case. Legend as in vtoken.core.batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise

import numpy as np

from vtoken.core.batch import Eviction, Tables
from vtoken.core.events import BatchSteps, Counters
from vtoken.core.planner import RequestState


@dataclass(slots=True)
class BatchEvent:
    """What `execute_batch` did and `finalize_batch` goes on with.

    Attributes:
        states: E requests.
        batch: their tables.
        eviction: what died, and which blocks stay.
    """

    states: Sequence[RequestState]
    batch: Tables
    eviction: Eviction

    def only(self, stays: Sequence[bool]) -> BatchEvent:
        """The event of some requests: bool[E]."""
        states = list(compress(self.states, stays))
        return BatchEvent(states, Tables([s.table for s in states]), self.eviction.only(stays))

    def rewritten(self) -> tuple[list[int], list[int]]:
        """(request, old row position) of blocks that stay and will be written into."""
        eviction, found = self.eviction, []
        parts = zip(self.states, eviction.gone, eviction.last, strict=True)
        holes = np.split(eviction.holes, np.cumsum(eviction.counts)[:-1])
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
    counts: list[int],
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
    counters.evicted_tokens += len(ids)
    counters.eviction_events += len(states)
    counters.dropped_blocks += sum(eviction.num_blocks) - sum(eviction.num_keep)
    for state in states:
        state.executed = state.packs = True
    return BatchEvent(states, batch, eviction)


def finalize_batch(
    event: BatchEvent,
    num_new: Sequence[int],
    row_from: Callable[[int, int], Sequence[int]],
    counters: Counters,
) -> tuple[BatchSteps, list[int]]:
    """Place survivors and new tokens; as `RequestPlanner.finalize`.

    Args:
        event: of requests that are all still running.
        num_new: tokens scheduled in this step, by request.
        row_from: gives vLLM's row of the e-th request, after allocation, from a position on.

    Returns:
        (steps, num_moved ints[E]).
    """
    states, batch, eviction = event.states, event.batch, event.eviction
    packed = batch.arena.ops.pack(batch, eviction, num_new)
    if any(packed.num_appended):
        for e, count in enumerate(packed.num_appended):
            if count:
                table = states[e].table
                table.sync(row_from(e, table.num_blocks), table.num_computed_tokens + count)
    steps = packed.steps
    counters.moved_tokens += len(steps.move_source)
    counters.reused_slots += packed.num_reused
    starts = steps.move_start.tolist()
    num_moved = [end - start for start, end in pairwise(starts)]
    for state, gone, moved in zip(states, eviction.gone, num_moved, strict=True):
        if not gone:
            counters.repacking_moves += moved
        if gone or moved:
            counters.relocation_events += 1
        state.executed = state.packs = False
    return steps, num_moved

"""Fill the holes of many requests at once, once the step's real token counts are known.

Shape legend as in vtoken.core.batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vtoken.core.batch import Rows, Tables, arange, ragged
from vtoken.core.table import NO_SLOTS, ONE

_GONE = 1 << 60


@dataclass(slots=True)
class Packed:
    """What packing did, for the step's plan.

    Attributes:
        source, destination: int64[M], vLLM slots; move_counts: int64[E].
        new_token_index: int64[E], as in StepPlan.
        num_appended: int64[E], new tokens that are still to be appended at the packed end.
        num_reused: new tokens that took a hole inside the layout.
    """

    source: np.ndarray
    destination: np.ndarray
    move_counts: np.ndarray
    new_token_index: np.ndarray
    num_appended: np.ndarray
    num_reused: int


def pack(
    batch: Tables, rows: Rows, holes: np.ndarray, hole_owner: np.ndarray, num_new: np.ndarray
) -> Packed:
    """Move what lies outside the packed prefix into the holes; one new token takes a hole.

    As `reclaim.place_packed` and what `RequestPlanner` does with it. The tables are as `evict`
    left them, the rows as they were.

    Args:
        holes, hole_owner: local slots of the dead tokens below the physical lengths.
        num_new: int64[E], tokens scheduled in this step.
    """
    N, E = batch.block_size, len(batch.tables)
    live = np.array([t.num_live_tokens for t in batch.tables])
    takes_hole = num_new == 1
    end = live + takes_hole  # the packed end
    capacity = rows.num_keep * N
    dead, dead_owner = _dead_inside(batch, rows, holes, hole_owner, np.minimum(end, capacity))
    source, source_owner = _live_outside(batch, rows, end)

    reuses = takes_hole & (end <= capacity)
    dead_counts = np.bincount(dead_owner, minlength=E)
    taken = dead_counts.cumsum()[reuses] - 1  # the last one of each
    stays = np.ones(len(dead), bool)
    stays[taken] = False
    move_counts = np.bincount(source_owner, minlength=E)
    assert (move_counts == dead_counts - reuses).all(), "holes and displaced tokens do not pair up"

    slots = _move(batch, source, dead[stays], source_owner)
    _set_rows(batch, rows)
    new_token_index = np.full(E, -1, np.int64)
    num_reused = _reuse(batch, np.flatnonzero(reuses), dead[taken], new_token_index)
    return Packed(*slots, move_counts, new_token_index, num_new - reuses, num_reused)


def _dead_inside(batch, rows: Rows, holes, hole_owner, in_row):
    """Dead local slots below the packed end, by request and new index: (slots, owner)."""
    arena, N = batch.arena, batch.block_size
    physical = np.array([t.num_physical_tokens for t in batch.tables])
    tail_owner, within = ragged(rows.num_blocks * N - physical)  # unused slots of the old rows
    index = physical[tail_owner] + within
    tail_pos = index // N
    tail = arena.row[batch.blocks[tail_owner] + tail_pos] * N + index % N
    hole_pos = arena.pos_of[batch.blocks[hole_owner] + holes // N]
    dead, owner = np.concatenate([holes, tail]), np.concatenate([hole_owner, tail_owner])
    new_pos = rows.new_positions(owner, np.concatenate([hole_pos, tail_pos]))
    index = new_pos * N + dead % N
    inside = np.flatnonzero((new_pos >= 0) & (index < in_row[owner]))
    owner, index = owner[inside], index[inside]
    order = (owner * (int(rows.num_blocks.max()) * N) + index).argsort()
    return dead[inside[order]], owner[order]


def _live_outside(batch, rows: Rows, end):
    """Live local slots in blocks that go, and beyond the packed end: (slots, owner)."""
    arena, N = batch.arena, batch.block_size
    owner: list[int] = []
    pos: list[int] = []
    index: list[int] = []  # of the block's first slot in the new row; past every end if it goes
    parts = zip(rows.gone, rows.last, (end // N).tolist(), rows.num_keep.tolist(), strict=True)
    for e, (gone, last, first, num_keep) in enumerate(parts):
        beyond = num_keep - first
        if beyond > 1:
            pos += [*gone, *rows.kept_of(e)[first:].tolist()]
        elif beyond == 1:
            pos += [*gone, last]
        else:
            pos += gone
        index += [_GONE] * len(gone) + [p * N for p in range(first, num_keep)]
        owner += [e] * (len(pos) - len(owner))
    if not owner:
        return NO_SLOTS, np.empty(0, np.int64)
    owners = np.array(owner)
    base = batch.blocks[owners]
    handles = arena.row[base + pos]
    ids = arena.id_at.reshape(-1, N)[base + handles]
    outside = np.array(index)[:, None] + arange(N) >= end[owners, None]
    at = np.flatnonzero((ids >= 0) & outside)
    block = at // N
    return handles[block] * N + at % N, owners[block]


def _move(batch, source, destination, owner) -> tuple[np.ndarray, np.ndarray]:
    """As `RequestTable.move`; returns both as vLLM slots."""
    arena, N = batch.arena, batch.block_size
    if not len(source):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    base = batch.blocks[owner]
    from_block, to_block = base + source // N, base + destination // N
    from_slot, to_slot = base * N + source, base * N + destination
    ids = arena.id_at[from_slot]
    assert (ids >= 0).all() and (arena.id_at[to_slot] < 0).all(), "a move between wrong slots"
    arena.id_at[from_slot] = -1
    arena.id_at[to_slot] = ids
    arena.index_of[batch.tokens[owner] + ids] = destination
    np.subtract.at(arena.live_in, from_block, ONE)
    np.add.at(arena.live_in, to_block, ONE)
    return (
        arena.block_id[from_block].astype(np.int64) * N + source % N,
        arena.block_id[to_block].astype(np.int64) * N + destination % N,
    )


def _set_rows(batch, rows: Rows) -> None:
    """As `RequestTable.set_row` and `forget_handles`, and no holes are left."""
    places = arange(int(rows.num_blocks.max()))
    for e, (table, num_keep) in enumerate(zip(batch.tables, rows.num_keep.tolist(), strict=True)):
        cuts = rows.cuts[e]
        if cuts:
            row, moved = table.row, int(table.row[rows.last[e]])
            for pos in rows.gone[e]:
                handle = int(row[pos])
                assert not table.live_in[handle], f"{table.req_id}: a released block is in use"
                table.pos_of[handle] = -1
                table.give_handle(handle)
            first = at = cuts[0]  # in front of it nothing changes
            for cut, stop in zip(cuts, (*cuts[1:], table.num_blocks), strict=True):
                row[at : at + stop - cut - 1] = row[cut + 1 : stop]
                at += stop - cut - 1
            if len(cuts) > len(rows.gone[e]):
                row[at] = moved
            table.pos_of[row[first:num_keep]] = places[first:num_keep]
        table.num_blocks, table.holes = num_keep, NO_SLOTS
        table.num_physical_tokens = table.num_live_tokens


def _reuse(batch, owner, local, new_token_index) -> int:
    """Give the single new tokens of some requests a dead slot each; as `put_next`."""
    if not len(owner):
        return 0
    arena, N = batch.arena, batch.block_size
    tables = [batch.tables[e] for e in owner.tolist()]
    at = batch.blocks[owner] + local // N
    index = arena.pos_of[at] * N + local % N
    ids = np.array([t.num_computed_tokens for t in tables])
    last = np.array([t.num_physical_tokens for t in tables])
    for table in tables:
        table.make_room(0, table.num_computed_tokens + 1)
        table.num_computed_tokens += 1
        table.num_physical_tokens += 1
        table.num_live_tokens += 1
    tokens = np.array([t.token_base for t in tables])  # one may have outgrown its own
    arena.index_of[tokens + ids] = local
    arena.id_at[batch.blocks[owner] * N + local] = ids
    arena.live_in[at] += ONE  # one per request: no block twice
    inside = index != last  # else it goes to the packed end by itself
    new_token_index[owner[inside]] = index[inside]
    return int(inside.sum())

"""Fill the holes of many requests at once, once the step's real token counts are known.

Shape legend as in vtoken.core.batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vtoken.core.batch import Rows, Tables, ragged
from vtoken.core.table import NO_SLOTS


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
    arena, N, E = batch.arena, batch.block_size, len(batch.tables)
    live = np.array([t.num_live_tokens for t in batch.tables])
    takes_hole = num_new == 1
    end = live + takes_hole  # the packed end
    capacity = rows.num_keep * N
    dead, dead_owner = _dead_inside(batch, rows, holes, hole_owner, np.minimum(end, capacity))
    source, source_owner = _live_outside(batch, rows, end)

    reuses = takes_hole & (end <= capacity)
    dead_counts = np.bincount(dead_owner, minlength=E)
    taken = dead_counts.cumsum()[reuses] - 1  # the last one of each
    reused = dead[taken]
    destination = np.delete(dead, taken) if len(taken) else dead
    move_counts = np.bincount(source_owner, minlength=E)
    assert (move_counts == dead_counts - reuses).all(), "holes and displaced tokens do not pair up"

    slots = _move(batch, source, destination, source_owner)
    _set_rows(batch, rows)
    new_token_index = np.full(E, -1, np.int64)
    num_reused = _reuse(batch, rows, np.flatnonzero(reuses), reused, new_token_index)
    return Packed(*slots, move_counts, new_token_index, num_new - reuses, num_reused)


def _dead_inside(batch, rows: Rows, holes, hole_owner, in_row):
    """Dead local slots below the packed end, by request and new index: (slots, owner)."""
    N = batch.block_size
    physical = np.array([t.num_physical_tokens for t in batch.tables])
    owner, within = ragged(rows.num_blocks * N - physical)  # the unused tail of the old rows
    index = physical[owner] + within
    tail = rows.handles[owner, index // N] * N + index % N
    dead, owner = np.concatenate([holes, tail]), np.concatenate([hole_owner, owner])
    old_pos = batch.arena.pos_of[batch.blocks[owner] + dead // N]
    new_pos = rows.new_pos[owner, old_pos]
    index = new_pos * N + dead % N
    inside = (new_pos >= 0) & (index < in_row[owner])
    dead, owner, index = dead[inside], owner[inside], index[inside]
    order = (owner * (rows.new_pos.shape[1] * N) + index).argsort()
    return dead[order], owner[order]


def _live_outside(batch, rows: Rows, end):
    """Live local slots in blocks that go, and beyond the packed end: (slots, owner)."""
    N = batch.block_size
    first = end // N
    owner, within = ragged(np.maximum(rows.num_keep - first, 0))
    rank = first[owner] + within
    beyond = rows.kept[rows.start[owner] + rank]
    all_owner = np.concatenate([rows.gone_owner, owner])
    handles = rows.handles[all_owner, np.concatenate([rows.gone_pos, beyond])]
    # Index of a block's first slot in the new row; past every end for those that go.
    index = np.concatenate([np.full(len(rows.gone_pos), np.iinfo(np.int64).max - N), rank * N])
    offsets = np.arange(N)
    ids = batch.arena.id_at.reshape(-1, N)[batch.blocks[all_owner] + handles]
    block, offset = np.nonzero((ids >= 0) & (index[:, None] + offsets >= end[all_owner, None]))
    slots, slot_owner = handles[block] * N + offset, all_owner[block]
    if len(rows.gone_pos) and len(owner):
        order = slot_owner.argsort(kind="stable")
        slots, slot_owner = slots[order], slot_owner[order]
    return slots, slot_owner


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
    np.subtract.at(arena.live_in, from_block, 1)
    np.add.at(arena.live_in, to_block, 1)
    return (
        arena.block_id[from_block].astype(np.int64) * N + source % N,
        arena.block_id[to_block].astype(np.int64) * N + destination % N,
    )


def _set_rows(batch, rows: Rows) -> None:
    """As `RequestTable.set_row` and `forget_handles`, and no holes are left."""
    arena = batch.arena
    handles = rows.handles[rows.owner, rows.kept]
    base = batch.blocks[rows.owner]
    arena.row[base + rows.rank] = handles
    arena.pos_of[base + handles] = rows.rank
    gone = rows.handles[rows.gone_owner, rows.gone_pos]
    at = batch.blocks[rows.gone_owner] + gone
    assert not arena.live_in[at].any(), "a released block has live tokens"
    arena.pos_of[at] = -1
    for e, handle in zip(rows.gone_owner.tolist(), gone.tolist(), strict=True):
        batch.tables[e].give_handle(handle)
    for table, num_keep in zip(batch.tables, rows.num_keep.tolist(), strict=True):
        table.num_blocks, table.holes = num_keep, NO_SLOTS
        table.num_physical_tokens = table.num_live_tokens


def _reuse(batch, rows: Rows, owner, local, new_token_index) -> int:
    """Give the single new tokens of some requests a dead slot each; as `put_next`."""
    if not len(owner):
        return 0
    arena, N, tables = batch.arena, batch.block_size, batch.tables
    at = batch.blocks[owner] + local // N
    index = arena.pos_of[at] * N + local % N
    ids, last = [], []
    for e in owner.tolist():
        table = tables[e]
        table.make_room(0, table.num_computed_tokens + 1)
        ids.append(table.num_computed_tokens)
        last.append(table.num_physical_tokens)
        table.num_computed_tokens += 1
        table.num_physical_tokens += 1
        table.num_live_tokens += 1
    batch.find_regions()  # one may have outgrown its own
    arena.index_of[batch.tokens[owner] + ids] = local
    arena.id_at[batch.blocks[owner] * N + local] = ids
    arena.live_in[at] += 1  # one per request: no block twice
    inside = index != last  # else it goes to the packed end by itself
    new_token_index[owner[inside]] = index[inside]
    return int(inside.sum())

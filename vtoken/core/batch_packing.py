"""Fill the holes of many requests at once, once the step's real token counts are known.

Shape legend as in vtoken.core.batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vtoken.core.arena import CHUNK_TOKENS
from vtoken.core.batch import Eviction, Packed, Tables
from vtoken.core.events import BatchSteps, starts
from vtoken.core.table import NO_SLOTS, ONE

_GONE = 1 << 60
_FULL = np.iinfo(np.int64).max  # beyond every position
_counting = np.arange(0)


def arange(size: int) -> np.ndarray:
    """int64[size], 0, 1, 2, ...: a view that nobody may write into."""
    global _counting
    if size > len(_counting):
        _counting = np.arange(2 * size)
        _counting.flags.writeable = False
    return _counting[:size]


def ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(owner, index within its part) of every entry of a ragged array, int64[K] each."""
    ends = counts.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    owner = arange(len(counts)).repeat(counts)
    return owner, arange(total) - (ends - counts).repeat(counts)


@dataclass(slots=True)
class Rows:
    """Which blocks of E rows stay.

    Attributes:
        num_blocks, num_keep: int64[E].
        gone, last: as in Eviction, by request.
        cuts: old positions that leave their place, ascending: `gone`, and `last` where a block
            in front of it goes to the end.
        kept: int32, ragged with `num_keep`: the old position at each new one.
        start: where each request's part of `kept` begins.
        changed: bool[E], rows that are not as they were.
    """

    num_blocks: np.ndarray
    num_keep: np.ndarray
    gone: list[list[int]]
    last: list[int]
    cuts: list[list[int]]
    kept: np.ndarray
    start: list[int]
    changed: np.ndarray

    def kept_of(self, e: int) -> np.ndarray:
        """int32[num_keep[e]], a view."""
        start = self.start[e]
        return self.kept[start : start + int(self.num_keep[e])]

    def new_positions(self, owner: np.ndarray, old: np.ndarray) -> np.ndarray:
        """New position of each old one of a request; -1 where the block goes."""
        last = np.array(self.last)[owner]
        new = np.where(old == last, self.num_keep[owner] - 1, old - (old > last))
        most = max(len(g) for g in self.gone)
        for k in range(most):
            removed = np.array([g[k] if k < len(g) else _FULL for g in self.gone])[owner]
            new -= (removed < old) & (old != last)
            new[removed == old] = -1
        return new


def make_rows(eviction: Eviction) -> Rows:
    """Spell out the new rows of an eviction."""
    num_blocks, num_keep = np.array(eviction.num_blocks), np.array(eviction.num_keep)
    gone, last = eviction.gone, eviction.last
    ends = num_keep.cumsum()
    start = (ends - num_keep).tolist()
    kept, places = np.empty(int(ends[-1]), np.int32), arange(int(num_blocks.max()))
    changed = num_keep < num_blocks
    sizes, all_cuts = num_blocks.tolist(), []
    for e, (removed, final) in enumerate(zip(gone, last, strict=True)):
        at, first = start[e], 0
        cuts = removed
        if final != sizes[e] - 1:
            cuts = sorted((*removed, final))
            changed[e] = True
        all_cuts.append(cuts)
        for cut in (*cuts, sizes[e]):  # what lies between blocks that leave their place
            kept[at : at + cut - first] = places[first:cut]
            at, first = at + cut - first, cut + 1
        if cuts is not removed:
            kept[at] = final
    return Rows(num_blocks, num_keep, gone, last, all_cuts, kept, start, changed)


def pack(batch: Tables, eviction: Eviction, num_new: np.ndarray) -> Packed:
    """Move what lies outside the packed prefix into the holes; see `BatchOps.pack`."""
    N, E, rows = batch.block_size, len(batch), make_rows(eviction)
    holes, hole_owner = eviction.holes, arange(E).repeat(eviction.counts)
    live = batch.number("num_live_tokens")
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

    move_source, move_destination = _move(batch, source, dead[stays], source_owner)
    _set_rows(batch, rows)
    new_token_index = np.full(E, -1, np.int32)
    num_reused = _reuse(batch, np.flatnonzero(reuses), dead[taken], new_token_index)
    reclaimed = batch.number("num_computed_tokens") - batch.number("num_physical_tokens")
    steps = BatchSteps(
        req_ids=[t.req_id for t in batch.tables],
        num_reclaimed=reclaimed.astype(np.int32),
        new_token_index=new_token_index,
        rewrites_row=rows.changed,
        row_start=starts(np.where(rows.changed, rows.num_keep, 0)),
        row_kept=rows.kept[rows.changed.repeat(rows.num_keep)],
        move_start=starts(move_counts),
        move_source=move_source,
        move_destination=move_destination,
    )
    return Packed(steps, (num_new - reuses).tolist(), num_reused)


def _dead_inside(batch, rows: Rows, holes, hole_owner, in_row):
    """Dead local slots below the packed end, by request and new index: (slots, owner)."""
    arena, N = batch.arena, batch.block_size
    blocks, physical = batch.number("block_base"), batch.number("num_physical_tokens")
    tail_owner, within = ragged(rows.num_blocks * N - physical)  # unused slots of the old rows
    index = physical[tail_owner] + within
    tail_pos = index // N
    tail = arena.row[blocks[tail_owner] + tail_pos] * N + index % N
    hole_pos = arena.pos_of[blocks[hole_owner] + holes // N]
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
    base = batch.number("block_base")[owners]
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
    base = batch.number("block_base")[owner]
    from_block, to_block = base + source // N, base + destination // N
    from_slot, to_slot = base * N + source, base * N + destination
    ids = arena.id_at[from_slot]
    assert (ids >= 0).all() and (arena.id_at[to_slot] < 0).all(), "a move between wrong slots"
    arena.id_at[from_slot] = -1
    arena.id_at[to_slot] = ids
    arena.index_of[batch.number("token_base")[owner] + ids] = destination
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
    for e in owner.tolist():
        table = batch.tables[e]
        table.make_room(0, table.num_computed_tokens + 1)  # it may move to another region
    some = Tables([batch.tables[e] for e in owner.tolist()])
    blocks, ids = some.number("block_base"), some.number("num_computed_tokens")
    at = blocks + local // N
    index = arena.pos_of[at] * N + local % N
    inside = index != some.number("num_physical_tokens")  # else it goes to the packed end by itself
    tokens = some.number("token_base") + ids
    arena.index_of[tokens] = local
    arena.id_at[blocks * N + local] = ids
    arena.live_in[at] += ONE  # one per request: nothing twice
    arena.live_in_chunk[tokens // CHUNK_TOKENS] += ONE
    for name in ("num_computed_tokens", "num_physical_tokens", "num_live_tokens"):
        some.add(name, 1)
    new_token_index[owner[inside]] = index[inside]
    return int(inside.sum())

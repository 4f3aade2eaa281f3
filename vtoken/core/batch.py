"""What one step does to the tables of many requests, done for all of them at once.

The same as `RequestPlanner.execute` and `finalize` do for one request whose holes are all filled
in the same step, which is the steady state of decoding under a budget: a fixed number of numpy
calls, however many requests are due. tests/unit/test_batch.py holds the two against each other.

Shape legend: E requests, B blocks of the longest row, N block size (tokens), K tokens over all
requests. A ragged array holds its parts one after another; `owner[k]` is the request of entry k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vtoken.core.table import NO_SLOTS, RequestTable

_FULL = np.iinfo(np.int32).max  # a block that is never chosen
_FEW = 8  # as many minima are found one by one, before a partition is faster


def ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(owner, index within its part) of every entry of a ragged array, int64[K] each."""
    ends = counts.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(total) - (ends - counts)[owner]


class Tables:
    """The tables of E requests of one arena, and where their regions are; E > 0."""

    def __init__(self, tables: Sequence[RequestTable]) -> None:
        self.tables, self.arena = tables, tables[0].arena
        self.block_size = self.arena.block_size
        self.find_regions()

    def find_regions(self) -> None:
        """Read the regions' starts again, after a table may have outgrown its own."""
        self.tokens = np.array([t.token_base for t in self.tables])
        self.blocks = np.array([t.block_base for t in self.tables])

    # ---- growth ----------------------------------------------------------------------------

    def sync(self, new_block_ids: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """Register blocks and tokens that were appended; as `RequestTable.sync`."""
        handles: list[int] = []
        positions: list[int] = []
        block_ids: list[int] = []
        counts: list[int] = []
        for table, new, length in zip(self.tables, new_block_ids, lengths, strict=True):
            first = table.num_blocks
            table.make_room(first + len(new), length)
            if new:
                handles += [table.take_handle() for _ in new]
                positions += range(first, first + len(new))
                block_ids += new
                table.num_blocks = first + len(new)
            counts.append(len(new))
        self.find_regions()
        if handles:
            base = np.repeat(self.blocks, counts)
            rows, at = base + positions, base + handles
            arena = self.arena
            arena.row[rows], arena.pos_of[at] = handles, positions
            arena.block_id[at], arena.live_in[at] = block_ids, 0
        self._append(np.array(lengths))

    def _append(self, lengths: np.ndarray) -> None:
        tables, arena, N = self.tables, self.arena, self.block_size
        first_id = np.array([t.num_computed_tokens for t in tables])
        first = np.array([t.num_physical_tokens for t in tables])
        counts = lengths - first_id
        owner, within = ragged(counts)
        physical, ids = first[owner] + within, first_id[owner] + within
        base = self.blocks[owner]
        handle = arena.row[base + physical // N]
        assert (handle >= 0).all(), "a token is appended where the row has no block"
        at, offset = base + handle, physical % N
        arena.index_of[self.tokens[owner] + ids] = handle * N + offset
        arena.id_at[at * N + offset] = ids
        np.add.at(arena.live_in, at, 1)
        for table, length, count in zip(tables, lengths.tolist(), counts.tolist(), strict=True):
            assert table.num_physical_tokens + count <= table.num_blocks * N, table.req_id
            table.num_computed_tokens = length
            table.num_physical_tokens += count
            table.num_live_tokens += count

    # ---- eviction --------------------------------------------------------------------------

    def oldest(self, counts: np.ndarray, first_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `RequestTable.oldest`.

        Args:
            counts, first_ids: int[E].

        Returns:
            (ids int64[K], counts int64[E]): as many as there are.
        """
        tables, firsts = self.tables, first_ids.tolist()
        start = np.array([t.dead_run_end(f) for t, f in zip(tables, firsts, strict=True)])
        length = np.array([t.num_computed_tokens for t in tables])
        counts = np.maximum(counts, 0)
        owner, within = ragged(np.minimum(counts, np.maximum(length - start, 0)))
        ids = start[owner] + within
        dead = self.arena.index_of[self.tokens[owner] + ids] < 0
        slow = start + counts > length
        slow[owner[dead]] = True
        if not slow.any():
            return ids, counts
        parts = [
            tables[e].oldest(int(counts[e]), firsts[e])
            if slow[e]
            else np.arange(start[e], start[e] + counts[e])
            for e in range(len(tables))
        ]
        return np.concatenate(parts).astype(np.int64), np.array([len(p) for p in parts])

    def evict(self, ids: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mark live ids dead, ascending within each request; every request loses some.

        Returns:
            (local slots that became holes int32[K], owner int64[K]).
        """
        arena, N = self.arena, self.block_size
        owner = np.repeat(np.arange(len(counts)), counts)
        at = self.tokens[owner] + ids
        local = arena.index_of[at]
        assert (local >= 0).all(), "evicting a token that is not live"
        arena.index_of[at] = -1
        base = self.blocks[owner]
        arena.id_at[base * N + local] = -1
        np.subtract.at(arena.live_in, base + local // N, 1)
        ends = counts.cumsum()
        runs = zip(ids[ends - counts].tolist(), ids[ends - 1].tolist(), counts.tolist(), strict=True)
        for table, (first, last, count) in zip(self.tables, runs, strict=True):
            table.num_live_tokens -= count
            if last - first + 1 == count:
                table.extend_dead_run(first, last + 1)
        return local, owner


@dataclass(slots=True)
class Rows:
    """Which blocks of E rows stay.

    Attributes:
        num_blocks, num_keep: int64[E].
        handles: int32[E, B], of the old rows; only the first num_blocks of a row mean something.
        kept, owner, rank: ragged over the new rows: old row position, request, new position.
        start: int64[E + 1], where each request's part of `kept` begins.
        new_pos: int32[E, B], new position of an old one, -1 where the block goes.
        gone_owner, gone_pos: the blocks that go, by request and position.
        changed: bool[E], rows that are not as they were.
    """

    num_blocks: np.ndarray
    num_keep: np.ndarray
    handles: np.ndarray
    kept: np.ndarray
    owner: np.ndarray
    rank: np.ndarray
    start: np.ndarray
    new_pos: np.ndarray
    gone_owner: np.ndarray
    gone_pos: np.ndarray
    changed: np.ndarray

    def only(self, stays: np.ndarray) -> Rows:
        """The rows of some requests: bool[E]."""
        number = stays.cumsum() - 1
        mine, gone = stays[self.owner], stays[self.gone_owner]
        num_keep = self.num_keep[stays]
        return Rows(
            self.num_blocks[stays], num_keep, self.handles[stays], self.kept[mine],
            number[self.owner[mine]], self.rank[mine], np.append(0, num_keep.cumsum()),
            self.new_pos[stays], number[self.gone_owner[gone]], self.gone_pos[gone],
            self.changed[stays],
        )  # fmt: skip


def choose_rows(batch: Tables, num_keep: np.ndarray) -> Rows:
    """Choose the blocks to keep so that the fewest tokens move; as `reclaim.choose_kept`.

    Args:
        num_keep: int64[E], at most the blocks of the row, at least one.
    """
    arena = batch.arena
    num_blocks = np.array([t.num_blocks for t in batch.tables])
    B = int(num_blocks.max())
    columns = np.arange(B)
    exists = columns < num_blocks[:, None]
    at = batch.blocks[:, None] + columns
    np.minimum(at, len(arena.row) - 1, out=at)  # past the end of a shorter row
    handles = np.where(exists, arena.row[at], 0)
    fullness = arena.live_in[batch.blocks[:, None] + handles] * np.int32(B)
    # Larger is fuller; ties go to the later block.
    key = np.where(exists, fullness + columns.astype(np.int32), _FULL)
    gone_owner, gone_pos = _lowest(key, num_blocks - num_keep)
    stays = exists
    stays[gone_owner, gone_pos] = False
    # The emptiest goes last. Equally empty: the one at the end stays there.
    last = np.where(stays, fullness + (B - 1 - columns).astype(np.int32), _FULL).argmin(axis=1)
    owner, kept = np.nonzero(stays)
    ends = num_keep.cumsum()
    start = ends - num_keep
    moved = np.flatnonzero(kept[ends - 1] != last)
    for e in moved:
        part = kept[start[e] : ends[e]]
        i = int(part.searchsorted(last[e]))
        part[i:-1] = part[i + 1 :]
        part[-1] = last[e]
    rank = np.arange(len(kept)) - start[owner]
    new_pos = np.full((len(num_blocks), B), -1, np.int32)
    new_pos[owner, kept] = rank
    changed = num_keep < num_blocks
    changed[moved] = True
    return Rows(
        num_blocks, num_keep, handles, kept, owner, rank, np.append(start, ends[-1]), new_pos,
        gone_owner, gone_pos, changed,
    )  # fmt: skip


def _lowest(key: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) of the counts[e] lowest keys of every row e, in order; keys are distinct.

    Changes `key`.
    """
    most = int(counts.max())
    if most == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    if most <= _FEW:
        chosen = np.zeros(key.shape, bool)
        for k in range(most):
            rows = np.flatnonzero(counts > k)
            columns = key[rows].argmin(axis=1) if len(rows) < len(key) else key.argmin(axis=1)
            chosen[rows, columns] = True
            key[rows, columns] = _FULL
        return np.nonzero(chosen)
    columns = [
        np.sort(np.argpartition(row, count - 1)[:count]) if count else NO_SLOTS
        for row, count in zip(key, counts.tolist(), strict=True)
    ]
    return np.repeat(np.arange(len(key)), counts), np.concatenate(columns)

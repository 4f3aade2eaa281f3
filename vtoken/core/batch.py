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

from vtoken.core.table import ONE, RequestTable

_counting = np.arange(0)
_FULL = np.iinfo(np.int64).max  # beyond every position


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
        lengths = np.maximum(lengths, first_id)
        counts = lengths - first_id
        owner, within = ragged(counts)
        physical, ids = first[owner] + within, first_id[owner] + within
        base = self.blocks[owner]
        handle = arena.row[base + physical // N]
        assert (handle >= 0).all(), "a token is appended where the row has no block"
        at, offset = base + handle, physical % N
        arena.index_of[self.tokens[owner] + ids] = handle * N + offset
        arena.id_at[at * N + offset] = ids
        np.add.at(arena.live_in, at, ONE)
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
        owner = arange(len(counts)).repeat(counts)
        at = self.tokens[owner] + ids
        local = arena.index_of[at]
        assert (local >= 0).all(), "evicting a token that is not live"
        arena.index_of[at] = -1
        base = self.blocks[owner]
        arena.id_at[base * N + local] = -1
        np.subtract.at(arena.live_in, base + local // N, ONE)
        ends, at = counts.cumsum(), 0
        runs = zip(
            ids[ends - counts].tolist(), ids[ends - 1].tolist(), counts.tolist(), strict=True
        )
        for table, (first, last, count) in zip(self.tables, runs, strict=True):
            table.num_live_tokens -= count
            if last - first + 1 == count:
                table.extend_dead_run(first, last + 1)
            if table.live_index is not None:
                table.live_index.evicted.append(ids[at : at + count])
            at += count
        return local, owner


@dataclass(slots=True)
class Rows:
    """Which blocks of E rows stay; the rows themselves are still as they were.

    Attributes:
        num_blocks, num_keep: int64[E].
        gone: old positions that go, ascending, by request.
        last: old positions of the new rows' last blocks; the others that stay keep their order.
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

    def only(self, stays: np.ndarray) -> Rows:
        """The rows of some requests: bool[E]."""
        some = np.flatnonzero(stays).tolist()
        gone, last = [self.gone[e] for e in some], [self.last[e] for e in some]
        return _make_rows(self.num_blocks[stays], self.num_keep[stays], gone, last)

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


def _make_rows(num_blocks, num_keep, gone: list[list[int]], last: list[int]) -> Rows:
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


def choose_rows(
    batch: Tables, num_keep: np.ndarray, holes: np.ndarray, hole_owner: np.ndarray
) -> Rows:
    """Choose the blocks to keep so that the fewest tokens move; as `reclaim.choose_kept`.

    Before the eviction every block was full but for the tail. So those that go, and the emptiest,
    are among those that lost a token and the tail: the cost does not grow with the row.

    Args:
        num_keep: int64[E], at most the blocks of the row, at least one.
        holes, hole_owner: local slots of the dead tokens.
    """
    arena, N = batch.arena, batch.block_size
    num_blocks = np.array([t.num_blocks for t in batch.tables])
    full = np.array([t.num_physical_tokens for t in batch.tables]) // N
    at = batch.blocks[hole_owner] + holes // N
    tail_owner, within = ragged(num_blocks - full)
    tail = full[tail_owner] + within
    tail_at = batch.blocks[tail_owner] + arena.row[batch.blocks[tail_owner] + tail]
    owner = np.concatenate([hole_owner, tail_owner])
    pos = np.concatenate([arena.pos_of[at], tail])
    live = arena.live_in[np.concatenate([at, tail_at])]
    # Larger is fuller; ties go to the later block.
    B = int(num_blocks.max())
    key = np.sort((owner * (N + 1) + live) * B + pos)
    key = key[np.append(True, key[1:] != key[:-1])] if len(key) else key
    owner, pos = key // ((N + 1) * B), key % B
    counts = np.bincount(owner, minlength=len(num_blocks)).tolist()
    pos, key = pos.tolist(), (key // B).tolist()
    gone, last, first = [], [], 0
    sizes = zip(num_blocks.tolist(), num_keep.tolist(), counts, strict=True)
    for size, keep, count in sizes:
        end, num_gone = first + count, size - keep
        assert num_gone <= count, "a row was not packed before the eviction"
        gone.append(sorted(pos[first : first + num_gone]))
        first += num_gone
        # The emptiest goes last. Equally empty: the one at the end stays there.
        if first < end:
            last.append(_last_of_emptiest(pos, key, first, end))
        else:  # all that stay are full
            last.append(max(set(range(size - num_gone - 1, size)).difference(gone[-1])))
        first = end
    return _make_rows(num_blocks, num_keep, gone, last)


def _last_of_emptiest(pos: list[int], fullness: list[int], first: int, end: int) -> int:
    """The greatest position among those as empty as the first; both ascend together."""
    i = first
    while i + 1 < end and fullness[i + 1] == fullness[first]:
        i += 1
    return pos[i]

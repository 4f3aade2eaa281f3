"""`BatchOps` in numpy: a fixed number of calls, however many requests are due.

In force wherever nothing was compiled. Shape legend as in vtoken.core.batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vtoken.core.arena import CHUNK_TOKENS
from vtoken.core.batch import Eviction, Packed, ScoredIds, Tables
from vtoken.core.batch_packing import arange, pack, ragged
from vtoken.core.live_index import LiveIndex
from vtoken.core.table import ONE
from vtoken.policies.selection import lowest_indices


class NumpyOps:
    """See `vtoken.core.batch.BatchOps` for what each does."""

    name = "numpy"

    # ---- growth ----------------------------------------------------------------------------

    def sync(
        self, batch: Tables, new_block_ids: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> None:
        handles: list[int] = []
        positions: list[int] = []
        block_ids: list[int] = []
        counts: list[int] = []
        for table, new, length in zip(batch.tables, new_block_ids, lengths, strict=True):
            first = table.num_blocks
            table.make_room(first + len(new), length)
            if new:
                handles += [table.take_handle() for _ in new]
                positions += range(first, first + len(new))
                block_ids += new
                table.num_blocks = first + len(new)
            counts.append(len(new))
        if handles:
            base = batch.number("block_base").repeat(counts)
            rows, at = base + positions, base + handles
            arena = batch.arena
            arena.row[rows], arena.pos_of[at] = handles, positions
            arena.block_id[at], arena.live_in[at] = block_ids, 0
        self._append(batch, np.array(lengths))

    @staticmethod
    def _append(batch: Tables, lengths: np.ndarray) -> None:
        arena, N = batch.arena, batch.block_size
        first_id, first = batch.number("num_computed_tokens"), batch.number("num_physical_tokens")
        counts = np.maximum(lengths - first_id, 0)
        fits = first + counts <= batch.number("num_blocks") * N
        assert fits.all(), "tokens are appended where the row has no block"
        owner, within = ragged(counts)
        physical, ids = first[owner] + within, first_id[owner] + within
        base, tokens = batch.number("block_base")[owner], batch.number("token_base")[owner]
        handle = arena.row[base + physical // N]
        at, offset = base + handle, physical % N
        arena.index_of[tokens + ids] = handle * N + offset
        arena.id_at[at * N + offset] = ids
        np.add.at(arena.live_in, at, ONE)
        np.add.at(arena.live_in_chunk, (tokens + ids) // CHUNK_TOKENS, ONE)
        for name in ("num_computed_tokens", "num_physical_tokens", "num_live_tokens"):
            batch.add(name, counts)

    # ---- reading ---------------------------------------------------------------------------

    def oldest(
        self, batch: Tables, counts: list[int], first_ids: list[int], end_ids: list[int]
    ) -> tuple[np.ndarray, list[int]]:
        tables, wanted = batch.tables, np.maximum(counts, 0)
        start = np.array([t.dead_run_end(f) for t, f in zip(tables, first_ids, strict=True)])
        end = np.minimum(batch.number("num_computed_tokens"), end_ids)
        owner, within = ragged(np.minimum(wanted, np.maximum(end - start, 0)))
        ids = start[owner] + within
        dead = batch.arena.index_of[batch.number("token_base")[owner] + ids] < 0
        slow = start + wanted > end
        slow[owner[dead]] = True
        if not slow.any():
            return ids, wanted.tolist()
        parts = [
            tables[e].oldest(int(wanted[e]), first_ids[e])
            if slow[e]
            else np.arange(start[e], start[e] + wanted[e])
            for e in range(len(tables))
        ]
        parts = [ids[ids < last] for ids, last in zip(parts, end_ids, strict=True)]
        return np.concatenate(parts).astype(np.int64), [len(p) for p in parts]

    def count_below(self, batch: Tables, bounds: list[int]) -> list[int]:
        return [LiveIndex(t).count_below(b) for t, b in zip(batch.tables, bounds, strict=True)]

    def at_ranks(self, batch: Tables, ranks: np.ndarray, counts: list[int]) -> np.ndarray:
        parts = zip(batch.tables, np.split(ranks, np.cumsum(counts)[:-1]), strict=True)
        return np.concatenate([LiveIndex(t).at(np.sort(r)) for t, r in parts]).astype(np.int64)

    def lowest_scored(
        self,
        batch: Tables,
        scored: Sequence[ScoredIds],
        first_ids: list[int],
        end_ids: list[int],
        counts: list[int],
        sign: int,
    ) -> tuple[np.ndarray, list[int]]:
        parts = []
        bounds = zip(first_ids, end_ids, counts, strict=True)
        for table, given, (first, end, count) in zip(batch.tables, scored, bounds, strict=True):
            by_id = np.full(table.num_computed_tokens + 1, np.nan, np.float32)
            ids = given.ids
            if ids is None:
                ids = table.ids_by_physical_index()[: given.count]
            # Holes (-1) end up behind the last id.
            by_id[ids] = given.scores[given.start : given.start + given.count]
            keys = sign * by_id[first:end]
            chosen = lowest_indices(keys, count)
            if not (table.index_of[first + chosen] >= 0).all():  # the dead may have scores
                keys[table.index_of[first:end] < 0] = np.nan
                chosen = lowest_indices(keys, count)
            parts.append(first + chosen)
        return np.concatenate(parts), [len(p) for p in parts]

    def draw(
        self, entropy: Sequence[Sequence[int]], num_candidates: list[int], counts: list[int]
    ) -> np.ndarray:
        parts = [
            np.random.default_rng(seed).choice(n, size=count, replace=False)
            for seed, n, count in zip(entropy, num_candidates, counts, strict=True)
        ]
        return np.concatenate(parts)

    # ---- eviction --------------------------------------------------------------------------

    def execute(self, batch: Tables, ids: np.ndarray, counts: list[int], num_new: int) -> Eviction:
        holes, owner = self._evict(batch, ids, np.array(counts))
        num_blocks = batch.number("num_blocks")
        needed = -(-(batch.number("num_live_tokens") + num_new) // batch.block_size)
        num_keep = np.minimum(num_blocks, needed)
        gone, last = _choose(batch, num_keep, holes, owner)
        evicted = batch.number("num_computed_tokens") - batch.number("num_live_tokens")
        return Eviction(
            num_blocks.tolist(), num_keep.tolist(), gone, last, evicted.tolist(), holes, counts
        )

    @staticmethod
    def _evict(batch: Tables, ids: np.ndarray, counts: np.ndarray) -> tuple:
        """Mark ids dead; returns (local slots that became holes int32[K], owner int64[K])."""
        arena, N = batch.arena, batch.block_size
        owner = arange(len(counts)).repeat(counts)
        at = batch.number("token_base")[owner] + ids
        local = arena.index_of[at]
        assert (local >= 0).all(), "evicting a token that is not live"
        arena.index_of[at] = -1
        base = batch.number("block_base")[owner]
        arena.id_at[base * N + local] = -1
        np.subtract.at(arena.live_in, base + local // N, ONE)
        np.subtract.at(arena.live_in_chunk, at // CHUNK_TOKENS, ONE)
        batch.add("num_live_tokens", -counts)
        ends = counts.cumsum()
        first, last = ids[ends - counts], ids[ends - 1]
        for e in np.flatnonzero(last - first + 1 == counts).tolist():
            batch.tables[e].extend_dead_run(int(first[e]), int(last[e]) + 1)
        return local, owner

    def pack(self, batch: Tables, eviction: Eviction, num_new: list[int]) -> Packed:
        return pack(batch, eviction, np.array(num_new))


def _choose(
    batch: Tables, num_keep: np.ndarray, holes: np.ndarray, hole_owner: np.ndarray
) -> tuple[list[list[int]], list[int]]:
    """Choose the blocks to keep; as `reclaim.choose_kept`.

    Returns:
        (gone, last) of an `Eviction`.
    """
    arena, N = batch.arena, batch.block_size
    num_blocks, blocks = batch.number("num_blocks"), batch.number("block_base")
    full = batch.number("num_physical_tokens") // N
    at = blocks[hole_owner] + holes // N
    tail_owner, within = ragged(num_blocks - full)
    tail = full[tail_owner] + within
    tail_at = blocks[tail_owner] + arena.row[blocks[tail_owner] + tail]
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
        going = sorted(pos[first : first + num_gone])
        gone.append(going)
        first += num_gone
        # The emptiest goes last. Equally empty: the one at the end stays there.
        if first < end:
            last.append(_last_of_emptiest(pos, key, first, end))
        else:  # all that stay are full
            last.append(max(set(range(size - num_gone - 1, size)).difference(going)))
        first = end
    return gone, last


def _last_of_emptiest(pos: list[int], fullness: list[int], first: int, end: int) -> int:
    """The greatest position among those as empty as the first; both ascend together."""
    i = first
    while i + 1 < end and fullness[i + 1] == fullness[first]:
        i += 1
    return pos[i]

"""`TableOps` in plain Python, one request after another: packed or with holes, shared blocks,
copies, and `naive`, which moves nothing. The decisions are `vtoken.core.reclaim`'s.

In force for every request that the compiled operations leave, and for all where nothing can be
compiled. See `vtoken.core.ops` for what each operation does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from vtoken.core.live_index import LiveIndex
from vtoken.core.messages import (
    MASK_GIVEN,
    MASK_KEPT,
    MASK_PACKED,
    Layout,
    StepPlan,
    plan_of_layouts,
)
from vtoken.core.ops import Change, Draw, ScoredIds
from vtoken.core.reclaim import choose_kept, packs_now, place_packed
from vtoken.core.table import NO_SLOTS, NULL_BLOCK, RequestTable
from vtoken.policies.selection import lowest_indices
from vtoken.units import cdiv


class ScalarOps:
    """See the module's head."""

    name = "scalar"

    # ---- growth and reading ----------------------------------------------------------------

    def sync(
        self,
        tables: Sequence[RequestTable],
        new_block_ids: Sequence[Sequence[int]],
        lengths: Sequence[int],
    ) -> None:
        for table, block_ids, length in zip(tables, new_block_ids, lengths, strict=True):
            table.sync_new_tokens(block_ids, length)

    def oldest(
        self,
        tables: Sequence[RequestTable],
        first_ids: Sequence[int],
        end_ids: Sequence[int],
        counts: Sequence[int],
    ) -> tuple[np.ndarray, list[int]]:
        wanted = zip(tables, first_ids, end_ids, counts, strict=True)
        return _ragged_ids([_below(t.oldest(n, first), end) for t, first, end, n in wanted])

    def lowest_scored(
        self,
        tables: Sequence[RequestTable],
        scored: Sequence[ScoredIds],
        first_ids: Sequence[int],
        end_ids: Sequence[int],
        counts: Sequence[int],
        sign: int,
    ) -> tuple[np.ndarray, list[int]]:
        parts = []
        bounds = zip(first_ids, end_ids, counts, strict=True)
        for table, given, (first, end, count) in zip(tables, scored, bounds, strict=True):
            keys = sign * scores_by_id(table, given)[first:end]
            chosen = lowest_indices(keys, count)
            if not (table.index_of[first + chosen] >= 0).all():  # the dead may have scores
                keys[table.index_of[first:end] < 0] = np.nan
                chosen = lowest_indices(keys, count)
            parts.append(first + chosen)
        return _ragged_ids(parts)

    def count_below(self, tables: Sequence[RequestTable], bounds: Sequence[int]) -> list[int]:
        return [LiveIndex(t).count_below(b) for t, b in zip(tables, bounds, strict=True)]

    def at_ranks(
        self, tables: Sequence[RequestTable], ranks: np.ndarray, counts: Sequence[int]
    ) -> np.ndarray:
        parts = zip(tables, np.split(ranks, np.cumsum(counts)[:-1]), strict=True)
        return _ragged_ids([LiveIndex(t).at(np.sort(r)) for t, r in parts])[0]

    def draw(self, draws: Sequence[Draw]) -> np.ndarray:
        parts = [
            np.random.default_rng(d.entropy).choice(
                d.num_candidates, size=d.num_draws, replace=False
            )
            for d in draws
        ]
        return np.concatenate(parts)

    # ---- evict -----------------------------------------------------------------------------

    def evict(self, changes: Sequence[Change], ids: np.ndarray, counts: Sequence[int]) -> None:
        first = 0
        for change, count in zip(changes, counts, strict=True):
            if count:
                _evict(change.table, ids[first : first + count])
                change.has_evicted = True
            first += count
            change.num_evicted = change.table.num_evicted_tokens
            if change.table.num_holes:
                if change.rules.moves:
                    _choose_blocks(change)
                else:
                    _release_dead_in_place(change)

    # ---- place -----------------------------------------------------------------------------

    def place(
        self,
        changes: Sequence[Change],
        num_new: Sequence[int],
        block_ids_from: Callable[[int, int], Sequence[int]],
    ) -> StepPlan:
        return plan_of_layouts(
            [
                _place(change, count, partial(block_ids_from, e))
                for e, (change, count) in enumerate(zip(changes, num_new, strict=True))
            ]
        )


def scores_by_id(table: RequestTable, given: ScoredIds) -> np.ndarray:
    """float32[num_computed_tokens], scores by logical id, NaN where there is none."""
    ids = given.ids
    if ids is None:
        ids = table.ids_by_physical_index()[: given.num_ids]
    out = np.full(table.num_computed_tokens + 1, np.nan, np.float32)
    # Those of holes (-1) end up behind the last id.
    out[ids] = given.scores[given.start : given.start + given.num_ids]
    return out[:-1]


def _below(ids: np.ndarray, end: int) -> np.ndarray:
    return ids if not len(ids) or ids[-1] < end else ids[ids < end]


def _ragged_ids(parts: list[np.ndarray]) -> tuple[np.ndarray, list[int]]:
    return np.concatenate(parts).astype(np.int64), [len(p) for p in parts]


def _evict(table: RequestTable, ids: np.ndarray) -> None:
    table.evict_tokens(ids)
    first, end = int(ids[0]), int(ids[-1]) + 1
    if end - first == len(ids):
        table.extend_dead_run(first, end)


def _release_dead_in_place(change: Change) -> None:
    """`naive`: fully dead blocks go, and leave a placeholder."""
    table = change.table
    full = table.num_physical_tokens // table.block_size
    handles = table.block_table[:full]
    dead = (table.live_in[handles] == 0) & (table.block_id[handles] != NULL_BLOCK)
    released = np.flatnonzero(dead)
    if len(released):
        table.block_id[table.block_table[released]] = NULL_BLOCK
        gone = np.isin(table.holes // table.block_size, table.block_table[released])
        table.holes = table.holes[~gone]
    change.has_evicted, change.keeps_placeholders = True, True
    change.released = released.tolist()


def _choose_blocks(change: Change) -> None:
    """Choose the blocks that stay: as few as will do where it packs, else those with a live token."""
    table, rules = change.table, change.rules
    change.packs = packs_now(
        table, change.num_new_tokens, rules.fragmentation_threshold, change.under_pressure
    )
    kept = _kept_when_packed(change) if change.packs else _without_dead_blocks(table)
    in_row = np.zeros(table.num_blocks, bool)
    in_row[kept] = True
    change.has_evicted = True
    change.released = np.flatnonzero(~in_row).tolist()
    in_order = len(kept) == table.num_blocks and bool((kept == np.arange(len(kept))).all())
    change.order = None if in_order else kept
    if not change.packs and change.released:
        change.written = change.written_positions()  # before positions change
        _drop_dead(table, kept)


def _kept_when_packed(change: Change) -> np.ndarray:
    table, pinned = change.table, change.pinned
    stays = np.arange(table.num_blocks)
    if change.leaves is not None:
        stays = np.flatnonzero(~change.leaves)
    num_keep = cdiv(table.num_live_tokens + change.num_new_tokens, table.block_size)
    num_keep = min(len(stays), num_keep)
    if pinned is not None:
        pinned = pinned[stays]
        num_keep = max(num_keep, int(pinned.sum()))
    kept = choose_kept(table.live_per_block()[stays], num_keep, pinned)
    return stays[kept].astype(np.int32)


def _without_dead_blocks(table: RequestTable) -> np.ndarray:
    """int32, positions of blocks below the tail that hold a live token, and of what lies beyond."""
    used = cdiv(table.num_physical_tokens, table.block_size)
    keep = np.ones(table.num_blocks, bool)
    keep[:used] = table.live_per_block()[:used] > 0
    return np.flatnonzero(keep).astype(np.int32)


def _drop_dead(table: RequestTable, kept: np.ndarray) -> None:
    """Shorten the block table by fully dead blocks; other holes stay where they are."""
    N, used = table.block_size, cdiv(table.num_physical_tokens, table.block_size)
    below = kept[kept < used]
    tail_slots = table.num_physical_tokens - (used - 1) * N
    tail_kept = len(below) > 0 and int(below[-1]) == used - 1
    gone = table.set_block_table(kept)
    table.holes = table.holes[table.pos_of[table.holes // N] >= 0]
    table.forget_handles(gone)
    full = len(below) - tail_kept
    table.num_physical_tokens = full * N + (tail_slots if tail_kept else 0)


def _place(change: Change, num_new: int, block_ids_from: Callable[[int], Sequence[int]]) -> Layout:
    table, moves = change.table, change.rules.moves
    layout = Layout(table.req_id, added=change.added)
    if change.rewrites_block_table:
        layout.kept = change.new_order()
    rest = num_new
    if change.packs:
        rest = _pack(change, num_new, layout)
    table.sync_new_tokens(block_ids_from(table.num_blocks), table.num_computed_tokens)
    if not change.packs and moves and num_new == 1 and len(table.holes):
        _reuse_hole(table, int(table.holes[-1]), layout)
        table.holes = table.holes[:-1]
        rest = 0
    if rest:
        table.sync_new_tokens((), table.num_computed_tokens + rest)
    layout.num_reclaimed = table.num_reclaimed_tokens
    if table.is_packed:
        layout.mask_kind = MASK_PACKED
    elif change.has_evicted:
        layout.mask_kind, layout.mask = MASK_GIVEN, table.live_mask()
    else:
        layout.mask_kind = MASK_KEPT
    return layout


def _pack(change: Change, num_new: int, layout: Layout) -> int:
    """Fill every hole.

    Returns:
        The step's new tokens that are still to be appended at the packed end.
    """
    # Blocks allocated since `evict` are not in the table yet: these are all there is.
    table, kept = change.table, change.new_order()
    placement = place_packed(table, kept, num_new)
    if len(placement.source):
        layout.move_source = table.slots_of(placement.source)
        layout.move_destination = table.slots_of(placement.destination)
        table.apply_moves(placement.source, placement.destination)
    table.forget_handles(table.set_block_table(kept))
    table.holes = NO_SLOTS
    table.num_physical_tokens = table.num_live_tokens
    if placement.reused < 0:
        return num_new
    table.num_physical_tokens += 1
    _reuse_hole(table, placement.reused, layout)
    return 0


def _reuse_hole(table: RequestTable, local: int, layout: Layout) -> None:
    """Give the step's new token a dead slot inside the layout: no copy."""
    table.put_next(local)
    index = int(table.physical_of(np.array([local]))[0])
    if index != table.num_physical_tokens - 1 or not table.is_packed:
        layout.new_token_index = index  # else it goes to the packed end by itself

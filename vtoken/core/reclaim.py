"""Which blocks to keep and which tokens to move: decisions only, nothing is changed here.

Shape legend: B blocks in a block table, N block size (tokens), T tokens.

A packed block table after an eviction (N = 4, x dead, three blocks are enough for 9 live + 1 new):

    before   [ a x x b ] [ c d x x ] [ e f g h ] [ i . . . ]
    kept      0 (2 live)              2 (4 live)   ... the fullest blocks, fewest tokens move
    after    [ e f g h ] [ a . . b ] [ i ...     the emptiest kept block goes last
    moves    live tokens of released blocks, and those beyond the packed end, fill the holes
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vtoken.core.table import NO_SLOTS, RequestTable
from vtoken.units import cdiv


def choose_kept(live_per_block: np.ndarray, num_keep: int, pinned: np.ndarray | None) -> np.ndarray:
    """Choose the blocks to keep so that the fewest tokens move.

    Args:
        live_per_block: int[B], live tokens in each block.
        num_keep: how many blocks to keep; at least the number of pinned ones.
        pinned: bool[B] or None, shared blocks: always kept, never last (the last block of a
            packed block table is the one that gets written).

    Returns:
        int32[num_keep], kept positions in new order: pinned ones first (nothing may be
        placed in or moved out of them), then ascending, the emptiest last.
    """
    B, top = len(live_per_block), int(live_per_block.max(initial=0)) + 1
    # Larger is fuller; ties go to the later block.
    fullness = live_per_block.astype(np.int64) * B + np.arange(B)
    if pinned is not None:
        fullness = fullness + pinned * (top * B)
    kept = np.arange(B)
    if num_keep < B:
        kept = np.sort(np.argpartition(fullness, B - num_keep)[B - num_keep :])
    if pinned is not None:
        kept = np.concatenate([kept[pinned[kept]], kept[~pinned[kept]]])
    if len(kept) > 1:
        # Equally empty: the one at the end stays there, so that an untouched block table keeps its order.
        emptiness = live_per_block[kept].astype(np.int64) * B - np.arange(len(kept))
        if pinned is not None:
            emptiness += pinned[kept] * (top * B)
        last = int(emptiness.argmin())
        kept = np.concatenate([kept[:last], kept[last + 1 :], kept[last : last + 1]])
    return kept.astype(np.int32)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where tokens go when a request's layout is made packed.

    Attributes:
        source, destination: int32[K], local slots of the relocations.
        reused: local slot that the step's single new token takes, or -1 when it goes to the
            packed end by itself.
        num_physical_tokens: physical length before the step's new tokens are appended (a reused
            slot already counted).
    """

    source: np.ndarray
    destination: np.ndarray
    reused: int
    num_physical_tokens: int


def place_packed(table: RequestTable, kept: np.ndarray, num_new_tokens: int) -> Placement:
    """Fill every hole below the packed end, with the new token if there is one, else by moves.

    Args:
        table: before its block table is rewritten.
        kept: positions that stay, in new order (then blocks allocated in this step).
        num_new_tokens: tokens scheduled in this step. One token takes a hole and costs no copy.
            More are appended behind all live tokens: causal order inside the chunk needs it.

    Cost: O(holes + B + N), never O(T).
    """
    N = table.block_size
    old_handles = table.block_table[: table.num_blocks]
    handles = old_handles[kept]
    new_pos = np.full(len(table.pos_of), -1, np.int32)
    new_pos[handles] = np.arange(len(handles), dtype=np.int32)

    takes_hole = num_new_tokens == 1
    end = table.num_live_tokens + takes_hole  # the packed end
    in_row = min(end, len(handles) * N)

    # Dead slots inside kept blocks: holes, and the unused tail of the old block table.
    tail = np.arange(table.num_physical_tokens, table.num_blocks * N, dtype=np.int32)
    dead = np.concatenate([table.holes, table.local_of(tail)])
    dead_pos = new_pos[dead // N]
    dead_index = dead_pos * N + dead % N
    inside = (dead_pos >= 0) & (dead_index < in_row)
    dead, dead_index = dead[inside], dead_index[inside]
    dead = dead[np.argsort(dead_index)]

    # Live tokens outside the packed prefix: in released blocks, or beyond its end.
    released = old_handles[new_pos[old_handles] < 0]
    beyond = handles[end // N :]
    outside = _live_slots(table, released)
    if len(beyond):
        slots = _live_slots(table, beyond)
        outside = np.concatenate([outside, slots[new_pos[slots // N] * N + slots % N >= end]])

    reused = -1
    if takes_hole and end <= len(handles) * N:
        reused, dead = int(dead[-1]), dead[:-1]
    assert len(dead) == len(outside), (table.req_id, len(dead), len(outside), end, kept)
    return Placement(outside, dead, reused, end if reused >= 0 else table.num_live_tokens)


def _live_slots(table: RequestTable, handles: np.ndarray) -> np.ndarray:
    """int32[K], local slots of the live tokens in these blocks."""
    if not len(handles):
        return NO_SLOTS
    N = table.block_size
    slots = (handles[:, None] * N + np.arange(N, dtype=np.int32)).reshape(-1)
    return slots[table.id_at[slots] >= 0]


def blocks_needed(table: RequestTable, num_new_tokens: int, *, packs: bool) -> int:
    """Blocks the request needs to hold its live tokens (and holes, unless it packs) and new ones."""
    if packs or table.is_packed:
        return cdiv(table.num_live_tokens + num_new_tokens, table.block_size)
    if num_new_tokens == 1:  # takes a hole
        return cdiv(table.num_physical_tokens, table.block_size)
    return cdiv(table.num_physical_tokens + num_new_tokens, table.block_size)


def packs_now(
    table: RequestTable,
    num_new_tokens: int,
    fragmentation_threshold: float,
    under_pressure: bool = False,
) -> bool:
    """Whether a request's holes are to be filled in this step.

    Args:
        under_pressure: the pool is short: fill them below the threshold too, where that saves a
            block that would be asked for otherwise.
    """
    if fragmentation_threshold == 0.0:
        return True
    needed = blocks_needed(table, num_new_tokens, packs=True)
    if under_pressure:  # there may be nothing to give back, but less to ask for
        return needed < blocks_needed(table, num_new_tokens, packs=False)
    fragmented = table.num_holes >= fragmentation_threshold * table.num_physical_tokens
    return fragmented and needed < cdiv(table.num_physical_tokens, table.block_size)


def most_moves(
    table: RequestTable,
    victims: np.ndarray,
    num_new_tokens: int,
    pinned: np.ndarray | None = None,
    fragmentation_threshold: float = 0.0,
) -> int:
    """Tokens that evicting these ids moves at most; nothing is changed.

    Args:
        table: in step with the request.
        num_new_tokens: tokens about to be scheduled.
        pinned: bool[B] or None, shared blocks.
    """
    N, B = table.block_size, table.num_blocks
    num_holes = table.num_holes + len(victims)
    if num_holes < fragmentation_threshold * table.num_physical_tokens:
        return 0  # the holes stay
    lost = np.bincount(table.pos_of[table.index_of[victims] // N], minlength=B)
    live = table.live_per_block() - lost
    total = table.num_live_tokens - len(victims)
    num_keep = min(B, cdiv(total + num_new_tokens, N))
    if pinned is not None:
        num_keep = max(num_keep, int(pinned.sum()))
    kept = choose_kept(live, num_keep, pinned)
    end = total + (num_new_tokens == 1)
    beyond = live[kept[end // N :]].sum()
    return int(live.sum() - live[kept].sum() + beyond)

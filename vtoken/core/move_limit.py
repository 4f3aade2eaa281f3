"""At most so many tokens are moved in a step (`max_moves_per_step`); other evictions wait.

An eviction that waits changes nothing: the request stays due and keeps its tokens for some steps
more. One that moves nothing never waits. One that moves more than the limit goes alone, so that
it does not wait for ever; with a limit of 0 tokens are moved only when the pool runs short.
"""

from __future__ import annotations

import numpy as np

from vtoken.core.reclaim import choose_kept
from vtoken.core.table import RequestTable
from vtoken.units import cdiv


class MoveLimit:
    """What is left of one step's limit."""

    def __init__(self, max_moves: int) -> None:
        self.max_moves = max_moves
        self.num_moves = 0

    def begin_step(self) -> None:
        self.num_moves = 0

    def take(self, num_moves: int, is_needed: bool = False) -> bool:
        """Whether an eviction that moves at most this many tokens may go ahead; counts it if so.

        Args:
            is_needed: the pool is short: it goes ahead whatever it moves.
        """
        fits = self.num_moves + num_moves <= self.max_moves
        goes_alone = self.num_moves == 0 and self.max_moves > 0
        if num_moves and not (fits or goes_alone or is_needed):
            return False
        self.num_moves += num_moves
        return True


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

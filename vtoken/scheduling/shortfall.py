"""How short the pool is, which requests give blocks, and how many: arithmetic of memory pressure.

Legend: R running requests, N block size (tokens). All arrays are int64[R].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PoolView:
    """The pool at the head of a step, in blocks.

    Attributes:
        free: blocks in the free queue.
        needed: blocks that running requests and admissible waiting ones take in this step.
        low, high: watermarks: reclaiming starts when less than `low` would be left, and goes on
            until `high` is left, so that it does not happen in every step.
    """

    free: int
    needed: int
    low: int
    high: int

    @property
    def shortfall(self) -> int:
        """Blocks to reclaim now; 0 while the pool has room."""
        left = self.free - self.needed
        return 0 if left >= self.low else self.high - left


def share_shortfall(spare_blocks: np.ndarray, shortfall: int) -> np.ndarray:
    """Share out how many blocks each request gives: those furthest above their budget first.

    Brings the highest requests down to one common level above their budgets, like water: none
    gives while another is higher.

    Args:
        spare_blocks: blocks each request holds or is about to take beyond what its budget needs.
        shortfall: blocks wanted in all; less comes back when there is not enough to spare.

    Returns:
        int64[R], blocks to give; sums to min(shortfall, sum(spare_blocks)).
    """
    spare = np.maximum(spare_blocks, 0)
    total = int(spare.sum())
    if shortfall <= 0 or total == 0:
        return np.zeros_like(spare)
    if shortfall >= total:
        return spare
    # Find the lowest level at which at most `shortfall` blocks stand above it.
    ordered = np.sort(spare)[::-1]
    taken = np.cumsum(ordered) - ordered * np.arange(1, len(ordered) + 1)  # above ordered[k]
    k = int(np.searchsorted(taken, shortfall, side="right"))  # the k highest give
    level = -(-(int(ordered[:k].sum()) - shortfall) // k)
    give = np.maximum(spare - level, 0)
    rest = shortfall - int(give.sum())
    if rest > 0:  # one block more from the first of those that still stand at the level
        at_level = np.flatnonzero(spare - give == level)[:rest]
        give[at_level] += 1
    return give


def tokens_to_give(
    give_blocks: np.ndarray,
    demand_blocks: np.ndarray,
    num_live: np.ndarray,
    num_new: np.ndarray,
    num_above_budget: np.ndarray,
    block_size: int,
) -> np.ndarray:
    """Tokens each request must lose so that its packed layout needs that many blocks less.

    Args:
        demand_blocks: blocks held, or about to be, with the new tokens.
        num_live, num_new: live tokens, and tokens about to be added.
        num_above_budget: tokens that may go at most.

    Returns:
        int64[R], 0 where a request gives nothing.
    """
    fits = (demand_blocks - give_blocks) * block_size
    lose = np.maximum(num_live + num_new - fits, 0)
    return np.where(give_blocks > 0, np.minimum(lose, num_above_budget), 0)

"""Shared and cached blocks: when copying survivors out is worth more than leaving them alone."""

from __future__ import annotations

import numpy as np

# Sharers decide one by one, each over its own survivors. Near break-even one would copy and
# another not, and the pool would hold the shared blocks and the copies until that one follows.
MIN_GAIN_FRAC = 1 / 16


def copy_gain_blocks(ref_counts: np.ndarray, survivors: np.ndarray, block_size: int) -> float:
    """Blocks won by copying survivors out of shared blocks and dropping the references.

    A block that r requests hold comes back when the last of them has dropped it: each brings
    1 / r of it. Its survivors take room in a private block.

    Args:
        ref_counts: int[S], requests holding each block, this one included.
        survivors: int[S], live tokens left in each.
        block_size: tokens.

    Returns:
        Positive where copying pays. At half retention and two sharers it is zero: no gain.
    """
    return float((1.0 / ref_counts).sum() - survivors.sum() / block_size)


def copy_pays(ref_counts: np.ndarray, survivors: np.ndarray, block_size: int) -> bool:
    """Whether copying out of shared blocks wins enough of the blocks it gives up."""
    gain = copy_gain_blocks(ref_counts, survivors, block_size)
    return gain > MIN_GAIN_FRAC * float((1.0 / ref_counts).sum())

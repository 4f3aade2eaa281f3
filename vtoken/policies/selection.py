"""Pick the k lowest-scored tokens: exact, deterministic, O(n)."""

from __future__ import annotations

import numpy as np

NO_IDS = np.empty(0, np.int32)


def lowest(ids: np.ndarray, keys: np.ndarray, count: int) -> np.ndarray:
    """Name the `count` ids with the lowest keys; among equal keys the lower id goes first.

    A key of NaN stands for "no score yet": such an id is never named, even if that leaves fewer
    than `count`.

    Args:
        ids: int32[C], ascending.
        keys: float[C], one per id.

    Returns:
        int32[<= count], ascending.
    """
    if count <= 0 or not len(ids):
        return NO_IDS
    return ids[lowest_indices(keys, count)]


def lowest_indices(keys: np.ndarray, count: int) -> np.ndarray:
    """int64[<= count], indices of the lowest keys, ascending; as `lowest`."""
    if count <= 0 or not len(keys):
        return np.empty(0, np.int64)
    # partition sorts NaN last, so a bound of NaN means that fewer than count ids have a key.
    bound = np.partition(keys, count - 1)[count - 1] if count < len(keys) else np.nan
    if np.isnan(bound):
        return np.flatnonzero(~np.isnan(keys))[:count]
    chosen = np.flatnonzero(keys <= bound)
    if len(chosen) > count:  # more keys equal the bound than there is room for
        tied = np.flatnonzero(keys[chosen] == bound)
        chosen = np.delete(chosen, tied[count - len(chosen) :])
    return chosen

"""Find the k-th live token of a request without a pass over its ids.

Live ids are counted in chunks; only chunks in which something changed since the last look are
counted again. Cost: O(changed chunks + ids / CHUNK_TOKENS).
"""

from __future__ import annotations

import numpy as np

CHUNK_TOKENS = 64  # regions of `index_of` are whole multiples of it


class LiveIndex:
    """Counts of one table's live ids.

    Attributes:
        evicted: arrays of ids that died since the last look.
    """

    def __init__(self, table) -> None:
        self._table = table
        self._num_ids = 0
        self._live = np.zeros(0, np.int64)  # by chunk
        self._before = np.zeros(1, np.int64)  # live ids in front of each chunk, and in all
        self.evicted: list[np.ndarray] = []

    def _look(self) -> np.ndarray:
        """Count anew what changed; returns `index_of` as [chunks, CHUNK_TOKENS]."""
        length = self._table.num_computed_tokens
        chunks = self._table.index_of.reshape(-1, CHUNK_TOKENS)
        if not self.evicted and length == self._num_ids:
            return chunks
        num_chunks = -(-length // CHUNK_TOKENS)
        grown = np.arange(self._num_ids // CHUNK_TOKENS, num_chunks)
        changed = np.concatenate([grown, *(ids // CHUNK_TOKENS for ids in self.evicted)])
        changed = changed.astype(np.int64)
        if num_chunks > len(self._live):
            self._live = np.append(self._live, np.zeros(num_chunks - len(self._live), np.int64))
        self._live[changed] = (chunks[changed] >= 0).sum(axis=1)
        self._before = np.append(0, self._live.cumsum())
        self._num_ids = length
        self.evicted.clear()
        return chunks

    def count_below(self, first_id: int) -> int:
        """Live ids < first_id."""
        chunks = self._look()
        chunk, rest = divmod(first_id, CHUNK_TOKENS)
        if chunk >= len(self._live):
            return int(self._before[-1])
        return int(self._before[chunk] + (chunks[chunk, :rest] >= 0).sum())

    def at(self, ranks: np.ndarray) -> np.ndarray:
        """int32[K], the live ids with these ranks; 0 is the lowest."""
        chunks = self._look()
        chunk = self._before.searchsorted(ranks, side="right") - 1
        rank = ranks - self._before[chunk]
        seen = (chunks[chunk] >= 0).cumsum(axis=1)
        offset = (seen <= rank[:, None]).sum(axis=1)
        return (chunk * CHUNK_TOKENS + offset).astype(np.int32)

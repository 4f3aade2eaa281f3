"""Find the k-th live token of a request without a pass over its ids.

Live ids are counted by chunk (`RequestTable.live_in_span`). Cost: O(ids / SPAN_TOKENS).
"""

from __future__ import annotations

import numpy as np

from vtoken.core.arena import SPAN_TOKENS
from vtoken.core.table import RequestTable


class LiveIndex:
    """One table's live ids by rank, as long as the table does not change."""

    def __init__(self, table: RequestTable) -> None:
        self._chunks = table.index_of.reshape(-1, SPAN_TOKENS)
        num_chunks = -(-table.num_computed_tokens // SPAN_TOKENS)
        # Live ids in front of each chunk, and in all.
        self._before = np.append(0, table.live_in_span[:num_chunks].cumsum(dtype=np.int64))

    def count_below(self, first_id: int) -> int:
        """Live ids < first_id."""
        chunk, rest = divmod(first_id, SPAN_TOKENS)
        if chunk >= len(self._before) - 1:
            return int(self._before[-1])
        return int(self._before[chunk] + (self._chunks[chunk, :rest] >= 0).sum())

    def at(self, ranks: np.ndarray) -> np.ndarray:
        """int32[K], the live ids with these ranks; 0 is the lowest."""
        chunk = self._before.searchsorted(ranks, side="right") - 1
        rank = ranks - self._before[chunk]
        seen = (self._chunks[chunk] >= 0).cumsum(axis=1)
        offset = (seen <= rank[:, None]).sum(axis=1)
        return (chunk * SPAN_TOKENS + offset).astype(np.int32)

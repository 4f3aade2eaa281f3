"""Random eviction: the baseline that scatters holes most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vtoken.policies.base import NO_IDS, BatchView, Policy, RequestView


@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """Drop tokens drawn evenly from all but the sinks and the newest block.

    Source: the baseline "Random" of the vToken paper (section 5.1), which states no parameters.

    What differs here: one draw serves all layers and heads, because vLLM's block table is shared
    by them. The draw depends on the seed, the prompt and the length alone, never on earlier draws,
    so two engines that reach the same length evict the same tokens.
    """

    name: ClassVar[str] = "random"

    def evict(self, view: RequestView) -> np.ndarray:
        # Ranks of ascending ids are drawn: the draw must not depend on the layout.
        ranked = view.ranked()
        if ranked is None:
            ids = self.candidates(view)
            count = min(view.num_evict, len(ids))
            return ids[self._draw(view, len(ids), count)] if count > 0 else NO_IDS
        first, end = (ranked.count_below(i) for i in self.candidate_bounds(view))
        count = min(view.num_evict, end - first)
        return ranked.at(first + self._draw(view, end - first, count)) if count > 0 else NO_IDS

    def evict_many(self, view: BatchView) -> tuple[np.ndarray, list[int]]:
        """`evict` for several requests: (ids int64[K], counts)."""
        first, end = (view.count_below(ids) for ids in self.candidate_bounds_many(view))
        sizes = [e - f for f, e in zip(first, end, strict=True)]
        counts = [max(0, min(n, size)) for n, size in zip(view.num_evict, sizes, strict=True)]
        ranks = view.draw(sizes, counts) + np.repeat(first, counts)
        return view.at_ranks(ranks, counts), counts

    @staticmethod
    def _draw(view: RequestView, num_candidates: int, count: int) -> np.ndarray:
        return view.rng().choice(num_candidates, size=count, replace=False)

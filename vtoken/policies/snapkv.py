"""Attention of the observation window, pooled over neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vtoken.policies.base import Policy, RequestView, ScoreKind
from vtoken.policies.parameters import check_tokens
from vtoken.policies.selection import lowest


@dataclass(frozen=True, kw_only=True)
class SnapKV(Policy):
    """Keep the tokens, and their neighbours, that the last queries attend to.

    A token's key is the highest score within `pool_tokens // 2` positions on either side. As in
    the paper, the newest tokens (the observation window) are kept and lend no neighbour anything.

    Source: "SnapKV: LLM Knows What You are Looking for Before Generation", Li, Huang, Yang,
    Venkitesh, Locatelli, Ye, Cai, Lewis, Chen, 2024 (NeurIPS 2024). Its defaults: an observation
    window of 32 queries, max pooling over 7 positions (the published code starts from average
    pooling over 5), no sinks.

    What differs here:
    * The paper chooses in each head apart. vLLM's block table is shared by all layers and heads,
      so the window's attention is summed over them before pooling.
    * The paper compresses the prompt, once, and keeps every generated token. Here generated
      tokens are evicted too; while decoding, scores are a leaky sum over the latest queries.
    * Neighbours are counted in positions of the sequence; evicted ones have no score to lend.
    * The observation window is `--score-queries`; the kept window is one block.

    Among equal pooled scores the lower logical id is evicted first.

    Attributes:
        pool_tokens: positions one pooled score spans, odd; 1 turns pooling off.
    """

    name: ClassVar[str] = "snapkv"
    score_kind: ClassVar[ScoreKind] = ScoreKind.WINDOW

    pool_tokens: int = 7

    def __post_init__(self) -> None:
        check_tokens(self.name, "pool_tokens", self.pool_tokens, odd=True)

    def evict(self, view: RequestView) -> np.ndarray:
        assert view.scores is not None, "snapkv was asked to evict without scores"
        low, high = self.candidate_range(view)
        pooled = pool_max(view.live_ids[:high], view.scores[:high], self.pool_tokens // 2)
        return lowest(view.live_ids[low:high], pooled[low:], view.num_evict)


def pool_max(ids: np.ndarray, scores: np.ndarray, reach: int) -> np.ndarray:
    """Take each token's highest score among the ids within `reach` of its own.

    Args:
        ids: int32[T], ascending, with gaps where tokens were evicted.
        scores: float32[T]; NaN lends nothing and stays NaN.

    Returns:
        float32[T].
    """
    missing = np.isnan(scores)
    known = np.where(missing, -np.inf, scores)
    pooled = known.copy()
    # Ids ascend, so the neighbour `reach` ids away is at most `reach` entries away.
    for shift in range(1, min(reach, len(ids) - 1) + 1):
        near = ids[shift:] - ids[:-shift] <= reach
        np.maximum(pooled[shift:], known[:-shift], out=pooled[shift:], where=near)
        np.maximum(pooled[:-shift], known[shift:], out=pooled[:-shift], where=near)
    pooled[missing] = np.nan
    return pooled

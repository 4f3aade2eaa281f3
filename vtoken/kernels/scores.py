"""What a policy keeps per KV slot: one float32, updated in place after each step.

    step[slot]   a: attention probability of this step, summed over layers, heads, counted queries
    scores[slot] what the policy reads; the rule is its `ScoreKind`

Legend: S slots, M touched (live) slots of a step, R requests of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vtoken.policies.base import ScoreKind

WINDOW_QUERIES = 32  # SnapKV's observation window, in queries

ATTENTION_KINDS = frozenset(
    {ScoreKind.ACCUMULATED, ScoreKind.LAST, ScoreKind.WINDOW, ScoreKind.COUNT_ABOVE_THRESHOLD}
)


def counted_queries(kind: ScoreKind, score_queries: int = -1) -> int:
    """Queries per request that the attention should count: `score_queries` of `Kernels.plan`.

    Args:
        score_queries: the user's limit, -1 for all; for window kinds it is the window.
    """
    if kind not in ATTENTION_KINDS:
        return 0
    return 1 if kind is ScoreKind.LAST else score_queries


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The step that produced the sums, request by request.

    Attributes:
        num_live_tokens: int[R], touched slots of each request; they sum to M.
        num_queries: int[R], query rows of each request.
        num_counted: int[R], queries of each that entered the sums.
        num_heads: query heads of all layers.
    """

    num_live_tokens: torch.Tensor
    num_queries: torch.Tensor
    num_counted: torch.Tensor
    num_heads: int


def reset_scores(scores: torch.Tensor, new_slots: torch.Tensor) -> None:
    """Forget what the slots held before: a token was written there."""
    scores.index_fill_(0, new_slots, 0.0)


def update_scores(
    kind: ScoreKind,
    scores: torch.Tensor,
    step: torch.Tensor,
    slots: torch.Tensor,
    shape: StepShape,
    *,
    window_steps: int = WINDOW_QUERIES,
) -> None:
    """Apply a score kind's rule to the touched slots, in place.

    With W the window and a the step's sum:

        accumulated              score += a
        last                     score  = a                       (one counted query)
        window                   score  = a after a chunk, score * (1 - 1 / W) + a after a decode
        count-above-threshold    score += (a / (heads * counted) > 1 / live tokens)
        key-norm, none           nothing: set when the key is written, or not at all

    Args:
        scores, step: float32[S].
        slots: int64[M], each request's live slots, one request after the other, none twice.
        window_steps: W of the window kind.
    """
    assert scores.dtype == step.dtype == torch.float32, (scores.dtype, step.dtype)
    if kind not in ATTENTION_KINDS or slots.numel() == 0:
        return
    live = shape.num_live_tokens.long()
    assert int(live.sum()) == slots.numel(), (live, slots.shape)
    a = step[slots]
    if kind is ScoreKind.ACCUMULATED:
        scores[slots] += a
    elif kind is ScoreKind.LAST:
        scores[slots] = a
    elif kind is ScoreKind.WINDOW:
        decay = 1.0 - 1.0 / window_steps
        kept = torch.where(shape.num_queries > 1, 0.0, decay)
        scores[slots] = scores[slots] * kept.float().repeat_interleave(live) + a
    else:
        # a / (heads * counted) > 1 / live, without dividing by a count of zero
        bar = shape.num_heads * shape.num_counted.float() / live.clamp(min=1)
        scores[slots] += (a > bar.repeat_interleave(live)).float()

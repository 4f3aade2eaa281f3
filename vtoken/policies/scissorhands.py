"""Persistence of importance: drop tokens that were seldom pivotal of late."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vtoken.policies.base import Policy, RequestView, ScoreKind
from vtoken.policies.parameters import check_tokens
from vtoken.policies.selection import lowest


@dataclass(frozen=True, kw_only=True)
class Scissorhands(Policy):
    """Drop the tokens that were unimportant in most steps of the history window.

    A step is unimportant for a token when its mean attention is at most 1 / live tokens. The
    paper counts such steps over the last `history_tokens` steps and drops the tokens with the
    highest count; a token younger than the window has fewer steps to be counted in.

    Source: "Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV Cache
    Compression at Test Time", Liu, Desai, Liao, Wang, Xie, Xu, Kyrillidis, Shrivastava, 2023
    (NeurIPS 2023), algorithm 2. Its defaults: history window 400, recent window 10, no sinks, and
    a budget that varies by layer.

    What differs here:
    * The paper counts in each layer and head apart. vLLM's block table is shared by all of them,
      so a step counts by the attention averaged over layers and heads, and one budget holds for
      all layers.
    * One number a token is kept: in how many steps it was important, since its KV was written.
      The count within the window is estimated from it by the paper's own hypothesis, that
      importance persists: `min(steps, history) * (1 - count / steps)`.
    * How many steps looked at a token is not recorded either. It is one for the prompt and one
      for each token generated since, or the highest count of any later token where that is more
      (a prompt prefilled in chunks). After a preemption counting starts again, so old generated
      tokens then look less important than they were.

    Among equal estimates the lower logical id is evicted first.

    Attributes:
        history_tokens: steps the history window spans.
    """

    name: ClassVar[str] = "scissorhands"
    score_kind: ClassVar[ScoreKind] = ScoreKind.COUNT_ABOVE_THRESHOLD

    history_tokens: int = 400

    def __post_init__(self) -> None:
        check_tokens(self.name, "history_tokens", self.history_tokens)

    def evict(self, view: RequestView) -> np.ndarray:
        ids, counts = self.scored_candidates(view)
        return lowest(ids, -self.unimportant_steps(view, ids, counts), view.num_evict)

    def unimportant_steps(
        self, view: RequestView, ids: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        """float64[C], estimated unimportant steps within the window; NaN without a count."""
        counts = counts.astype(np.float64)
        last_prompt_id = min(view.num_prompt_tokens, view.num_computed_tokens) - 1
        steps = (view.num_computed_tokens - np.maximum(ids, last_prompt_id)).astype(np.float64)
        # Whoever looked at a later token looked at this one; fmax passes over NaN.
        seen_later = np.fmax.accumulate(counts[::-1])[::-1]
        steps = np.fmax(steps, seen_later)
        return np.minimum(steps, self.history_tokens) * (1.0 - counts / steps)

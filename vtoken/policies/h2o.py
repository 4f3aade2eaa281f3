"""Heavy hitters by accumulated attention, and a recent window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vtoken.policies.base import Policy, Rule, ScoreKind


@dataclass(frozen=True, kw_only=True)
class H2O(Policy):
    """Keep the newest tokens and those that have drawn most attention so far.

    Source: "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
    Models", Zhang, Sheng, Zhou, Chen, Zheng, Cai, Song, Tian, Re, Barrett, Wang, Chen, 2023
    (NeurIPS 2023). Its defaults: half of the budget for heavy hitters, half for recent tokens
    (10 % and 10 % of the sequence), and no sinks.

    What differs here: the paper keeps other tokens in every layer and head. vLLM's block table is
    shared by all of them, so attention is summed over layers and heads and one decision holds for
    the whole model: a token that a single head depends on can lose against one that all heads
    glance at. The sinks (4 by default) are kept whatever their score and come out of the heavy
    hitters' half. Prompt queries count as far as `--score-queries` says; the paper counts all.

    Among equal scores the lower logical id is evicted first.
    """

    name: ClassVar[str] = "h2o"
    score_kind: ClassVar[ScoreKind] = ScoreKind.ACCUMULATED
    rule: ClassVar[Rule] = Rule.LOWEST_SCORE
    recent_follows_budget: ClassVar[bool] = True

    def recent(self, budget_tokens: int) -> int:
        """Half of the budget, less where the sinks leave no room for that."""
        if self.recent_tokens is not None:
            return self.recent_tokens
        return max(0, min(budget_tokens // 2, budget_tokens - self.sink_tokens))

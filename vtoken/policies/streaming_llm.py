"""Attention sinks and a recent window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vtoken.policies.base import Policy, Rule


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Policy):
    """Keep the first tokens and the newest ones; drop what lies between, oldest first.

    Source: "Efficient Streaming Language Models with Attention Sinks", Xiao, Tian, Chen, Han,
    Lewis, 2023 (ICLR 2024). Its defaults: 4 sinks, and a window that fills the cache.

    What differs here: the paper gives cached keys new positions, counted inside the cache, so
    that a stream can outgrow the model's context. Here a token keeps the position it was computed
    with, so the model's context length still bounds the request. The cut is the same in every
    layer and head in the paper too: nothing is lost by sharing one block table.

    The cost grows with the evicted tokens, not with the context.
    """

    name: ClassVar[str] = "streaming-llm"
    rule: ClassVar[Rule] = Rule.OLDEST
    recent_follows_budget: ClassVar[bool] = True

    def recent(self, budget_tokens: int) -> int:
        """All of the budget but the sinks."""
        if self.recent_tokens is not None:
            return self.recent_tokens
        return max(0, budget_tokens - self.sink_tokens)

"""How many live tokens a request may keep, and when it is next above that by an interval."""

from __future__ import annotations

from dataclasses import dataclass

from vtoken.policies.base import Policy, budget_tokens

NEVER = 1 << 62  # a logical length that no request reaches


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How many live tokens a request may keep.

    Attributes:
        policy: names the victims; its floor bounds the budget from below.
        eviction_ratio: fraction dropped, or None for the absolute `kv_budget_tokens`.
        interval_tokens: live tokens above the budget at which eviction happens.
    """

    policy: Policy
    eviction_ratio: float | None
    kv_budget_tokens: int | None
    interval_tokens: int

    def tokens(self, num_computed_tokens):
        """The budget at a logical length (or an array of lengths), in tokens."""
        return budget_tokens(
            num_computed_tokens,
            floor_tokens=self.policy.floor_tokens,
            eviction_ratio=self.eviction_ratio,
            kv_budget_tokens=self.kv_budget_tokens,
        )

    def all_tokens(self, lengths: list[int]) -> list[int]:
        """The budgets at several logical lengths."""
        if self.kv_budget_tokens is not None:
            return [self.tokens(0)] * len(lengths)
        return [self.tokens(length) for length in lengths]

    def next_eviction_len(self, num_evicted: int, num_protected: int, now: int) -> int:
        """Smallest logical length >= now at which live >= budget + interval, if none is evicted.

        Protected tokens count neither in the length nor in live.
        """
        gone, interval = num_evicted + num_protected, self.interval_tokens
        if self.kv_budget_tokens is not None:
            budget = max(self.policy.floor_tokens, self.kv_budget_tokens)
            return max(now, budget + interval + gone)
        if self.eviction_ratio == 0.0:
            return NEVER
        least = self.policy.floor_tokens + interval + num_evicted
        length = max(
            least, int((num_evicted + interval) / self.eviction_ratio) - 2, now - num_protected
        )
        while length - num_evicted < self.tokens(length) + interval:
            length += 1
        return length + num_protected

    def peak_tokens(self, num_tokens: int) -> int:
        """Most live tokens a decode of this final length ever holds."""
        return min(num_tokens, int(self.tokens(num_tokens)) + self.interval_tokens)

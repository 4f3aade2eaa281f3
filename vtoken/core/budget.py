"""How many live tokens a request may keep, and when it is next above that by an interval."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np

from vtoken.policies.base import Policy, budget_tokens
from vtoken.units import cdiv

NEVER = 1 << 62  # a logical length that no request reaches

# A decision of step s uses the scores of step s - REPORT_AGE_STEPS, under synchronous and
# asynchronous scheduling alike: the step between is already running when they come.
REPORT_AGE_STEPS = 2
# So a request may take this many steps' tokens before it can be evicted from for them.
SCORE_DELAY_STEPS = REPORT_AGE_STEPS + 1


@dataclass(frozen=True, kw_only=True)
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

    @cached_property
    def _absolute(self) -> int | None:
        """The budget where it does not depend on the length."""
        if self.kv_budget_tokens is None:
            return None
        return max(self.policy.floor_tokens, self.kv_budget_tokens)

    @overload
    def tokens(self, num_computed_tokens: int) -> int: ...

    @overload
    def tokens(self, num_computed_tokens: np.ndarray) -> np.ndarray: ...

    def tokens(self, num_computed_tokens: int | np.ndarray) -> int | np.ndarray:
        """The budget at a logical length (or an array of lengths), in tokens."""
        if self._absolute is not None and not isinstance(num_computed_tokens, np.ndarray):
            return self._absolute
        return budget_tokens(
            num_computed_tokens,
            floor_tokens=self.policy.floor_tokens,
            eviction_ratio=self.eviction_ratio,
            kv_budget_tokens=self.kv_budget_tokens,
        )

    def all_tokens(self, lengths: list[int]) -> list[int]:
        """The budgets at several logical lengths."""
        if self._absolute is not None:
            return [self._absolute] * len(lengths)
        return [self.tokens(length) for length in lengths]

    def next_eviction_len(self, num_evicted: int, num_protected: int, now: int) -> int:
        """Smallest logical length >= now at which live >= budget + interval, if none is evicted.

        Protected tokens count neither in the length nor in live.
        """
        gone, interval = num_evicted + num_protected, self.interval_tokens
        if self._absolute is not None:
            return max(now, self._absolute + interval + gone)
        ratio = self.eviction_ratio
        if not ratio:
            return NEVER
        least = self.policy.floor_tokens + interval + num_evicted
        length = max(least, int((num_evicted + interval) / ratio) - 2, now - num_protected)
        while length - num_evicted < self.tokens(length) + interval:
            length += 1
        return length + num_protected


def peak_tokens(
    budget: Budget | None,
    num_tokens: int,
    chunk_tokens: int = 1,
    *,
    under_pressure: bool = False,
    late_tokens: int = 0,
) -> int:
    """Most slots a request of this final length needs at once.

    A decode never holds more than budget + interval tokens, growth included. A prompt is evicted
    between its chunks, so it adds one chunk; chunks are cut to what the pool has room for.

    Args:
        budget: None: the request keeps every token.
        chunk_tokens: the longest chunk while it is evicted from.
        under_pressure: it shrinks whenever it is asked to, so no interval comes on top.
        late_tokens: what it generates before the scores that it is evicted by have come.
    """
    num_tokens = max(1, num_tokens)
    if budget is None:
        return num_tokens
    # Scores are asked for ahead of time, so scored evictions come no later; the odd late one
    # (right after a prompt) lives off the headroom.
    above = 1 if under_pressure else budget.interval_tokens
    peak = int(budget.tokens(num_tokens)) + above
    return min(num_tokens, peak + max(0, chunk_tokens - 1) + late_tokens)


def peak_blocks(
    budget: Budget | None,
    num_tokens: int,
    block_size: int,
    *,
    chunk_tokens: int | None = None,
    under_pressure: bool = False,
    late_tokens: int = 0,
) -> int:
    """`peak_tokens` in blocks; a prompt's chunk is one block there unless it is given."""
    peak = peak_tokens(
        budget, num_tokens, block_size if chunk_tokens is None else chunk_tokens,
        under_pressure=under_pressure, late_tokens=late_tokens,
    )  # fmt: skip
    return cdiv(peak, block_size)

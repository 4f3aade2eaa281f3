"""What an eviction policy is: parameters, and one function from a view of a request to ids.

A policy never sees a block, a slot, torch or vLLM. It is handed a `RequestView` and returns the
logical ids to evict; the backend decides what that does to memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from math import ceil
from typing import ClassVar

import numpy as np

from vtoken.policies.selection import NO_IDS, lowest

__all__ = ["NO_IDS", "Policy", "RequestView", "Rule", "ScoreKind", "budget_tokens", "score_window"]

_SLACK = 1e-9  # keeps the ceiling of 0.3 * 10 from being 4


class ScoreKind(StrEnum):
    """What the one float32 kept per KV slot means; the update rule of the scorer.

    `a` is a slot's attention probability in one step, summed over layers, heads and the step's
    counted queries.
    """

    NONE = "none"
    ACCUMULATED = "accumulated"  # score += a
    LAST = "last"  # score = a of the step's last query alone
    WINDOW = "window"  # a chunk: score = a of its last queries; a decode step: leaky sum
    COUNT_ABOVE_THRESHOLD = "count-above-threshold"  # score += (mean a > 1 / live tokens)
    KEY_NORM = "key-norm"  # L2 norm of the key, summed over layers and heads, set once


class Rule(Enum):
    """How a policy that only ranks its candidates names victims; see `Policy.rule`."""

    OLDEST = "oldest"
    LOWEST_SCORE = "lowest score"
    HIGHEST_SCORE = "highest score"
    RANDOM_DRAW = "random draw"


def score_window(kind: ScoreKind, score_queries: int | str) -> dict[str, object]:
    """Say which queries a policy's scores are made of; for results and summaries.

    Returns:
        `score_kind`, and `prompt_queries`: queries of every prompt chunk that count, "all" or a
        number, 0 where the attention is not looked at. Every decode query counts.
    """
    counted: int | str = score_queries
    if kind in (ScoreKind.NONE, ScoreKind.KEY_NORM):
        counted = 0
    elif kind is ScoreKind.LAST:
        counted = 1
    return {"score_kind": kind.value, "prompt_queries": counted}


class RequestView:
    """One request as a policy sees it at the moment it must evict.

    Attributes:
        num_computed_tokens: L, tokens computed so far (logical, live or not).
        num_prompt_tokens: length of the prompt.
        budget_tokens: live tokens the request should be left with (protected ones not counted).
        num_evict: how many ids to name, so that live tokens come down to the budget.
        protected_tokens: leading ids that nobody may evict (blocks shared with other requests).
        token_ids: int32[>= known tokens] vocabulary ids by logical id, or None when the policy
            did not ask for them. The newest tokens may be missing under async scheduling.
        seed, prompt_hash: what `rng` draws from.

    `live_ids` and `scores` are computed on first use.
    """

    __slots__ = (  # noqa: RUF023 - grouped by meaning
        "num_computed_tokens", "num_prompt_tokens", "budget_tokens", "num_evict",
        "protected_tokens", "token_ids", "seed", "prompt_hash",
        "_live_ids", "_scores",
    )  # fmt: skip

    def __init__(
        self,
        *,
        live_ids: np.ndarray | Callable[[], np.ndarray],
        num_computed_tokens: int,
        num_prompt_tokens: int,
        budget_tokens: int,
        num_evict: int,
        scores: np.ndarray | Callable[[], np.ndarray] | None = None,
        protected_tokens: int = 0,
        token_ids: np.ndarray | None = None,
        seed: int = 0,
        prompt_hash: int = 0,
    ) -> None:
        self.num_computed_tokens = num_computed_tokens
        self.num_prompt_tokens = num_prompt_tokens
        self.budget_tokens = budget_tokens
        self.num_evict = num_evict
        self.protected_tokens = protected_tokens
        self.token_ids = token_ids
        self.seed, self.prompt_hash = seed, prompt_hash
        self._live_ids, self._scores = live_ids, scores

    @property
    def live_ids(self) -> np.ndarray:
        """int32[T], logical ids of all live tokens, ascending."""
        if callable(self._live_ids):
            self._live_ids = self._live_ids()
        return self._live_ids

    @property
    def scores(self) -> np.ndarray | None:
        """float32[T], one per live id; NaN where a token has no score yet. None: no scores."""
        if callable(self._scores):
            self._scores = self._scores()
        return self._scores

    def oldest(self, count: int, first_id: int = 0) -> np.ndarray:
        """int32[<= count], the lowest live ids that are >= first_id and not protected, ascending."""
        ids = self.live_ids
        # Search in the ids' own dtype: a Python int would make searchsorted copy all ids.
        start = int(ids.searchsorted(np.int32(max(first_id, self.protected_tokens))))
        return ids[start : start + max(0, count)]

    def rng(self) -> np.random.Generator:
        """A generator that depends on (seed, prompt, L) alone: two engines draw alike."""
        return np.random.default_rng([self.seed, self.prompt_hash, self.num_computed_tokens])


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Base of all policies. The fields are the parameters.

    A policy that only ranks its candidates names a `rule`; every other one writes `evict`.

    Attributes:
        sink_tokens: the first tokens of a sequence, never evicted.
        recent_tokens: the newest tokens, never evicted. None takes the policy's own rule: one
            block, or a share of the budget where `recent_follows_budget`.
    """

    name: ClassVar[str] = ""
    score_kind: ClassVar[ScoreKind] = ScoreKind.NONE
    rule: ClassVar[Rule | None] = None
    needs_token_ids: ClassVar[bool] = False
    recent_follows_budget: ClassVar[bool] = False

    sink_tokens: int = 4
    recent_tokens: int | None = None
    block_size: int = field(default=16, repr=False)

    @property
    def names_by_rule(self) -> bool:
        """Whether `rule` says it all, so that many requests can be asked about at once."""
        return self.rule is not None and type(self).evict is Policy.evict

    def evict(self, view: RequestView) -> np.ndarray:
        """Name at most `view.num_evict` live ids to drop.

        Returns:
            int32[<= num_evict] logical ids, no id twice, in any order.
        """
        if self.rule is None:
            raise TypeError(f"{type(self).__name__} has neither a rule nor a method `evict`")
        if self.rule in (Rule.LOWEST_SCORE, Rule.HIGHEST_SCORE):
            ids, scores = self.scored_candidates(view)
            keys = scores if self.rule is Rule.LOWEST_SCORE else -scores
            return lowest(ids, keys, view.num_evict)
        low, high = self.candidate_range(view)
        ids = view.live_ids[low:high]
        count = max(0, min(view.num_evict, len(ids)))
        if self.rule is Rule.OLDEST:
            return ids[:count]
        # Ranks of ascending ids are drawn: the draw must not depend on the layout.
        return ids[view.rng().choice(len(ids), size=count, replace=False)] if count else NO_IDS

    def recent(self, budget_tokens: int) -> int:
        """Newest tokens to keep at this budget, in tokens."""
        return self.block_size if self.recent_tokens is None else self.recent_tokens

    @property
    def floor_tokens(self) -> int:
        """The smallest budget that leaves anything to choose: sinks + recent + 1.

        A recent window that follows the budget does not enter: there it is sinks + 1.
        """
        follows = self.recent_follows_budget and self.recent_tokens is None
        return self.sink_tokens + (0 if follows else self.recent(0)) + 1

    def candidates(self, view: RequestView) -> np.ndarray:
        """int32[C], live ids that may be evicted, ascending: no sink, recent or protected one.

        Tokens without a score are left out where the view has scores.
        """
        ids = view.live_ids
        low, high = self.candidate_range(view)
        if view.scores is None:
            return ids[low:high]
        return ids[low:high][~np.isnan(view.scores[low:high])]

    def candidate_bounds(
        self, lengths: Sequence[int], budgets: Sequence[int], protected: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """(first ids, end ids) of half-open ranges between sinks, or protected ids, and window.

        Args:
            lengths, budgets, protected: of each request, in tokens.
        """
        first_ids = [max(self.sink_tokens, n) for n in protected]
        recent = {b: self.recent(b) for b in set(budgets)}  # all the same where it is absolute
        parts = zip(first_ids, lengths, budgets, strict=True)
        return first_ids, [max(first, length - recent[b]) for first, length, b in parts]

    def candidate_range(self, view: RequestView) -> tuple[int, int]:
        """Half-open range of indices into `live_ids` between sinks and recent window."""
        (first,), (end,) = self.candidate_bounds(
            [view.num_computed_tokens], [view.budget_tokens], [view.protected_tokens]
        )
        # In the ids' own dtype: a Python int would make searchsorted copy all ids.
        low, high = view.live_ids.searchsorted(np.array([first, end], np.int32))
        return int(low), int(high)

    def scored_candidates(self, view: RequestView) -> tuple[np.ndarray, np.ndarray]:
        """(int32[C], float32[C]), ids between sinks and recent window, ascending, and their scores.

        A score is NaN where the token has none yet: such a token must not be evicted
        (`selection.lowest` sees to it).
        """
        assert view.scores is not None, f"{self.name} was asked to evict without scores"
        low, high = self.candidate_range(view)
        return view.live_ids[low:high], view.scores[low:high]


def budget_tokens(
    num_computed_tokens: int | np.ndarray,
    *,
    floor_tokens: int,
    eviction_ratio: float | None,
    kv_budget_tokens: int | None,
) -> int | np.ndarray:
    """Live tokens a request of this length may keep.

    `max(floor, ceil((1 - ratio) * L))` with L the tokens computed so far, or the absolute budget.
    Works elementwise on an array of lengths.
    """
    if not isinstance(num_computed_tokens, np.ndarray):
        if kv_budget_tokens is not None:
            return max(floor_tokens, kv_budget_tokens)
        assert eviction_ratio is not None
        return max(floor_tokens, ceil((1.0 - eviction_ratio) * num_computed_tokens - _SLACK))
    if kv_budget_tokens is not None:
        kept = kv_budget_tokens + 0 * num_computed_tokens
    else:
        assert eviction_ratio is not None
        kept = np.ceil((1.0 - eviction_ratio) * num_computed_tokens - _SLACK)
    return np.maximum(floor_tokens, kept).astype(np.int64)

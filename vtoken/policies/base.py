"""What an eviction policy is: parameters, and one function from a view of a request to ids.

A policy never sees a block, a slot, torch or vLLM. It is handed a `RequestView` and returns the
logical ids to evict; the backend decides what that does to memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil
from typing import ClassVar, Protocol

import numpy as np

from vtoken.policies.selection import NO_IDS, lowest, lowest_indices

__all__ = [
    "NO_IDS", "BatchView", "Policy", "RankedIds", "RequestView", "ScoreKind", "budget_tokens",
]  # fmt: skip

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


class RankedIds(Protocol):
    """The live ids of a request, counted from the lowest."""

    def count_below(self, first_id: int) -> int:
        """Live ids < first_id."""

    def at(self, ranks: np.ndarray) -> np.ndarray:
        """int32[K], the live ids with these ranks."""


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

    `live_ids` and `scores` are computed on first use, so that a policy which needs neither
    (streaming) costs O(evicted) and not O(context). `lowest_scored` ranks without them where the
    backend gives `scores_by_id`, float32 by logical id, NaN where there is none, and `all_live`,
    which says whether ids are all live: a dead one may still have a score.
    """

    __slots__ = (  # noqa: RUF023 - grouped by meaning
        "num_computed_tokens", "num_prompt_tokens", "budget_tokens", "num_evict",
        "protected_tokens", "token_ids", "seed", "prompt_hash",
        "_live_ids", "_scores", "_oldest", "_scores_by_id", "_all_live",
        "_ranked",
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
        oldest: Callable[[int, int], np.ndarray] | None = None,
        scores_by_id: np.ndarray | None = None,
        all_live: Callable[[np.ndarray], bool] | None = None,
        ranked: Callable[[], RankedIds] | None = None,
    ) -> None:
        self.num_computed_tokens = num_computed_tokens
        self.num_prompt_tokens = num_prompt_tokens
        self.budget_tokens = budget_tokens
        self.num_evict = num_evict
        self.protected_tokens = protected_tokens
        self.token_ids = token_ids
        self.seed, self.prompt_hash = seed, prompt_hash
        self._live_ids, self._scores, self._oldest = live_ids, scores, oldest
        self._scores_by_id, self._all_live = scores_by_id, all_live
        self._ranked = ranked

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
        """int32[<= count], the lowest live ids that are >= first_id, ascending."""
        if self._oldest is not None:
            return self._oldest(count, first_id)
        ids = self.live_ids
        # Search in the ids' own dtype: a Python int would make searchsorted copy all ids.
        start = int(ids.searchsorted(np.int32(first_id)))
        return ids[start : start + max(0, count)]

    def ranked(self) -> RankedIds | None:
        """Live ids by rank, without a pass over them; None where `live_ids` is all there is."""
        return None if self._ranked is None else self._ranked()

    def lowest_scored(self, first_id: int, end_id: int, sign: int = 1) -> np.ndarray | None:
        """int32, the `num_evict` ids of first_id .. end_id - 1 with the lowest `sign` * score.

        Among equal scores the lower id goes first; ids without a score are never named. None
        where that takes `live_ids` and `scores`.
        """
        if self._scores_by_id is None:
            return None
        keys = self._scores_by_id[first_id:end_id]
        ids = lowest_indices(keys if sign > 0 else -keys, self.num_evict) + first_id
        # Had dead ids no score, the same ones would be named, if none of these is dead.
        return ids.astype(np.int32) if self._all_live(ids) else None

    def rng(self) -> np.random.Generator:
        """A generator that depends on (seed, prompt, L) alone: two engines draw alike."""
        return np.random.default_rng([self.seed, self.prompt_hash, self.num_computed_tokens])


@dataclass(slots=True)
class BatchView:
    """Several requests with one policy, as `Policy.evict_many` sees them; no id is protected.

    Attributes:
        num_computed_tokens, budget_tokens, num_evict: E numbers each, as in RequestView.
        oldest: gives (ids int64[K], counts) for (counts, first ids, end ids): each request's
            lowest live ids of a half-open range, as many as there are, one request after the
            other.
        lowest_scored: gives the same for (first ids, end ids, sign): the `num_evict` live ids of
            each range with the lowest `sign` * score, as `Policy.lowest_scored`; ascending by
            request. None without scores.
        count_below: gives E numbers, of live ids below E bounds.
        at_ranks: gives int64[K], ascending by request, for (ranks int64[K], counts): the live ids
            with these ranks; 0 is the lowest.
        draw: gives int64[K] for (numbers of candidates, counts): counts[e] different numbers
            below the e-th, drawn as `RequestView.rng` draws for the same request.
    """

    num_computed_tokens: list[int]
    budget_tokens: list[int]
    num_evict: list[int]
    oldest: Callable[[list[int], list[int], list[int]], tuple[np.ndarray, list[int]]]
    lowest_scored: Callable[[list[int], list[int], int], tuple] | None = None
    count_below: Callable[[list[int]], list[int]] | None = None
    at_ranks: Callable[[np.ndarray, list[int]], np.ndarray] | None = None
    draw: Callable[[list[int], list[int]], np.ndarray] | None = None


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """Base of all policies. The fields are the parameters; `evict` is the one method to write.

    Attributes:
        sink_tokens: the first tokens of a sequence, never evicted.
        recent_tokens: the newest tokens, never evicted. None takes the policy's own rule: one
            block, or a share of the budget where `recent_follows_budget`.
    """

    name: ClassVar[str] = ""
    score_kind: ClassVar[ScoreKind] = ScoreKind.NONE
    needs_token_ids: ClassVar[bool] = False
    recent_follows_budget: ClassVar[bool] = False

    sink_tokens: int = 4
    recent_tokens: int | None = None
    block_size: int = field(default=16, repr=False)

    # A policy may also have evict_many(BatchView) -> (ids, counts), which names for every request
    # exactly what `evict` names, ascending, with a fixed number of numpy calls.
    evict_many: ClassVar[Callable | None] = None

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        if "evict" in vars(cls) and "evict_many" not in vars(cls):
            cls.evict_many = None  # an inherited one would name other ids

    @abstractmethod
    def evict(self, view: RequestView) -> np.ndarray:
        """Name at most `view.num_evict` live ids to drop.

        Returns:
            int32[<= num_evict] logical ids, no id twice, in any order.
        """

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

    def candidate_bounds(self, view: RequestView) -> tuple[int, int]:
        """Half-open range of ids between sinks, or protected ids, and recent window."""
        first = max(self.sink_tokens, view.protected_tokens)
        end = view.num_computed_tokens - self.recent(view.budget_tokens)
        return first, max(first, end)

    def candidate_bounds_many(self, view: BatchView) -> tuple[list[int], list[int]]:
        """`candidate_bounds` of several requests."""
        first, budgets = self.sink_tokens, view.budget_tokens
        recent = {b: self.recent(b) for b in set(budgets)}  # all the same where it is absolute
        lengths = zip(view.num_computed_tokens, budgets, strict=True)
        return [first] * len(budgets), [max(first, length - recent[b]) for length, b in lengths]

    def candidate_range(self, view: RequestView) -> tuple[int, int]:
        """Half-open range of indices into `live_ids` between sinks and recent window."""
        bounds = np.array(self.candidate_bounds(view), np.int32)
        low, high = view.live_ids.searchsorted(bounds)
        return int(low), int(high)

    def lowest_scored(self, view: RequestView, sign: int = 1) -> np.ndarray:
        """int32[<= num_evict], the candidates with the lowest `sign` * score, ascending.

        Among equal scores the lower id goes first; ids without a score are never named.
        """
        found = view.lowest_scored(*self.candidate_bounds(view), sign)
        if found is not None:
            return found
        ids, scores = self.scored_candidates(view)
        return lowest(ids, sign * scores, view.num_evict)

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
        return max(floor_tokens, ceil((1.0 - eviction_ratio) * num_computed_tokens - _SLACK))
    if kv_budget_tokens is not None:
        kept = kv_budget_tokens + 0 * num_computed_tokens
    else:
        kept = np.ceil((1.0 - eviction_ratio) * num_computed_tokens - _SLACK)
    return np.maximum(floor_tokens, kept).astype(np.int64)

"""`check_policy` finds every way to break the contract, and says which it was."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest

from vtoken.policies import Policy, RequestView, ScoreKind, lowest
from vtoken.policies.h2o import H2O
from vtoken.policies.random import Random
from vtoken.testing import check_policy


@dataclass(frozen=True, kw_only=True)
class Good(Policy):
    name: ClassVar[str] = "good"

    def evict(self, view: RequestView) -> np.ndarray:
        return self.candidates(view)[: view.num_evict]


class TouchesSinks(Good):
    def evict(self, view):
        low = view.oldest(1, view.protected_tokens)
        return low[: view.num_evict]


class TouchesRecent(Good):
    def evict(self, view):
        first = max(self.sink_tokens, view.protected_tokens)
        ids = view.live_ids[view.live_ids >= first]
        return ids[max(0, len(ids) - view.num_evict) :]


class TouchesProtected(Good):
    def evict(self, view):
        ids = view.live_ids
        able = ids[(ids >= self.sink_tokens) & (ids < view.num_computed_tokens - self.recent(0))]
        return able[: view.num_evict]


class InventsIds(Good):
    def evict(self, view):
        first = max(self.sink_tokens, view.protected_tokens)
        last = view.num_computed_tokens - self.recent(view.budget_tokens)
        return np.arange(first, max(first, last))[: view.num_evict]


class Repeats(Good):
    def evict(self, view):
        return np.repeat(super().evict(view), 2)[: view.num_evict]


class TakesTooMany(Good):
    def evict(self, view):
        return self.candidates(view)


class TakesTooFew(Good):
    def evict(self, view):
        return super().evict(view)[1:]


class Crashes(Good):
    def evict(self, view):
        return np.array([self.candidates(view)[0]])[: view.num_evict]


class ReturnsAList(Good):
    def evict(self, view):
        return list(super().evict(view))


class ReturnsFloats(Good):
    def evict(self, view):
        return super().evict(view).astype(np.float64)


class DrawsGlobally(Good):
    def evict(self, view):
        ids = self.candidates(view)
        return np.random.permutation(ids)[: view.num_evict]


class DrawsUnseeded(Good):
    def evict(self, view):
        ids = self.candidates(view)
        return np.random.default_rng().permutation(ids)[: view.num_evict]


@dataclass(frozen=True, kw_only=True)
class Remembers(Good):
    calls: list = field(default_factory=list, compare=False)

    def evict(self, view):
        self.calls.append(1)
        return np.roll(self.candidates(view), len(self.calls))[: view.num_evict]


class SortsItsView(Good):
    def evict(self, view):
        ids = super().evict(view).copy()
        view.live_ids[::-1].sort()
        return ids


class MovesTheBudget(Good):
    def evict(self, view):
        ids = super().evict(view)
        view.num_evict = 0
        return ids


class IgnoresMissingScores(H2O):
    def evict(self, view):
        low, high = self.candidate_range(view)
        return lowest(view.live_ids[low:high], np.nan_to_num(view.scores[low:high]), view.num_evict)


class ZeroesScores(H2O):
    def evict(self, view):
        victims = super().evict(view)
        view.scores[:] = 0
        return victims


class WindowEatsTheBudget(Good):
    recent_follows_budget: ClassVar[bool] = True

    def recent(self, budget_tokens):
        return budget_tokens


class Nameless(Good):
    name: ClassVar[str] = ""


class WithoutKind(Good):
    score_kind: ClassVar[str] = "accumulated"


@dataclass(frozen=True, kw_only=True)
class NeedsAParameter(Good):
    stride_tokens: int


BREACHES = [
    (TouchesSinks, "good evicts sinks, ids below 4"),
    (TouchesRecent, "good evicts ids of the recent window of"),
    (TouchesProtected, "good evicts protected ids of blocks shared"),
    (InventsIds, "good evicts ids that are not live"),
    (Repeats, "good evicts an id twice"),
    (TakesTooMany, "more than num_evict"),
    (TakesTooFew, "could go, so the request stays above its budget"),
    (Crashes, "good raises IndexError"),
    (ReturnsAList, "good returns list, not a numpy array"),
    (ReturnsFloats, "array of float64, not of whole numbers"),
    (DrawsGlobally, "names other ids when asked again"),
    (DrawsUnseeded, "names other ids when asked again"),
    (Remembers, "names other ids when asked again"),
    (SortsItsView, "good changes its view's live_ids"),
    (MovesTheBudget, "good changes its view's num_evict"),
    (IgnoresMissingScores, "h2o evicts ids that have no score yet"),
    (ZeroesScores, "h2o changes its view's scores"),
    (WindowEatsTheBudget, "the budget cannot be met"),
    (Nameless, "Nameless has no name"),
    (WithoutKind, "score_kind is no ScoreKind"),
    (NeedsAParameter, "every parameter needs a default"),
    (dict, "dict is not a subclass of Policy"),
]


def test_a_good_policy_passes():
    check_policy(Good, cases=30)
    check_policy(Good(sink_tokens=1, recent_tokens=3), cases=30)
    check_policy(Random, cases=30)


@pytest.mark.parametrize(("broken", "sentence"), BREACHES, ids=lambda b: getattr(b, "__name__", ""))
def test_a_broken_policy_is_caught(broken, sentence):
    with pytest.raises(AssertionError, match=sentence):
        check_policy(broken)


def test_breaches_are_found_in_an_instance_and_name_the_request():
    with pytest.raises(AssertionError, match=r"in a request of \d+ computed tokens"):
        check_policy(TakesTooMany(sink_tokens=0))


def test_fewer_ids_can_be_allowed():
    check_policy(TakesTooFew, allow_fewer=True)


def test_the_global_generators_are_left_as_they_were():
    np.random.seed(5)
    before = np.random.get_state()[1].copy()
    check_policy(Good(), cases=3)
    assert np.array_equal(before, np.random.get_state()[1])


def test_scored_policies_are_given_scores_and_others_none():
    seen = set()

    class Looks(Good):
        def evict(self, view):
            seen.add(view.scores is None)
            return super().evict(view)

    check_policy(Looks(), cases=3)
    assert seen == {True}
    seen.clear()

    class LooksScored(Looks):
        score_kind: ClassVar[ScoreKind] = ScoreKind.LAST

    check_policy(LooksScored(), cases=3)
    assert seen == {False}

"""Which ids a request loses, once it is said how many: the policies' rules on many tables at once,
their own code on a view of one request. Nothing changes here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import cast

import numpy as np

from vtoken.core.budget import REPORT_AGE_STEPS, Budget
from vtoken.core.counters import Counters
from vtoken.core.ops import Draw, ScoredIds, TableOps
from vtoken.core.scalar_ops import scores_by_id
from vtoken.core.table import NO_SLOTS, RequestTable
from vtoken.policies.base import RequestView, Rule
from vtoken.scheduling.clock import StepClock
from vtoken.scheduling.reports import ReportBook
from vtoken.scheduling.requests import BudgetedRequest, RunningRequest

logger = logging.getLogger("vllm.vtoken")


@dataclass(slots=True)
class Victims:
    """Ids that requests lose: `ids` int64[K] ascending by request, ragged with `counts`, none 0."""

    states: Sequence[RunningRequest] = field(default_factory=list)
    ids: np.ndarray = field(default_factory=lambda: NO_SLOTS)
    counts: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.states)

    def parts(self) -> list[tuple[RunningRequest, np.ndarray]]:
        """(request, its ids) one by one."""
        ids = np.split(self.ids, np.cumsum(self.counts)[:-1]) if self.states else []
        return list(zip(self.states, ids, strict=True))

    @classmethod
    def of(cls, parts: Sequence[tuple[RunningRequest, np.ndarray]]) -> Victims:
        """Put requests with their ids together; those that lose none are left out."""
        parts = [(state, ids) for state, ids in parts if len(ids)]
        if not parts:
            return cls()
        return cls([s for s, _ in parts], np.concatenate([i for _, i in parts]),
                   [len(i) for _, i in parts])  # fmt: skip

    def __add__(self, other: Victims) -> Victims:
        if not (self and other):
            return self or other
        ids = np.concatenate([self.ids, other.ids])
        return Victims([*self.states, *other.states], ids, self.counts + other.counts)


@dataclass(slots=True)
class Asked:
    """Requests that are to lose tokens.

    Attributes:
        num_evict: how many each loses, at most.
        protected_ids: by request, int32 ascending, live ids in shared blocks, or None; None where
            no block is shared at all.
    """

    states: list[BudgetedRequest] = field(default_factory=list)
    num_evict: list[int] = field(default_factory=list)
    protected_ids: list[np.ndarray | None] | None = None

    def only(self, stays: list[bool]) -> Asked:
        protected_ids = self.protected_ids
        if protected_ids is not None:
            protected_ids = list(compress(protected_ids, stays))
        states = list(compress(self.states, stays))
        return Asked(states, list(compress(self.num_evict, stays)), protected_ids)


class VictimNamer:
    """Asks policies, with the scores that their decisions of this step use."""

    def __init__(
        self, ops: TableOps, reports: ReportBook, clock: StepClock, counters: Counters, seed: int
    ) -> None:
        self.ops, self.reports, self.clock = ops, reports, clock
        self.counters, self.seed = counters, seed
        self._told: set[str] = set()  # policies whose wrong answers were logged

    def report_step(self, state: RunningRequest) -> int:
        """The step whose scores a decision of this step uses.

        A prompt whose chunk was deferred for lack of room has no scores of that step; its last
        chunk's are as good, for nothing attended since.
        """
        step, last = self.clock.seq - REPORT_AGE_STEPS, state.last_chunk_step
        return min(step, last) if state.request.is_prefill_chunk and last >= 0 else step

    def name(self, asked: Asked) -> Victims:
        """Let policies name victims, with the scores they need; tables are in step.

        A request whose scores are not there (not asked for in time: a sharer may just have left)
        loses nothing, and stays due.
        """
        scored: list[ScoredIds | None] | None = None
        if True in [s.needs_scores for s in asked.states]:  # lists: `any` calls a generator
            scored = [self._scores(s) if s.needs_scores else None for s in asked.states]
            here = [
                p is not None or not s.needs_scores
                for s, p in zip(asked.states, scored, strict=True)
            ]
            if not all(here):
                asked, scored = asked.only(here), list(compress(scored, here))
        if not asked.states:
            return Victims()
        budget = asked.states[0].budget
        if (
            asked.protected_ids is None
            and budget.policy.names_by_rule
            and len({id(s.budget) for s in asked.states}) == 1
        ):
            return self._by_rule(asked, [0] * len(asked.states), scored)
        return self._by_rule_or_policy(asked, scored or [None] * len(asked.states))

    def _scores(self, state: RunningRequest) -> ScoredIds | None:
        scored = self.reports.scored_ids(state.req_id, self.report_step(state))
        if scored is None:
            state.next_eviction_len = state.request.num_computed_tokens
        return scored

    def _by_rule_or_policy(self, asked: Asked, scored: list[ScoredIds | None]) -> Victims:
        """`name` for requests with several budgets, shared blocks, or policies of their own kind."""
        victims = Victims()
        by_budget: dict[int, list[tuple[int, int]]] = {}  # (e, protected tokens)
        protected_ids = asked.protected_ids or [None] * len(asked.states)
        for e, state in enumerate(asked.states):
            num_protected = _leading_run(protected_ids[e])
            if num_protected is None or not state.budget.policy.names_by_rule:
                ids = self._ask_policy(state, asked.num_evict[e], protected_ids[e], scored[e])
                victims += Victims.of([(state, ids)])
            else:
                by_budget.setdefault(id(state.budget), []).append((e, num_protected))
        for group in by_budget.values():
            part = Asked(
                [asked.states[e] for e, _ in group], [asked.num_evict[e] for e, _ in group]
            )
            protected = [n for _, n in group]
            victims += self._by_rule(part, protected, [scored[e] for e, _ in group])
        return victims

    def _by_rule(
        self, asked: Asked, protected: list[int], scored: list[ScoredIds | None] | None
    ) -> Victims:
        """Name the victims of requests with one budget by their policy's rule."""
        states, counts = asked.states, asked.num_evict
        budget, policy = states[0].budget, states[0].budget.policy
        lengths = [s.request.num_computed_tokens for s in states]
        budgets = budget.all_tokens(
            [n - s.num_protected for n, s in zip(lengths, states, strict=True)]
        )
        first_ids, end_ids = policy.candidate_bounds(lengths, budgets, protected)
        tables = [s.table for s in states]
        if policy.rule is Rule.OLDEST:
            ids, found = self.ops.oldest(tables, first_ids, end_ids, counts)
        elif policy.rule is Rule.RANDOM_DRAW:
            seeds = [(self.seed, s.prompt_hash, n) for s, n in zip(states, lengths, strict=True)]
            ids, found = draw_ids(self.ops, tables, first_ids, end_ids, counts, seeds)
        else:
            scores = cast(list[ScoredIds], scored)  # `name` leaves out those without
            sign = 1 if policy.rule is Rule.LOWEST_SCORE else -1
            ids, found = self.ops.lowest_scored(tables, scores, first_ids, end_ids, counts, sign)
        if 0 in found:
            states, found = list(compress(states, found)), [n for n in found if n]
        return Victims(states, ids, found)

    def _ask_policy(
        self,
        state: BudgetedRequest,
        num_evict: int,
        protected_ids: np.ndarray | None,
        scored: ScoredIds | None,
    ) -> np.ndarray:
        """int32 ascending, what a policy's own `evict` names."""
        policy = state.budget.policy
        view = request_view(
            state.table, state.budget, num_evict, protected_ids,
            None if scored is None else scores_by_id(state.table, scored),
            num_prompt_tokens=state.request.num_prompt_tokens, num_protected=state.num_protected,
            seed=self.seed, prompt_hash=state.prompt_hash,
        )  # fmt: skip
        if policy.needs_token_ids:
            view.token_ids = np.asarray(state.request.all_token_ids, np.int32)
        try:
            ids = np.sort(np.asarray(policy.evict(view), np.int32).reshape(-1))
            fault = answer_fault(ids, num_evict, state.table, protected_ids)
        except Exception as error:  # noqa: BLE001 - a user's code must not end the engine
            ids, fault = NO_SLOTS, f"raises {type(error).__name__}: {error}"
        if fault is None:
            return ids
        self.counters.wrong_victims += 1
        if policy.name not in self._told:
            self._told.add(policy.name)
            logger.error(
                "Policy %s %s (request %s): the oldest tokens go instead. Said once; "
                "`python -m vtoken.testing.policies %s` shows more",
                policy.name, fault, state.req_id, policy.name,
            )  # fmt: skip
        low, high = policy.candidate_range(view)
        return view.live_ids[low:high][:num_evict]


def answer_fault(
    ids: np.ndarray, num_evict: int, table: RequestTable, protected_ids: np.ndarray | None
) -> str | None:
    """What is wrong with a policy's answer; None where it may be carried out. O(ids).

    Args:
        ids: int32 ascending, what it named.
        protected_ids: int32 ascending, live ids in shared blocks, or None.
    """
    if len(ids) > num_evict:
        return f"names {len(ids)} ids where {num_evict} may go"
    if not len(ids):
        return None
    if ids[0] < 0 or ids[-1] >= table.num_computed_tokens:
        return "names an id that the request does not have"
    if not (ids[1:] > ids[:-1]).all():
        return "names an id twice"
    if not (table.index_of[ids] >= 0).all():
        return "names an id that is not live"
    if protected_ids is not None and len(protected_ids):
        at = protected_ids.searchsorted(ids).clip(max=len(protected_ids) - 1)
        if (protected_ids[at] == ids).any():
            return "names an id in a block that other requests share"
    return None


def draw_ids(
    ops: TableOps,
    tables: list[RequestTable],
    first_ids: list[int],
    end_ids: list[int],
    counts: list[int],
    seeds: list[tuple[int, int, int]],
) -> tuple[np.ndarray, list[int]]:
    """Draw live ids of half-open ranges, as `Rule.RANDOM_DRAW` does; returns as `TableOps.oldest`.

    Args:
        seeds: what each request's generator depends on, as in `RequestView.rng`.
    """
    below, end = ops.count_below(tables, first_ids), ops.count_below(tables, end_ids)
    sizes = [e - b for b, e in zip(below, end, strict=True)]
    counts = [max(0, min(n, size)) for n, size in zip(counts, sizes, strict=True)]
    ranks = ops.draw([Draw(*d) for d in zip(seeds, sizes, counts, strict=True)])
    return ops.at_ranks(tables, ranks + np.repeat(below, counts), counts), counts


def request_view(
    table: RequestTable,
    budget: Budget,
    num_evict: int,
    protected_ids: np.ndarray | None,
    scores: np.ndarray | None,
    *,
    num_prompt_tokens: int,
    num_protected: int,
    seed: int,
    prompt_hash: int,
) -> RequestView:
    """What a policy sees of a request.

    Args:
        protected_ids: int32 ascending, live ids in shared blocks, or None.
        scores: float32[num_computed_tokens] by logical id, NaN where there is none.
    """
    length = table.num_computed_tokens

    def live_ids() -> np.ndarray:
        ids = table.live_ids()
        return ids if protected_ids is None else np.setdiff1d(ids, protected_ids, True)

    view = RequestView(
        live_ids=live_ids,
        num_computed_tokens=length,
        num_prompt_tokens=num_prompt_tokens,
        budget_tokens=budget.tokens(length - num_protected),
        num_evict=num_evict,
        protected_tokens=_leading_run(protected_ids) or 0,
        seed=seed,
        prompt_hash=prompt_hash,
        scores=None if scores is None else lambda: scores[view.live_ids],
    )
    return view


def _leading_run(protected_ids: np.ndarray | None) -> int | None:
    """How many ids from 0 on are protected; None where others further on are too."""
    if protected_ids is None or not len(protected_ids):
        return 0
    is_run = int(protected_ids[-1]) == len(protected_ids) - 1
    return len(protected_ids) if is_run else None

"""Which ids a request loses: the policies' rules on many tables at once, their own code on a view.

Nothing changes here but what is planned for the step: victims wait in `Selector.waiting` for
slots to be allocated, or come back to the caller that evicts them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import cast

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.core.budget import REPORT_AGE_STEPS, Budget
from vtoken.core.counters import Counters
from vtoken.core.ops import Draw, ScoredIds, TableOps
from vtoken.core.reclaim import most_moves
from vtoken.core.scalar_ops import scores_by_id
from vtoken.core.table import NO_SLOTS, RequestTable
from vtoken.policies.base import RequestView, Rule
from vtoken.recording.run_log import RunLog
from vtoken.scheduling.clock import StepClock
from vtoken.scheduling.due import DueRequests
from vtoken.scheduling.move_limit import MoveLimit
from vtoken.scheduling.ports import Pool, Scheduler
from vtoken.scheduling.prefix import CopyOutcome, PrefixBlocks
from vtoken.scheduling.reports import ReportBook
from vtoken.scheduling.requests import BudgetedRequest, RunningRequest, RunningRequests


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


class Selector:
    """Names victims.

    Attributes:
        waiting: victims of this step, by request, that go when its slots are allocated.
        deferred: victims that a request would lose in this step but for `max_moves_per_step`.
    """

    def __init__(
        self,
        config: VTokenConfig,
        requests: RunningRequests,
        ops: TableOps,
        reports: ReportBook,
        prefix: PrefixBlocks,
        due: DueRequests,
        clock: StepClock,
        pool: Pool,
        scheduler: Scheduler,
        log: RunLog | None,
        counters: Counters,
    ) -> None:
        self.config, self.requests, self.ops = config, requests, ops
        self.reports, self.prefix, self.due, self.clock = reports, prefix, due, clock
        self.pool, self.scheduler, self.log, self.counters = pool, scheduler, log, counters
        self.waiting: dict[str, np.ndarray] = {}
        self.deferred: dict[str, np.ndarray] = {}
        self._is_plain = log is None and not prefix.caching
        self._low_blocks = int(config.low_watermark_frac * (pool.num_gpu_blocks - 1))
        replays = log is not None and log.replay is not None
        self._limit: MoveLimit | None = None
        if config.max_moves_per_step is not None and config.mode == "vtoken" and not replays:
            self._limit = MoveLimit(config.max_moves_per_step)

    def begin_step(self) -> None:
        self.waiting.clear()
        self.deferred.clear()

    def forget(self, req_id: str) -> None:
        """A request is gone."""
        self.waiting.pop(req_id, None)
        self.deferred.pop(req_id, None)

    def num_waiting(self, req_id: str) -> int:
        """Tokens that a request loses when its slots are allocated in this step."""
        victims = self.waiting.get(req_id)
        return 0 if victims is None else len(victims)

    # ---- what is due -----------------------------------------------------------------------

    def victims_of_due(self, found: list[RunningRequest]) -> Victims:
        """Victims of requests that are due: those that go at once; the others are in `waiting`.

        A decoding request's go at once, in all modes: whether the step then reaches the request,
        or its token budget is used up before, makes no difference to what is evicted. What becomes
        of holes that may stay depends on the room there is when slots are allocated.
        """
        # Each one with a budget is a BudgetedRequest; `isinstance` would cost a call for each.
        due = cast(list[BudgetedRequest], [s for s in found if s.budget is not None])
        if not due:
            return Victims()
        self.requests.sync(due)
        if self._is_plain:
            victims = self.name(self._above_budget(due))
        else:
            victims = self._victims_one_by_one(due)
        if self._limit is not None:
            victims = self._within_limit(victims, self._limit)
        return self._at_once(victims)

    def _above_budget(self, due: list[BudgetedRequest]) -> Asked:
        """Requests that are above their budgets by an interval, and by how much."""
        asked = Asked()
        for state in due:
            length = state.request.num_computed_tokens
            protected = state.num_protected
            budget = state.budget.tokens(length - protected)
            num_evict = state.table.num_live_tokens - protected - budget  # the table is in step
            if num_evict >= state.budget.interval_tokens and self.due.by_length:
                asked.states.append(state)
                asked.num_evict.append(num_evict)
            else:
                self.due.schedule_next(state, length)
        return asked

    def _victims_one_by_one(self, due: list[BudgetedRequest]) -> Victims:
        """Victims where blocks may be shared, or decisions are recorded or replayed."""
        named: list[tuple[RunningRequest, np.ndarray]] = []
        protected: list[np.ndarray | None] = []
        asked = Asked(protected_ids=protected)
        for state in due:
            protected_ids = self.prefix.protect(state)
            ids = self._replayed(state, protected_ids)
            if ids is not None:
                named.append((state, ids))
            elif self.prefix.wants_copy(state.blocks):
                named.append((state, self._with_copies(state, protected_ids)))
            else:
                above = self._above_budget([state])
                asked.states += above.states
                asked.num_evict += above.num_evict
                protected += [protected_ids] * len(above.states)
        return Victims.of(named) + self.name(asked)

    def _at_once(self, victims: Victims) -> Victims:
        """Keep back what goes when slots are allocated."""
        at_once = self.config.fragmentation_threshold == 0.0
        if at_once and all(s.num_pending_tokens <= 1 for s in victims.states):
            return victims
        now = []
        for state, ids in victims.parts():
            if at_once and self.num_expected_tokens(state) == 1:
                now.append((state, ids))
            else:
                self.waiting[state.req_id] = ids
        return Victims.of(now)

    def num_expected_tokens(self, state: RunningRequest) -> int:
        """New tokens a running request will be given in this step, if there is room."""
        return min(max(1, state.num_pending_tokens), self.scheduler.max_num_scheduled_tokens)

    def _replayed(
        self, state: RunningRequest, protected_ids: np.ndarray | None
    ) -> np.ndarray | None:
        """What the replayed run evicted at this length; None where nothing is replayed."""
        req_id, length = state.req_id, state.request.num_computed_tokens
        if self.log is None or (due := self.log.next_length(req_id, length)) is None:
            return None
        state.next_eviction_len = due
        if due != length:
            return NO_SLOTS
        live = state.table.live_ids()
        evictable = live if protected_ids is None else np.setdiff1d(live, protected_ids, True)
        return self.log.victims(req_id, length, evictable)

    def _with_copies(self, state: BudgetedRequest, protected_ids: np.ndarray | None) -> np.ndarray:
        """Victims of a request whose survivors are copied out of shared blocks where that pays.

        First with nothing protected; where the shared blocks would take more than they release,
        they are protected, and only cached blocks of the request's own are copied out of.
        """
        num_protected = state.num_protected
        attempts = (True,) if self.prefix.was_declined(state) else (False, True)
        length = state.request.num_computed_tokens
        for keep_shared in attempts:
            state.num_protected = num_protected if keep_shared else 0
            num_evict = state.num_above_budget(length)
            if num_evict < state.budget.interval_tokens:
                continue
            keep_ids = protected_ids if keep_shared else None
            victims = self.name(Asked([state], [num_evict], [keep_ids]))
            if not victims:
                return NO_SLOTS
            outcome = self.prefix.plan_copy(state, victims.ids, self.num_expected_tokens(state))
            self.counters.copies += outcome is CopyOutcome.COPIES
            self.counters.copies_declined += outcome is CopyOutcome.DECLINED
            if keep_shared or outcome is not CopyOutcome.DECLINED:
                return victims.ids
        self.due.schedule_next(state, length)
        return NO_SLOTS

    # ---- the limit on moves ----------------------------------------------------------------

    def _within_limit(self, victims: Victims, limit: MoveLimit) -> Victims:
        """Defer evictions that would move too many tokens in this step."""
        limit.begin_step()
        ahead = []
        parts = sorted(victims.parts(), key=lambda part: len(part[1]), reverse=True)
        for state, ids in parts:  # what has waited longest goes first
            pinned = self.prefix.shared(state.blocks)
            num_moves = most_moves(
                state.table, ids, self.num_expected_tokens(state), pinned,
                self.config.fragmentation_threshold,
            )  # fmt: skip
            room = self.pool.get_num_free_blocks() - len(self.scheduler.running)
            has_copies = state.req_id in self.prefix.copies
            if has_copies or limit.take(num_moves, is_needed=room < self._low_blocks):
                ahead.append((state, ids))
            else:
                self.deferred[state.req_id] = ids
        return Victims.of(ahead)

    # ---- naming ----------------------------------------------------------------------------

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
            seeds = [
                (self.config.seed, s.prompt_hash, n) for s, n in zip(states, lengths, strict=True)
            ]
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
            seed=self.config.seed, prompt_hash=state.prompt_hash,
        )  # fmt: skip
        if policy.needs_token_ids:
            view.token_ids = np.asarray(state.request.all_token_ids, np.int32)
        victims = np.asarray(policy.evict(view), np.int32)
        assert len(victims) <= num_evict, (policy.name, len(victims), num_evict)
        return np.sort(victims)


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

"""What requests that are due lose in a step: how many tokens, and when they go.

Nothing changes here but what is planned for the step: victims wait in `Selector.waiting` for
slots to be allocated, or come back to the caller that evicts them at once. `naming` has the ids.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.core.counters import Counters
from vtoken.core.reclaim import most_moves
from vtoken.core.table import NO_SLOTS
from vtoken.recording.run_log import RunLog
from vtoken.scheduling.due import DueRequests
from vtoken.scheduling.move_limit import MoveLimit
from vtoken.scheduling.naming import Asked, VictimNamer, Victims
from vtoken.scheduling.ports import Pool, Scheduler
from vtoken.scheduling.prefix import CopyOutcome, PrefixBlocks
from vtoken.scheduling.requests import BudgetedRequest, RunningRequest, RunningRequests


class Selector:
    """Says what requests that are due lose.

    Attributes:
        waiting: victims of this step, by request, that go when its slots are allocated.
        deferred: victims that a request would lose in this step but for `max_moves_per_step`.
    """

    def __init__(
        self,
        config: VTokenConfig,
        requests: RunningRequests,
        namer: VictimNamer,
        prefix: PrefixBlocks,
        due: DueRequests,
        pool: Pool,
        scheduler: Scheduler,
        log: RunLog | None,
        counters: Counters,
    ) -> None:
        self.config, self.requests, self.namer = config, requests, namer
        self.prefix, self.due = prefix, due
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
            victims = self.namer.name(self._above_budget(due))
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
        return Victims.of(named) + self.namer.name(asked)

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
            victims = self.namer.name(Asked([state], [num_evict], [keep_ids]))
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

"""Who is due at the head of a step, and which ids go: vLLM's requests meet the policies.

No table or block changes here, only plans and when a request is looked at next; `SchedulerHooks`
carries the plans out. Requests that can go through the step together are
`vtoken.vllm_plugin.together`'s.
"""

from __future__ import annotations

import numpy as np
from vllm.v1.request import RequestStatus

from vtoken.core.budget import NEVER
from vtoken.core.move_limit import MoveLimit, most_moves
from vtoken.policies.base import ScoreKind
from vtoken.vllm_plugin.running import Running


class VictimChooser:
    """Part of SchedulerHooks; see the module's head.

    Attributes:
        joins: whether evictions of several requests may be carried out together.
    """

    def __init__(self, hooks) -> None:
        self.hooks = hooks
        self.scheduler, self.planner = hooks.scheduler, hooks.planner
        config = hooks.config
        # What the files follow is one request at a time; so are holes that stay.
        self.joins = (
            config.mode == "vtoken" and config.fragmentation_threshold == 0.0 and hooks.log is None
        )
        self._limit: MoveLimit | None = None
        replays = hooks.log is not None and hooks.log.replay is not None
        if config.max_moves_per_step is not None and config.mode == "vtoken" and not replays:
            self._limit = MoveLimit(config.max_moves_per_step)

    def due(self) -> list[Running]:
        """Running requests that lose tokens now or whose shared blocks must be looked at."""
        hooks = self.hooks
        hooks.calendar.open(hooks.step_seq)
        if not hooks.calendar.watched:
            return []
        states, sharing = hooks.states, hooks.shares.sharing
        due = []
        for req_id in hooks.calendar.watched:
            state = states[req_id]
            request = state.request
            # Where it shrank under pressure its blocks do not match its table until finalize.
            if (
                not state.executed
                and (request.num_computed_tokens >= state.next_eviction_len or req_id in sharing)
                and request.status is RequestStatus.RUNNING
            ):
                due.append(state)
        if len(due) > 1 and not self.joins:
            # One by one, the order says who gets the blocks for copies, and what is logged first.
            found = {s.table.req_id for s in due}
            running = [r.request_id for r in self.scheduler.running]
            due = [states[req_id] for req_id in running if req_id in found]
        if self._limit is not None:
            self._limit.begin_step()
            due.sort(key=self._num_to_evict, reverse=True)  # who has waited longest goes first
        return due

    @property
    def limits_moves(self) -> bool:
        """Whether evictions may be put off for the moves they take."""
        return self._limit is not None

    # ---- the limit on moves ----------------------------------------------------------------

    def _num_to_evict(self, state: Running) -> int:
        if state.budget is None:
            return 0
        return self.planner.num_to_evict(state, state.request.num_computed_tokens)

    def limit_moves(self, request) -> None:
        """Put a planned eviction off to a later step where it would move too many tokens."""
        hooks, req_id = self.hooks, request.request_id
        victims = hooks.plans.get(req_id)
        if self._limit is None or victims is None or req_id in hooks.shares.copies:
            return
        if not self._goes_ahead(request, hooks.states[req_id], victims):
            hooks.put_off[req_id] = hooks.plans.pop(req_id)

    def _goes_ahead(self, request, state: Running, victims: np.ndarray) -> bool:
        hooks = self.hooks
        pinned = hooks.shares.shared(hooks.manager.req_to_blocks[request.request_id])
        num_moves = most_moves(
            state.table, victims, self.expected_tokens(request), pinned,
            hooks.config.fragmentation_threshold,
        )  # fmt: skip
        room = hooks.pool.get_num_free_blocks() - len(self.scheduler.running)
        return self._limit.take(num_moves, is_needed=room < hooks.pressure.low)

    def goes_at_once(self, request) -> bool:
        """Whether a planned eviction is carried out at the head of the step.

        A decoding request's is, in all modes: whether the step then reaches the request, or its
        token budget is used up before, makes no difference to what is evicted. What becomes of
        holes that may stay depends on the room there is when slots are allocated.
        """
        return (
            self.hooks.config.fragmentation_threshold == 0.0 and self.expected_tokens(request) == 1
        )

    # ---- one request -----------------------------------------------------------------------

    def decide(self, request, state: Running) -> None:
        """Plan what one request loses in this step, if anything."""
        if state.budget is None:
            return  # the request asked to keep all its tokens
        hooks, req_id, length = self.hooks, request.request_id, request.num_computed_tokens
        blocks = hooks.manager.req_to_blocks[req_id]
        hooks.sync(state, blocks, length)
        protected_ids = hooks.shares.protect(state, blocks)
        if hooks.log is not None and self._follow(req_id, state, length, protected_ids):
            return
        if hooks.shares.wants_copy(blocks):
            self._decide_copy(request, state, blocks, protected_ids)
            return
        num_evict = self.planner.num_to_evict(state, length)
        if num_evict < state.budget.interval_tokens or hooks.pressure.elastic:
            self.schedule_next(state, length)
            return
        self.choose(request, state, num_evict, protected_ids)

    def _decide_copy(self, request, state: Running, blocks, protected_ids) -> None:
        """Plan an eviction that copies survivors out of shared and cached blocks where it pays.

        First with nothing protected; where the shared blocks would take more than they release,
        they are protected, and only cached blocks of the request's own are copied out of.
        """
        hooks, shares = self.hooks, self.hooks.shares
        num_protected, expected = state.num_protected, self.expected_tokens(request)
        attempts = (False, True)
        if shares.was_declined(request.request_id, blocks):
            attempts = (True,)
        for keep_shared in attempts:
            state.num_protected = num_protected if keep_shared else 0
            num_evict = self.planner.num_to_evict(state, request.num_computed_tokens)
            if num_evict < state.budget.interval_tokens:
                continue
            self.choose(request, state, num_evict, protected_ids if keep_shared else None)
            victims = hooks.plans.get(request.request_id)
            if victims is None:
                return
            outcome = shares.plan_copy(state, blocks, victims, expected)
            hooks.counters.copies += outcome == "copy"
            hooks.counters.copies_declined += outcome == "declined"
            if keep_shared or outcome != "declined":
                return
            hooks.plans.pop(request.request_id)
        self.schedule_next(state, request.num_computed_tokens)

    def expected_tokens(self, request) -> int:
        """New tokens a running request will be given in this step, if there is room."""
        known = request.num_tokens + request.num_output_placeholders
        rest = max(1, known - request.num_computed_tokens)
        return min(rest, self.scheduler.max_num_scheduled_tokens)

    def choose(self, request, state, num_evict: int, protected_ids) -> None:
        """Let the policy name victims, with the scores of two steps ago where it needs some."""
        hooks, req_id, length = self.hooks, request.request_id, request.num_computed_tokens
        scores = None
        if self.needs_scores(state):
            scores = hooks.reports.scores_for(req_id, self.report_step(request), length)
            if scores is None:
                # Not asked for in time (a sharer may just have left): finalize asks now.
                state.next_eviction_len = length
                return
        victims = self.planner.decide(
            state,
            num_evict=num_evict,
            protected_ids=protected_ids,
            scores=scores,
            token_ids=lambda: np.asarray(request.all_token_ids, np.int32),
        )
        if len(victims):
            hooks.plans[req_id] = victims

    def needs_scores(self, state: Running) -> bool:
        """Whether this request's policy reads scores."""
        if not self.hooks.scored or state.budget is None:
            return False
        return state.budget.policy.score_kind is not ScoreKind.NONE

    def report_step(self, request) -> int:
        """The step whose scores a decision of this step uses: exactly two steps ago.

        A prompt whose chunk was put off for lack of room has no scores of that step; its last
        chunk's are as good, for nothing attended since.
        """
        step = self.hooks.step_seq - 2
        last = self.hooks.states[request.request_id].last_chunk_step
        return min(step, last) if request.is_prefill_chunk and last >= 0 else step

    def _follow(self, req_id: str, state: Running, length: int, protected_ids) -> bool:
        """Plan what the replayed run did at this length; False where nothing is replayed."""
        log = self.hooks.log
        due = log.next_length(req_id, length)
        if due is None:
            return False
        state.next_eviction_len = due
        if due == length:
            live = state.table.live_ids()
            evictable = live if protected_ids is None else np.setdiff1d(live, protected_ids, True)
            victims = log.victims(req_id, length, evictable)
            if len(victims):
                self.hooks.plans[req_id] = victims
        return True

    # ---- when to look again ----------------------------------------------------------------

    def schedule_next(self, state: Running, length: int) -> None:
        """Set when the request is due next: by the replayed run, else by its budget.

        Under `evict_when: pressure` it is the pool that says so, not the length.
        """
        hooks, req_id = self.hooks, state.table.req_id
        due = None if hooks.log is None else hooks.log.next_length(req_id, length)
        if due is None and hooks.pressure.elastic:
            state.next_eviction_len = NEVER
        elif due is None:
            self.planner.schedule_next(state, length)
        else:
            state.next_eviction_len = due
        hooks.calendar.watch(req_id)

    def schedule_all_next(self, states: list[Running], num_evicted: list[int]) -> None:
        """`schedule_next` after an eviction of requests that went together.

        They are watched, except under `evict_when: pressure`, where nothing is due by length.
        """
        if self.hooks.pressure.elastic:
            for state in states:
                state.next_eviction_len = NEVER
            return
        for state, gone in zip(states, num_evicted, strict=True):
            state.next_eviction_len = state.budget.next_eviction_len(
                gone, state.num_protected, state.request.num_computed_tokens
            )

    def settle(self, num_scheduled: dict[str, int]) -> None:
        """At the end of a step: say when each watched request must be looked at again."""
        hooks = self.hooks
        calendar, states, sharing = hooks.calendar, hooks.states, hooks.shares.sharing
        if hooks.log is not None and hooks.log.replay is not None:
            return  # the record says when, and chunks are cut to it
        next_step, asked = hooks.step_seq + 1, hooks.asker.asked
        for req_id in list(calendar.watched):
            state = states[req_id]
            request = state.request
            length = request.num_computed_tokens + num_scheduled.get(req_id, 0)
            known = request.num_tokens + request.num_output_placeholders
            if req_id in sharing or known - length > 1:
                continue
            if state.next_eviction_len >= NEVER:
                calendar.put_off(req_id, None)
                continue
            wait = state.next_eviction_len - length
            if hooks.scored and req_id not in asked and self.needs_scores(state):
                wait -= 2  # scores are asked for two steps ahead
            if wait > 0:
                calendar.put_off(req_id, next_step + wait)

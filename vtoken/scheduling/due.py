"""Which requests have to be looked at in a step, and when each is due next.

No table or block changes here. What the requests that are due lose is `select`'s to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vtoken.core.budget import NEVER, REPORT_AGE_STEPS
from vtoken.core.ops import Change
from vtoken.recording.run_log import RunLog
from vtoken.scheduling.calendar import Calendar
from vtoken.scheduling.clock import StepClock
from vtoken.scheduling.ports import Request, Scheduler
from vtoken.scheduling.prefix import PrefixBlocks
from vtoken.scheduling.requests import RunningRequest, RunningRequests


class DueRequests:
    """Keeps the calendar.

    Attributes:
        by_length: False under `evict_when: pressure`, where the pool says when a request shrinks.
    """

    def __init__(
        self,
        requests: RunningRequests,
        calendar: Calendar,
        clock: StepClock,
        prefix: PrefixBlocks,
        scheduler: Scheduler,
        log: RunLog | None,
        is_running: Callable[[Request], bool],
        *,
        by_length: bool,
    ) -> None:
        self.requests, self.calendar, self.clock = requests, calendar, clock
        self.prefix, self.scheduler, self.log = prefix, scheduler, log
        self.is_running, self.by_length = is_running, by_length

    def find(self) -> list[RunningRequest]:
        """Running requests that lose tokens now or whose shared blocks must be looked at."""
        self.calendar.open(self.clock.seq)
        by_id, sharing = self.requests.by_id, self.prefix.sharing
        due = []
        for req_id in self.calendar.watched:
            state = by_id[req_id]
            # Where it shrank under pressure its blocks do not match its table until placement.
            if (
                state.change is None
                and (
                    state.request.num_computed_tokens >= state.next_eviction_len
                    or req_id in sharing
                )
                and self.is_running(state.request)
            ):
                due.append(state)
        if len(due) > 1 and (self.prefix.copies_out or self.log is not None):
            # The order says which request gets the blocks for copies, and what is logged first.
            found = {s.req_id for s in due}
            running = [r.request_id for r in self.scheduler.running]
            due = [by_id[req_id] for req_id in running if req_id in found]
        return due

    def schedule_next(self, state: RunningRequest, length: int) -> None:
        """Set when a request is due next, and watch it: by the replayed run, else by its budget."""
        due = None if self.log is None else self.log.next_length(state.req_id, length)
        if due is None:
            due = self._next_len(state, length, state.table.num_evicted_tokens)
        state.next_eviction_len = due
        self.calendar.watch(state.req_id)

    def schedule_evicted(self, states: Sequence[RunningRequest], changes: list[Change]) -> None:
        """`schedule_next` of requests that have just been evicted from, at their lengths now."""
        if self.log is not None:
            for state in states:
                self.schedule_next(state, state.request.num_computed_tokens)
            return
        watched = self.calendar.watched
        for state, change in zip(states, changes, strict=True):
            length = state.request.num_computed_tokens
            state.next_eviction_len = self._next_len(state, length, change.num_evicted)
            if state.table.req_id not in watched:
                self.calendar.watch(state.table.req_id)

    def _next_len(self, state: RunningRequest, length: int, num_evicted: int) -> int:
        if state.budget is None or not self.by_length:
            return NEVER
        return state.budget.next_eviction_len(num_evicted, state.num_protected, length)

    def settle(self, num_scheduled: dict[str, int], asked: set[str]) -> None:
        """At the end of a step: defer each watched request to the step it is needed in.

        Args:
            asked: requests whose scores were asked for in this step.
        """
        if self.log is not None and self.log.replay is not None:
            return  # the record says when, and chunks are cut to it
        calendar, by_id, sharing = self.calendar, self.requests.by_id, self.prefix.sharing
        next_step = self.clock.seq + 1
        for req_id in list(calendar.watched):
            state = by_id[req_id]
            num_new = num_scheduled.get(req_id, 0)
            if req_id in sharing or state.num_pending_tokens - num_new > 1:
                continue
            if state.next_eviction_len >= NEVER:
                calendar.defer(req_id, None)
                continue
            wait = state.next_eviction_len - state.request.num_computed_tokens - num_new
            if state.needs_scores and req_id not in asked:
                wait -= REPORT_AGE_STEPS  # scores are asked for ahead of the decision
            if wait > 0:
                calendar.defer(req_id, next_step + wait)

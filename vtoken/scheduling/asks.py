"""Which requests' scores to ask the workers for in a step, so that they are here when needed."""

from __future__ import annotations

from vtoken.core.budget import NEVER
from vtoken.scheduling.calendar import Calendar
from vtoken.scheduling.clock import StepClock
from vtoken.scheduling.ports import Scheduler
from vtoken.scheduling.reports import ReportBook
from vtoken.scheduling.requests import RunningRequest, RunningRequests
from vtoken.scheduling.shortage import Shortage


class ScoreAsker:
    """Asks REPORT_AGE_STEPS ahead of the decision that uses the scores."""

    def __init__(
        self,
        requests: RunningRequests,
        calendar: Calendar,
        clock: StepClock,
        reports: ReportBook,
        shortage: Shortage,
        scheduler: Scheduler,
    ) -> None:
        self.requests, self.calendar, self.clock = requests, calendar, clock
        self.reports, self.shortage, self.scheduler = reports, shortage, scheduler

    def ask(self, num_scheduled: dict[str, int], chunks: list[str]) -> list[str]:
        """Requests that may be due two steps from now; their questions are noted.

        Args:
            num_scheduled: tokens of every request of the step.
            chunks: those of them with more than one token.
        """
        by_id, asked = self.requests.by_id, {}
        if self.shortage.under_pressure:
            # The next chunk may find no room, and without scores nothing could be evicted.
            for req_id in self.shortage.wants_reports(num_scheduled) + chunks:
                if num_scheduled.get(req_id, 0) and by_id[req_id].needs_scores:
                    asked[req_id] = by_id[req_id]
        for req_id in self.calendar.watched:
            n = num_scheduled.get(req_id, 0)
            if n and req_id not in asked and self._is_needed(by_id[req_id], n):
                asked[req_id] = by_id[req_id]
        for req_id, state in asked.items():
            length = state.request.num_computed_tokens + num_scheduled[req_id]
            self.reports.ask(req_id, self.clock.seq, state.table, length)
        return list(asked)

    def _is_needed(self, state: RunningRequest, n: int) -> bool:
        if state.next_eviction_len >= NEVER or not state.needs_scores:
            return False
        length = state.request.num_computed_tokens + n
        rest = state.request.num_tokens - length
        next_chunk = min(rest, self.scheduler.max_num_scheduled_tokens) if rest > 1 else 1
        if length + next_chunk < state.next_eviction_len:
            return False
        # The report of the last step is the one the coming decision uses.
        return n > 1 or self.reports.asked_at(state.req_id) != self.clock.seq - 1

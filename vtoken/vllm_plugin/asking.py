"""Whose scores to ask the workers for in a step, so that they are here when they are needed."""

from __future__ import annotations

from vtoken.core.budget import NEVER


class ReportAsker:
    """Part of SchedulerHooks. Scores are asked for two steps before the decision.

    Attributes:
        asked: requests asked for in this step.
    """

    def __init__(self, hooks) -> None:
        self.hooks = hooks
        self.scheduler = hooks.scheduler
        self.asked: set[str] = set()

    def ask(self, num_scheduled: dict[str, int], chunks: list[str]) -> list[str]:
        """Requests that may be due two steps from now.

        Args:
            num_scheduled: tokens of every request of the step.
            chunks: those of them with more than one token.
        """
        hooks, asks = self.hooks, {}
        if hooks.pressure.elastic:
            # The next chunk may find no room, and without scores nothing could be evicted.
            for req_id in hooks.pressure.wants_reports(num_scheduled) + chunks:
                state = hooks.states[req_id]
                if num_scheduled.get(req_id, 0) and hooks.needs_scores(state):
                    asks[req_id] = state
        for req_id in hooks.calendar.watched:
            n = num_scheduled.get(req_id, 0)
            if n and req_id not in asks and self._is_needed(req_id, n):
                asks[req_id] = hooks.states[req_id]
        self.asked = set(asks)
        requests, reports = self.scheduler.requests, hooks.reports
        for req_id, state in asks.items():
            length = requests[req_id].num_computed_tokens + num_scheduled[req_id]
            reports.ask(req_id, hooks.step_seq, state.table, length)
        return list(asks)

    def _is_needed(self, req_id: str, n: int) -> bool:
        hooks = self.hooks
        state, request = hooks.states[req_id], self.scheduler.requests[req_id]
        if state.next_eviction_len >= NEVER:
            return False
        length = request.num_computed_tokens + n
        rest = request.num_tokens - length
        next_chunk = min(rest, self.scheduler.max_num_scheduled_tokens) if rest > 1 else 1
        if length + next_chunk < state.next_eviction_len or not hooks.needs_scores(state):
            return False
        # The report of the last step is the one the coming decision uses.
        return n > 1 or hooks.reports.asked_at(req_id) != hooks.step_seq - 1

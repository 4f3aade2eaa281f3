"""Memory pressure: who shrinks when room runs out.

`PressureControl` belongs to SchedulerHooks. The decisions are in vtoken.core.pressure; here they
meet vLLM's requests and blocks. Under `evict_when: pressure`, at the head of a step, while blocks
would run short, requests shrink toward their budgets, the ones furthest above first; nobody loses a
token before that. Who is let in at all is for `admission` to say, and how long chunks may be for
`chunks`; headroom comes out of the same pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress

import numpy as np

from vtoken.core.pressure import PoolView, share_shortfall, tokens_to_give
from vtoken.units import cdiv
from vtoken.vllm_plugin.running import Running
from vtoken.vllm_plugin.sizing import SCORE_DELAY_STEPS, peak_tokens


@dataclass(slots=True)
class Holdings:
    """R requests and what they hold.

    Attributes:
        live, num_above: int64[R], live tokens; those above the budget, protected ones left out.
        blocks: int64[R], blocks of the row.
    """

    states: list[Running]
    live: np.ndarray
    num_above: np.ndarray
    blocks: np.ndarray


class PressureControl:
    """See the module's head.

    Attributes:
        usable: blocks in the pool, the null block left out.
        allocated: requests served in this step: their rows are out.
        idle_steps: steps in a row in which requests ran and nobody was served.
    """

    def __init__(self, hooks) -> None:
        self.hooks = hooks
        self.config, self.pool = hooks.config, hooks.pool
        self.block_size = hooks.block_size
        self.usable = self.pool.num_gpu_blocks - 1
        self.low = int(self.config.low_watermark_frac * self.usable)
        self.elastic = self.config.evict_when == "pressure"
        self.allocated: set[str] = set()
        self.idle_steps = 0

    @property
    def is_active(self) -> bool:
        """Whether requests can be made to shrink at all."""
        return self.hooks.budget is not None and self.config.mode == "vtoken"

    # ---- shortage --------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Shrink requests while this step's allocations would leave less than the headroom."""
        is_idle = self.hooks.scheduler.running and not self.allocated
        self.idle_steps = self.idle_steps + 1 if is_idle else 0
        self.allocated.clear()
        if not self.is_active or not self.elastic:
            return
        low = max(self.low, self._score_slack())
        if self.pool.get_num_free_blocks() - self._blocks_needed_at_most() >= low:
            return
        needed = self._blocks_needed()
        view = PoolView(self.pool.get_num_free_blocks(), needed, low, 2 * low)
        if view.shortfall > 0:
            self.reclaim(view.shortfall)

    def _score_slack(self) -> int:
        """Blocks that running requests take while scores are on their way."""
        if not self.hooks.scored:
            return 0
        return cdiv(SCORE_DELAY_STEPS * len(self.hooks.scheduler.running), self.block_size) + 1

    def growth(self, request, num_tokens: int) -> int:
        """Blocks that a decoding request takes with its next tokens, its evictions counted."""
        hooks, req_id = self.hooks, request.request_id
        state = hooks.states.get(req_id)  # None: it came in this step
        length = request.num_computed_tokens + num_tokens
        slots = hooks.num_slots_needed(req_id, length)
        if state is not None and state.budget is not None and not self._waits_for_scores(state):
            kept = peak_tokens(state.budget, length - state.num_protected, 1)
            slots = min(slots, kept + state.num_protected)
        return max(0, cdiv(slots, self.block_size) - len(hooks.manager.req_to_blocks[req_id]))

    def _waits_for_scores(self, state) -> bool:
        """Whether a request grows whatever its budget: under pressure, or just after its prompt."""
        if not self.hooks.scored:
            return False
        return self.elastic or self.hooks.step_seq < state.last_chunk_step + SCORE_DELAY_STEPS

    def _blocks_needed_at_most(self) -> int:
        """No less than `_blocks_needed`, without a look at every running request.

        One that the calendar does not watch decodes: it takes a block at most.
        """
        hooks, scheduler = self.hooks, self.hooks.scheduler
        needed = len(scheduler.running)
        for req_id in hooks.calendar.watched:
            request = scheduler.requests[req_id]
            held = len(hooks.manager.req_to_blocks[req_id])
            needed += self._demand(request, self._new_tokens(request)) - held
        return needed + self._waiting_need(scheduler.max_num_scheduled_tokens)

    def _blocks_needed(self) -> int:
        """Blocks that running requests, and those about to be admitted, take in this step."""
        hooks, scheduler = self.hooks, self.hooks.scheduler
        needed = tokens = 0
        for request in scheduler.running:
            new = self._new_tokens(request)
            held = len(hooks.manager.req_to_blocks[request.request_id])
            needed += self._demand(request, new) - held
            tokens += new
        return needed + self._waiting_need(scheduler.max_num_scheduled_tokens - tokens)

    def _demand(self, request, num_new_tokens: int) -> int:
        """Blocks a request holds, or will once it has room for its new tokens."""
        hooks, req_id = self.hooks, request.request_id
        slots = hooks.num_slots_needed(req_id, request.num_computed_tokens + num_new_tokens)
        return max(len(hooks.manager.req_to_blocks[req_id]), cdiv(slots, self.block_size))

    def _new_tokens(self, request) -> int:
        rest = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
        return max(0, min(rest, self.hooks.scheduler.max_num_scheduled_tokens))

    def _waiting_need(self, token_budget: int) -> int:
        """Blocks for the waiting requests that this step can admit."""
        admission, scheduler, N = self.hooks.admission, self.hooks.scheduler, self.block_size
        places = scheduler.max_num_active_reqs - len(scheduler.running)
        if places <= 0 or not scheduler.waiting:
            return 0
        charged, needed = admission.charged_blocks(), 0
        for request in scheduler.waiting:
            if places <= 0 or token_budget <= 0:
                break
            charged += admission.peak_blocks(request)
            if charged > admission.room:
                break
            budget = self.hooks.budget_of(request)
            needed += cdiv(peak_tokens(budget, request.num_tokens, N), N)
            places, token_budget = places - 1, token_budget - request.num_tokens
        return needed

    def reclaim(self, num_blocks: int, keep: str | None = None) -> int:
        """Make requests shrink until that many blocks came back, or nobody has more to give.

        Args:
            keep: a request that gives nothing: it needs the room, now. At the head of a step
                (None) the block that somebody is about to take counts like one that is held.

        Returns:
            Blocks that came back.
        """
        hooks, N = self.hooks, self.block_size
        givers = [
            r
            for r in hooks.scheduler.running
            if r.request_id not in self.allocated
            and r.request_id != keep
            and hooks.evictor.can_shrink(r)
        ]
        if not givers:
            return 0
        held = self._holdings([hooks.states[r.request_id] for r in givers])
        new = np.array([self._new_tokens(r) for r in givers])
        demand = held.blocks
        if keep is None:  # a decode can do without its next block; a chunk is cut to the room
            next_demand = [self._demand(r, int(n)) for r, n in zip(givers, new, strict=True)]
            demand = np.where(new == 1, next_demand, demand)
        new = np.where(new == 1, 1, 0)
        spare = demand - -(-(held.live - held.num_above + new) // N)
        give = share_shortfall(spare, num_blocks)
        lose = tokens_to_give(give, demand, held.live, new, held.num_above, N)
        losses = [(held.states[i], int(lose[i]), int(new[i])) for i in np.flatnonzero(lose)]
        free_before = self.pool.get_num_free_blocks()
        if keep is None:  # in one batch, and the evictor finishes one a step
            hooks.evictor.shrink_all(losses)
        else:
            for loss in losses:
                hooks.evictor.shrink(*loss)
        return self.pool.get_num_free_blocks() - free_before

    def retry(self, request, num_new_tokens: int) -> bool:
        """An allocation failed: make room in requests that are not yet served in this step.

        What was put off is carried out first, then holes are filled, then tokens reclaimed.

        Returns:
            Whether it is worth trying again before vLLM preempts somebody.
        """
        if not self.is_active or request.request_id not in self.hooks.states:
            return False
        missing = self._missing_blocks(request, num_new_tokens)
        if missing <= 0:
            return False
        for other in (request, *reversed(self.hooks.scheduler.running)):
            if missing > 0 and other.request_id not in self.allocated:
                new = num_new_tokens if other is request else self._new_tokens(other)
                self.hooks.evictor.catch_up(other, new)
                self.hooks.evictor.compact(other, new)
                missing = self._missing_blocks(request, num_new_tokens)
        if missing > 0 and self.elastic:
            missing -= self.reclaim(missing, keep=request.request_id)
        return missing <= 0

    def _missing_blocks(self, request, num_new_tokens: int) -> int:
        slots = self.hooks.num_slots_needed(
            request.request_id, request.num_computed_tokens + num_new_tokens
        )
        held = len(self.hooks.manager.req_to_blocks[request.request_id])
        return cdiv(slots, self.block_size) - held - self.pool.get_num_free_blocks()

    def _blocks_taken(self, running: list[Running], num_tokens: list[int]) -> int:
        """Blocks that requests take with so many next tokens each, nothing being evicted."""
        hooks, taken = self.hooks, 0
        for state, count in zip(running, num_tokens, strict=True):
            length = state.request.num_computed_tokens + count
            slots = hooks.num_slots_needed(state.table.req_id, length)
            taken += max(0, cdiv(slots, self.block_size) - len(state.blocks))
        return taken

    def _holdings(self, states: list[Running]) -> Holdings:
        """What requests with a budget hold now."""
        if self.hooks.caching:
            for state in states:
                self.hooks.shares.look(state.request, state)
        lengths = [s.request.num_computed_tokens for s in states]
        protected = np.array([s.num_protected for s in states], np.int64)
        evicted = np.array([s.table.num_evicted_tokens for s in states], np.int64)
        live = np.array(lengths, np.int64) - evicted
        return Holdings(
            states=states,
            live=live,
            num_above=np.maximum(live - protected - _budgets(states, lengths - protected), 0),
            blocks=np.array([len(s.blocks) for s in states], np.int64),
        )

    def wants_reports(self, num_scheduled: dict[str, int]) -> list[str]:
        """Requests whose scores may be needed two steps from now; those with most to give first.

        Args:
            num_scheduled: tokens of every request of this step, which lengths do not count yet.
        """
        if not self.elastic or not self.hooks.scored:
            return []
        scheduler, N = self.hooks.scheduler, self.block_size
        low = max(self.low, self._score_slack())
        room = self.pool.get_num_free_blocks() - 2 * low
        room -= self._waiting_need(scheduler.max_num_scheduled_tokens)
        if room >= len(scheduler.running):
            return []  # until its scores are here a request takes a block at most
        running = [self.hooks.states[r.request_id] for r in scheduler.running]
        grown = [SCORE_DELAY_STEPS - 1 + num_scheduled.get(s.table.req_id, 0) for s in running]
        missing = self._blocks_taken(running, grown) - room
        if missing <= 0:
            return []
        has_budget = [state.budget is not None for state in running]
        held = self._holdings(list(compress(running, has_budget)))
        # What it gives then: as in `reclaim`.
        later = held.live + np.array(list(compress(grown, has_budget)), np.int64)
        gives = -(-later // N) - -(-(held.live - held.num_above + 1) // N)
        can = np.flatnonzero((held.num_above > 0) & (gives > 0))
        can = can[
            np.lexsort((held.num_above[can], gives[can]))[::-1]
        ]  # of equal ones the newest first
        enough = int(gives[can].cumsum().searchsorted(2 * missing)) + 1
        return [held.states[i].table.req_id for i in can[:enough]]


def _budgets(states: list[Running], lengths: np.ndarray) -> np.ndarray:
    """int64[R], the budget of each request at int64[R] logical lengths."""
    first = states[0].budget if states else None
    if all(s.budget is first for s in states):
        numbers = first.all_tokens(lengths.tolist()) if states else []
    else:
        numbers = [s.budget.tokens(n) for s, n in zip(states, lengths.tolist(), strict=True)]
    return np.array(numbers, np.int64)

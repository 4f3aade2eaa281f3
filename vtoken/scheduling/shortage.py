"""Memory pressure: which requests shrink when room runs out.

Under `evict_when: pressure`, at the head of a step, while blocks would run short, requests shrink
toward their budgets, the ones furthest above first; no token is lost before that. Which requests are
let in at all is for `admission` to say, and how long chunks may be for `chunks`; headroom comes out
of the same pool. The arithmetic is in `shortfall`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.core.budget import SCORE_DELAY_STEPS, peak_blocks, peak_tokens
from vtoken.recording.run_log import RunLog
from vtoken.scheduling.admission import Admission
from vtoken.scheduling.calendar import Calendar
from vtoken.scheduling.clock import StepClock
from vtoken.scheduling.evict import Evictor
from vtoken.scheduling.naming import Asked, Victims
from vtoken.scheduling.ports import BlockManager, Pool, Request, Scheduler
from vtoken.scheduling.prefix import PrefixBlocks
from vtoken.scheduling.reports import ReportBook
from vtoken.scheduling.requests import BudgetedRequest, RunningRequest, RunningRequests
from vtoken.scheduling.select import Selector
from vtoken.scheduling.shortfall import PoolView, share_shortfall, tokens_to_give
from vtoken.units import cdiv


@dataclass(slots=True)
class Holdings:
    """R requests and what they hold.

    Attributes:
        live, num_above: int64[R], live tokens; those above the budget, protected ones left out.
        blocks: int64[R], blocks of the block table.
    """

    states: list[BudgetedRequest]
    live: np.ndarray
    num_above: np.ndarray
    blocks: np.ndarray


class Shortage:
    """See the module's head.

    Attributes:
        is_active: requests can be made to shrink at all.
        under_pressure: they shrink only when room runs out.
        low_blocks: blocks that are to stay free.
    """

    def __init__(
        self,
        config: VTokenConfig,
        requests: RunningRequests,
        calendar: Calendar,
        clock: StepClock,
        prefix: PrefixBlocks,
        reports: ReportBook,
        selector: Selector,
        evictor: Evictor,
        admission: Admission,
        pool: Pool,
        manager: BlockManager,
        scheduler: Scheduler,
        log: RunLog | None,
        *,
        collects_scores: bool,
    ) -> None:
        self.requests, self.calendar, self.clock = requests, calendar, clock
        self.prefix, self.reports, self.selector = prefix, reports, selector
        self.evictor, self.admission, self.log = evictor, admission, log
        self.pool, self.manager, self.scheduler = pool, manager, scheduler
        self.block_size = manager.block_size
        self.collects_scores = collects_scores
        self.is_active = admission.is_active
        self.under_pressure = config.evict_when == "pressure"
        self.low_blocks = int(config.low_watermark_frac * (pool.num_gpu_blocks - 1))
        self._fills_holes_anyway = config.fragmentation_threshold == 0.0

    # ---- at the head of a step -------------------------------------------------------------

    def relieve(self) -> None:
        """Shrink requests while this step's allocations would leave less than the headroom."""
        if not self.is_active or not self.under_pressure:
            return
        low = self._headroom()
        if self.pool.get_num_free_blocks() - self._blocks_needed_at_most() >= low:
            return
        view = PoolView(self.pool.get_num_free_blocks(), self._blocks_needed(), low, 2 * low)
        if view.shortfall > 0:
            self.reclaim(view.shortfall)

    def _headroom(self) -> int:
        """Blocks to leave: the watermark, or what requests take while scores are on their way."""
        if not self.collects_scores:
            return self.low_blocks
        slack = cdiv(SCORE_DELAY_STEPS * len(self.scheduler.running), self.block_size) + 1
        return max(self.low_blocks, slack)

    def growth(self, request: Request, num_tokens: int) -> int:
        """Blocks that a decoding request takes with its next tokens, its evictions counted."""
        state = self.requests.by_id.get(request.request_id)  # None: it came in this step
        length = request.num_computed_tokens + num_tokens
        slots = self.requests.num_slots_needed(request.request_id, length)
        if state is not None and state.budget is not None and not self._waits_for_scores(state):
            kept = peak_tokens(state.budget, length - state.num_protected)
            slots = min(slots, kept + state.num_protected)
        held = len(self.manager.req_to_blocks[request.request_id])
        return max(0, cdiv(slots, self.block_size) - held)

    def _waits_for_scores(self, state: RunningRequest) -> bool:
        """Whether a request grows whatever its budget: under pressure, or just after its prompt."""
        if not self.collects_scores:
            return False
        return self.under_pressure or self.clock.seq < state.last_chunk_step + SCORE_DELAY_STEPS

    def _blocks_needed_at_most(self) -> int:
        """No less than `_blocks_needed`, without a look at every running request.

        One that the calendar does not watch decodes: it takes a block at most.
        """
        needed = len(self.scheduler.running)
        for req_id in self.calendar.watched:
            needed += self._blocks_next(self.scheduler.requests[req_id])
        return needed + self._waiting_need(self.scheduler.max_num_scheduled_tokens)

    def _blocks_needed(self) -> int:
        """Blocks that running requests, and those about to be admitted, take in this step."""
        needed = tokens = 0
        for request in self.scheduler.running:
            needed += self._blocks_next(request)
            tokens += self._new_tokens(request)
        return needed + self._waiting_need(self.scheduler.max_num_scheduled_tokens - tokens)

    def _blocks_next(self, request: Request) -> int:
        """Blocks that a request takes with its new tokens of this step."""
        length = request.num_computed_tokens + self._new_tokens(request)
        return max(0, self.requests.num_blocks_missing(request.request_id, length))

    def _new_tokens(self, request: Request) -> int:
        rest = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
        return max(0, min(rest, self.scheduler.max_num_scheduled_tokens))

    def _waiting_need(self, token_budget: int) -> int:
        """Blocks for the waiting requests that this step can admit."""
        admission, scheduler = self.admission, self.scheduler
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
            budget = admission.budgets.of(request)
            needed += peak_blocks(budget, request.num_tokens, self.block_size)
            places, token_budget = places - 1, token_budget - request.num_tokens
        return needed

    # ---- shrinking -------------------------------------------------------------------------

    def reclaim(self, num_blocks: int, keep: str | None = None) -> int:
        """Make requests shrink until that many blocks came back, or none has more to give.

        Args:
            keep: a request that gives nothing: it needs the room, now. At the head of a step
                (None) the block that a request is about to take counts like one that is held.

        Returns:
            Blocks that came back.
        """
        givers = [
            state
            for r in self.scheduler.running
            if r.request_id not in self.clock.served
            and r.request_id != keep
            and (state := self._shrinkable(r)) is not None
        ]
        if not givers:
            return 0
        N, held = self.block_size, self._holdings(givers)
        new = np.array([self._new_tokens(s.request) for s in givers])
        demand = held.blocks
        if keep is None:  # a decode can do without its next block; a chunk is cut to the room
            next_demand = held.blocks + [self._blocks_next(s.request) for s in givers]
            demand = np.where(new == 1, next_demand, demand)
        new = np.where(new == 1, 1, 0)
        spare = demand - -(-(held.live - held.num_above + new) // N)
        give = share_shortfall(spare, num_blocks)
        lose = tokens_to_give(give, demand, held.live, new, held.num_above, N)
        free_before = self.pool.get_num_free_blocks()
        self._shrink([(givers[i], int(lose[i]), int(new[i])) for i in np.flatnonzero(lose)])
        return self.pool.get_num_free_blocks() - free_before

    def _shrinkable(self, request: Request) -> BudgetedRequest | None:
        """The record of a request that may lose tokens in this step."""
        req_id = request.request_id
        state = self.requests.by_id.get(req_id)
        if not isinstance(state, BudgetedRequest) or state.change is not None:
            return None
        if req_id in self.selector.waiting:
            return None
        if self.log is not None and self.log.next_length(req_id, request.num_computed_tokens):
            return None  # a replayed request loses what its record says, and nothing else
        if state.needs_scores and not self.reports.has(
            req_id, self.selector.namer.report_step(state)
        ):
            return None
        return state

    def _shrink(self, losses: list[tuple[BudgetedRequest, int, int]]) -> None:
        """Take tokens from requests now, and give their blocks back.

        Args:
            losses: (request, tokens that go, tokens about to be scheduled).
        """
        if not losses:
            return
        self.requests.sync([state for state, _, _ in losses])
        asked = Asked([state for state, _, _ in losses], [count for _, count, _ in losses])
        if self.prefix.caching:
            asked.protected_ids = [self.prefix.protect(state) for state in asked.states]
        victims = self.selector.namer.name(asked)
        num_new = {state.req_id: n for state, _, n in losses}
        expected = [num_new[s.req_id] for s in victims.states]
        self.evictor.carry_out(victims, expected, under_pressure=True)

    # ---- when an allocation failed ---------------------------------------------------------

    def retry(self, request: Request, num_new_tokens: int) -> bool:
        """An allocation failed: make room in requests that are not yet served in this step.

        Deferred evictions are carried out first, then holes are filled, then tokens reclaimed.

        Returns:
            Whether it is worth trying again before vLLM preempts a request.
        """
        if not self.is_active or request.request_id not in self.requests.by_id:
            return False
        length = request.num_computed_tokens + num_new_tokens

        def missing() -> int:
            needed = self.requests.num_blocks_missing(request.request_id, length)
            return needed - self.pool.get_num_free_blocks()

        if missing() <= 0:
            return False
        for other in (request, *reversed(self.scheduler.running)):
            if missing() > 0 and other.request_id not in self.clock.served:
                new = num_new_tokens if other is request else self._new_tokens(other)
                self._catch_up(other.request_id, new)
        if missing() > 0 and self.under_pressure:
            self.reclaim(missing(), keep=request.request_id)
        return missing() <= 0

    def _catch_up(self, req_id: str, num_new_tokens: int) -> None:
        """Carry out a deferred eviction of this step, or fill holes that were to stay."""
        state, victims = self.requests.by_id.get(req_id), self.selector.deferred.pop(req_id, None)
        if state is None:
            return
        if victims is not None:
            self.evictor.carry_out(
                Victims.of([(state, victims)]), [num_new_tokens], under_pressure=True
            )
        elif (
            state.change is None and len(state.table.holes) and req_id not in self.selector.waiting
        ):
            self.evictor.fill_holes(state, num_new_tokens)

    def is_short(self, state: RunningRequest, num_new_tokens: int) -> bool:
        """Whether the pool is too short for a request's new tokens unless its holes are filled."""
        if self._fills_holes_anyway:
            return False
        slots = state.table.num_physical_tokens + num_new_tokens
        free = self.pool.get_num_free_blocks() - self.low_blocks
        return cdiv(slots, self.block_size) - len(state.blocks) > free

    # ---- whose scores will be needed -------------------------------------------------------

    def wants_reports(self, num_scheduled: dict[str, int]) -> list[str]:
        """Requests whose scores may be needed two steps from now; those with most to give first.

        Args:
            num_scheduled: tokens of every request of this step, which lengths do not count yet.
        """
        if not self.under_pressure or not self.collects_scores:
            return []
        scheduler, N = self.scheduler, self.block_size
        room = self.pool.get_num_free_blocks() - 2 * self._headroom()
        room -= self._waiting_need(scheduler.max_num_scheduled_tokens)
        if room >= len(scheduler.running):
            return []  # until its scores are here a request takes a block at most
        states = [self.requests.by_id[r.request_id] for r in scheduler.running]
        grown = [SCORE_DELAY_STEPS - 1 + num_scheduled.get(s.req_id, 0) for s in states]
        missing = self._blocks_taken(states, grown) - room
        if missing <= 0:
            return []
        givers = [
            (s, n) for s, n in zip(states, grown, strict=True) if isinstance(s, BudgetedRequest)
        ]
        held = self._holdings([s for s, _ in givers])
        # What it gives then: as in `reclaim`.
        later = held.live + np.array([n for _, n in givers], np.int64)
        gives = -(-later // N) - -(-(held.live - held.num_above + 1) // N)
        can = np.flatnonzero((held.num_above > 0) & (gives > 0))
        # Of equal ones the newest first.
        can = can[np.lexsort((held.num_above[can], gives[can]))[::-1]]
        enough = int(gives[can].cumsum().searchsorted(2 * missing)) + 1
        return [held.states[i].req_id for i in can[:enough]]

    def _blocks_taken(self, states: list[RunningRequest], num_tokens: list[int]) -> int:
        """Blocks that requests take with so many next tokens each, nothing being evicted."""
        taken = 0
        for state, count in zip(states, num_tokens, strict=True):
            length = state.request.num_computed_tokens + count
            taken += max(0, self.requests.num_blocks_missing(state.req_id, length))
        return taken

    def _holdings(self, states: list[BudgetedRequest]) -> Holdings:
        """What requests with a budget hold now."""
        if self.prefix.caching:
            for state in states:
                self.prefix.look(state)
        lengths = np.array([s.request.num_computed_tokens for s in states], np.int64)
        protected = np.array([s.num_protected for s in states], np.int64)
        evicted = np.array([s.table.num_evicted_tokens for s in states], np.int64)
        live = lengths - evicted
        return Holdings(
            states=states,
            live=live,
            num_above=np.maximum(live - protected - _budgets(states, lengths - protected), 0),
            blocks=np.array([len(s.blocks) for s in states], np.int64),
        )


def _budgets(states: list[BudgetedRequest], lengths: np.ndarray) -> np.ndarray:
    """int64[R], the budget of each request at int64[R] logical lengths."""
    first = states[0].budget if states else None
    if first is not None and all(s.budget is first for s in states):
        numbers = first.all_tokens(lengths.tolist())
    else:
        numbers = [s.budget.tokens(n) for s, n in zip(states, lengths.tolist(), strict=True)]
    return np.array(numbers, np.int64)

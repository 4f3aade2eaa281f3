"""Memory pressure: how long chunks may be, and who shrinks when room runs out.

`PressureControl` belongs to SchedulerHooks. The decisions are in vtoken.core.pressure; here they
meet vLLM's requests and blocks.

* Who is let in at all is for `admission` to say; headroom comes out of the same pool.
* Chunks: a prompt's chunk is cut to the room there is, so that eviction between chunks lets a
  prompt many times the budget run in a pool that could not hold it.
* Pressure (`evict_when: pressure`): at the head of a step, while blocks would run short, requests
  shrink toward their budgets, the ones furthest above first. Nobody loses a token before that.
"""

from __future__ import annotations

import numpy as np

from vtoken.core.pressure import PoolView, share_shortfall, tokens_to_give
from vtoken.units import cdiv
from vtoken.vllm_plugin.sizing import SCORE_DELAY_STEPS, peak_tokens


class PressureControl:
    """See the module's head.

    Attributes:
        usable: blocks in the pool, the null block left out.
        allocated: requests served in this step: their rows are out.
    """

    def __init__(self, hooks) -> None:
        self.hooks = hooks
        self.config, self.pool = hooks.config, hooks.pool
        self.block_size = hooks.block_size
        self.usable = self.pool.num_gpu_blocks - 1
        self.low = int(self.config.low_watermark_frac * self.usable)
        self.elastic = self.config.evict_when == "pressure"
        self.allocated: set[str] = set()
        self._slack = (-1, 0)  # (step, blocks), see _decode_slack
        self._promised = (-1, 0)  # (step, blocks), see _promise
        self._idle_steps = 0  # in a row, in which requests ran and nobody was served

    @property
    def is_active(self) -> bool:
        """Whether requests can be made to shrink at all."""
        return self.hooks.budget is not None and self.config.mode == "vtoken"

    # ---- chunks ----------------------------------------------------------------------------

    def cap_chunk(self, request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Cut a prompt chunk to the room there is.

        Returns:
            num_new_tokens or less; 0 puts the request off for a step (its tokens wait for scores
            to become evictable, or others for their blocks).
        """
        if not self.is_active or (num_new_tokens <= 1 and not request.is_prefill_chunk):
            return num_new_tokens
        if self._idle_steps > SCORE_DELAY_STEPS:
            return num_new_tokens  # prompts wait for each other: let vLLM preempt one
        fitting = self._fitting_chunk(request, num_computed_tokens, num_new_tokens)
        if fitting:
            self._promise(request, num_computed_tokens + fitting)
        return fitting

    def _fitting_chunk(self, request, num_computed_tokens: int, num_new_tokens: int) -> int:
        hooks, N = self.hooks, self.block_size
        state = hooks.states.get(request.request_id)
        running = hooks.scheduler.running
        free = self.pool.get_num_free_blocks() - self._promised_blocks()
        if (free - len(running) - 1) * N >= num_computed_tokens + num_new_tokens:
            return num_new_tokens  # nobody takes more than a block until scores come
        # Requests not yet served in this step may each need a block of their own.
        others = len(running) - len(self.allocated) - (state is not None)
        room = (free - max(others, self._decode_slack())) * N
        if state is not None:
            planned = hooks.num_planned_victims(request.request_id)
            # Its holes count as room: they are filled before the allocation fails.
            live = num_computed_tokens - state.table.num_evicted_tokens - planned
            room += len(hooks.manager.req_to_blocks[request.request_id]) * N - live
        idle_hits: list = []
        if state is None and room - num_computed_tokens < num_new_tokens:
            # Blocks that it hits and nobody holds still count as free.
            idle_hits = self._idle_hits(request, num_computed_tokens)
            room -= len(idle_hits) * N
        if room >= num_new_tokens + self._tokens_before_scores(
            request, num_computed_tokens + num_new_tokens
        ):
            return num_new_tokens
        shorter = min(room, num_new_tokens - 1)
        if shorter >= 1:
            return shorter
        if room >= num_new_tokens and not self._can_lose_tokens(request, state):
            return num_new_tokens  # waiting would not make room
        if idle_hits and not running:
            # Alone, and its hits fill the pool: it could never start. Compute the last anew.
            self.pool.evict_blocks({idle_hits[-1].block_id})
            return 0
        return 0 if running or state is not None else num_new_tokens

    def _idle_hits(self, request, num_hit_tokens: int) -> list:
        """Blocks of a waiting request's prefix hit that no request holds."""
        group = [self.hooks.manager.kv_cache_group_id]
        hashes = request.block_hashes[: num_hit_tokens // self.block_size]
        found = [self.pool.get_cached_block(h, group) for h in hashes]
        return [blocks[0] for blocks in found if blocks and blocks[0].ref_cnt == 0]

    def _tokens_before_scores(self, request, length: int) -> int:
        """Tokens that a request generates after a chunk up to `length` before it can lose any.

        With a prompt's last chunk decoding begins, and nothing can be evicted before the scores
        of that chunk are here.
        """
        if not self.hooks.scored or length < request.num_tokens:
            return 0
        left = request.max_tokens - request.num_output_tokens - 1  # the last one needs no slot
        return max(0, min(SCORE_DELAY_STEPS - 1, left))

    def _promise(self, request, length: int) -> None:
        """Keep room for the blocks that a prompt takes after this step, until its scores come.

        Args:
            length: logical, with the chunk of this step.
        """
        before_scores = self._tokens_before_scores(request, length)
        if before_scores:
            state = self.hooks.states.get(request.request_id)
            gone = 0 if state is None else state.table.num_evicted_tokens
            gone += self.hooks.num_planned_victims(request.request_id)
            blocks = cdiv(length - gone + before_scores, self.block_size)
            blocks -= cdiv(length - gone, self.block_size)
            self._promised = (self.hooks.step_seq, self._promised_blocks() + blocks)

    def _promised_blocks(self) -> int:
        """Blocks promised to prompts that ended in this step; later steps see them decode."""
        step, blocks = self._promised
        return blocks if step == self.hooks.step_seq else 0

    def _can_lose_tokens(self, request, state) -> bool:
        """Whether a request is above its budget, so that it can be evicted from when scores come."""
        if state is None or state.budget is None:
            return False
        length, protected = request.num_computed_tokens, state.num_protected
        if not self.elastic:
            return length >= state.next_eviction_len
        live = length - state.table.num_evicted_tokens - protected
        return live > int(state.budget.tokens(length - protected))

    # ---- shortage --------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Shrink requests while this step's allocations would leave less than the headroom."""
        is_idle = self.hooks.scheduler.running and not self.allocated
        self._idle_steps = self._idle_steps + 1 if is_idle else 0
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

    def _decode_slack(self) -> int:
        """Blocks that decoding requests take before a chunk of this step can be evicted from.

        A chunk that left less would have somebody preempted whom nobody can make room for: most
        often the prompt itself, as the newest.
        """
        step = self.hooks.step_seq
        if self._slack[0] != step:  # a step may hold many chunks
            decoding = [r for r in self.hooks.scheduler.running if not r.is_prefill_chunk]
            self._slack = (step, self._growth_of(decoding) if decoding else 0)
        return self._slack[1]

    def _growth_of(self, decoding: list) -> int:
        scored = self.hooks.scored
        if self.elastic:  # whoever holds more than its budget can give, once scores are here
            return sum(self._growth(r, SCORE_DELAY_STEPS) for r in decoding) if scored else 0
        # A prompt is evicted from in its own turn of a step, after all that decode.
        num_steps = SCORE_DELAY_STEPS if scored else 1
        return sum(self._growth(r, 1 + num_steps) for r in decoding)

    def _growth(self, request, num_tokens: int) -> int:
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
        states = [hooks.states[r.request_id] for r in givers]
        for request, state in zip(givers, states, strict=True):
            hooks.shares.look(request, state)
        length = np.array([r.num_computed_tokens for r in givers])
        evicted = np.array([s.table.num_evicted_tokens for s in states])
        protected = np.array([s.num_protected for s in states])
        budget = np.array(
            [s.budget.tokens(int(x - p)) for s, x, p in zip(states, length, protected, strict=True)]
        )
        live = length - evicted
        above = np.maximum(live - protected - budget, 0)
        new = np.array([self._new_tokens(r) for r in givers])
        demand = np.array([len(hooks.manager.req_to_blocks[r.request_id]) for r in givers])
        if keep is None:  # a decode can do without its next block; a chunk is cut to the room
            next_demand = [self._demand(r, int(n)) for r, n in zip(givers, new, strict=True)]
            demand = np.where(new == 1, next_demand, demand)
        new = np.where(new == 1, 1, 0)
        spare = demand - -(-(live - above + new) // N)
        give = share_shortfall(spare, num_blocks)
        lose = tokens_to_give(give, demand, live, new, above, N)
        losses = [(states[i], int(lose[i]), int(new[i])) for i in np.flatnonzero(lose)]
        free_before = self.pool.get_num_free_blocks()
        if keep is None:  # a step has one batch
            hooks.evictor.shrink_all(losses)
        else:
            for state, num_evict, num_new in losses:
                hooks.evictor.shrink(state.request, num_evict, num_new)
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

    def wants_reports(self, num_scheduled: dict[str, int]) -> list[str]:
        """Requests whose scores may be needed two steps from now; the furthest above first.

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
        grown = {r.request_id: SCORE_DELAY_STEPS - 1 + num_scheduled.get(r.request_id, 0)
                 for r in scheduler.running}  # fmt: skip
        missing = sum(self._growth(r, grown[r.request_id]) for r in scheduler.running) - room
        if missing <= 0:
            return []
        spare: list[tuple[int, int, str]] = []
        for request in scheduler.running:
            state = self.hooks.states.get(request.request_id)
            if state is None or state.budget is None:
                continue
            self.hooks.shares.look(request, state)
            length = request.num_computed_tokens
            live = length - state.table.num_evicted_tokens
            budget = int(state.budget.tokens(length - state.num_protected)) + state.num_protected
            # What it gives then: as in `reclaim`.
            blocks = cdiv(live + grown[request.request_id], N) - cdiv(min(live, budget) + 1, N)
            if live > budget and blocks > 0:
                spare.append((blocks, live - budget, request.request_id))
        spare.sort(reverse=True)
        asked, total = [], 0
        for blocks, _, req_id in spare:
            if total >= 2 * missing:
                break
            asked.append(req_id)
            total += blocks
        return asked

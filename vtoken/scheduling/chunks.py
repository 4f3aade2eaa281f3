"""How long a prompt's chunk may be: as long as there is room, so that no
request is preempted for it.

A chunk is cut to the room there is, and eviction between chunks makes more: a prompt many times the
budget runs in a pool that could not hold it. What others take before a chunk can be evicted from is
left free: the blocks of those that decode, and those promised to prompts that have just ended.
"""

from __future__ import annotations

from vtoken.core.budget import SCORE_DELAY_STEPS
from vtoken.scheduling.clock import StepClock
from vtoken.scheduling.ports import Block, BlockManager, Pool, Request, Scheduler
from vtoken.scheduling.requests import RunningRequest, RunningRequests
from vtoken.scheduling.select import Selector
from vtoken.scheduling.shortage import Shortage
from vtoken.units import cdiv


class ChunkLimits:
    """See the module's head."""

    def __init__(
        self,
        requests: RunningRequests,
        selector: Selector,
        shortage: Shortage,
        clock: StepClock,
        pool: Pool,
        manager: BlockManager,
        scheduler: Scheduler,
    ) -> None:
        self.requests, self.selector, self.shortage = requests, selector, shortage
        self.clock, self.pool, self.manager, self.scheduler = clock, pool, manager, scheduler
        self.block_size = manager.block_size
        self._slack = (-1, 0)  # (step, blocks), see _decode_slack
        self._promised = (-1, 0)  # (step, blocks), see _promise

    def cap_chunk(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Cut a prompt chunk to the room there is.

        Returns:
            num_new_tokens or less; 0 defers the request by a step (its tokens wait for scores
            to become evictable, or others for their blocks).
        """
        if not self.shortage.is_active:
            return num_new_tokens
        if self.clock.num_idle_steps > SCORE_DELAY_STEPS:
            return num_new_tokens  # prompts wait for each other: let vLLM preempt one
        fitting = self._fitting_chunk(request, num_computed_tokens, num_new_tokens)
        if fitting:
            self._promise(request, num_computed_tokens + fitting)
        return fitting

    def _fitting_chunk(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        N = self.block_size
        state = self.requests.by_id.get(request.request_id)
        running = self.scheduler.running
        free = self.pool.get_num_free_blocks() - self._promised_blocks()
        if (free - len(running) - 1) * N >= num_computed_tokens + num_new_tokens:
            return num_new_tokens  # no request takes more than a block until scores come
        # Requests not yet served in this step may each need a block of their own.
        others = len(running) - len(self.clock.served) - (state is not None)
        room = (free - max(others, self._decode_slack())) * N
        if state is not None:
            waiting = self.selector.num_waiting(request.request_id)
            # Its holes count as room: they are filled before the allocation fails.
            live = num_computed_tokens - state.table.num_evicted_tokens - waiting
            room += len(self.manager.req_to_blocks[request.request_id]) * N - live
        needed = num_new_tokens + self._tokens_before_scores(
            request, num_computed_tokens + num_new_tokens
        )
        idle_hits: list[Block] = []
        if state is None and room - num_computed_tokens < needed:
            # Blocks that it hits and no request holds still count as free.
            idle_hits = self._idle_hits(request, num_computed_tokens)
            room -= len(idle_hits) * N
        if room >= needed:
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

    def _idle_hits(self, request: Request, num_hit_tokens: int) -> list[Block]:
        """Blocks of a waiting request's prefix hit that no request holds."""
        group = [self.manager.kv_cache_group_id]
        hashes = request.block_hashes[: num_hit_tokens // self.block_size]
        found = [self.pool.get_cached_block(h, group) for h in hashes]
        return [blocks[0] for blocks in found if blocks and blocks[0].ref_cnt == 0]

    def _tokens_before_scores(self, request: Request, length: int) -> int:
        """Tokens that a request generates after a chunk up to `length` before it can lose any.

        With a prompt's last chunk decoding begins, and nothing can be evicted before the scores
        of that chunk are here.
        """
        if not self.shortage.collects_scores or length < request.num_tokens:
            return 0
        left = request.max_tokens - request.num_output_tokens - 1  # the last one needs no slot
        return max(0, min(SCORE_DELAY_STEPS - 1, left))

    def _promise(self, request: Request, length: int) -> None:
        """Keep room for the blocks that a prompt takes after this step, until its scores come.

        Args:
            length: logical, with the chunk of this step.
        """
        before_scores = self._tokens_before_scores(request, length)
        if before_scores:
            state = self.requests.by_id.get(request.request_id)
            gone = 0 if state is None else state.table.num_evicted_tokens
            gone += self.selector.num_waiting(request.request_id)
            blocks = cdiv(length - gone + before_scores, self.block_size)
            blocks -= cdiv(length - gone, self.block_size)
            self._promised = (self.clock.seq, self._promised_blocks() + blocks)

    def _promised_blocks(self) -> int:
        """Blocks promised to prompts that ended in this step; later steps see them decode."""
        step, blocks = self._promised
        return blocks if step == self.clock.seq else 0

    def _can_lose_tokens(self, request: Request, state: RunningRequest | None) -> bool:
        """Whether a request is above its budget, so that it can be evicted from when scores come."""
        if state is None or state.budget is None:
            return False
        length, protected = request.num_computed_tokens, state.num_protected
        if not self.shortage.under_pressure:
            return length >= state.next_eviction_len
        live = length - state.table.num_evicted_tokens - protected
        return live > int(state.budget.tokens(length - protected))

    def _decode_slack(self) -> int:
        """Blocks that decoding requests take before a chunk of this step can be evicted from.

        A chunk that left less would have a request preempted that no other can make room for: most
        often the prompt itself, as the newest.
        """
        step = self.clock.seq
        if self._slack[0] != step:  # a step may hold many chunks
            decoding = [r for r in self.scheduler.running if not r.is_prefill_chunk]
            self._slack = (step, self._growth_of(decoding) if decoding else 0)
        return self._slack[1]

    def _growth_of(self, decoding: list[Request]) -> int:
        scored, growth = self.shortage.collects_scores, self.shortage.growth
        if self.shortage.under_pressure:
            # One that holds more than its budget can give, once scores are here.
            return sum(growth(r, SCORE_DELAY_STEPS) for r in decoding) if scored else 0
        # A prompt is evicted from in its own turn of a step, after all that decode.
        num_steps = SCORE_DELAY_STEPS if scored else 1
        return sum(growth(r, 1 + num_steps) for r in decoding)

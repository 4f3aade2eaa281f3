"""Which requests are let in: those whose projected peak fits beside the running ones'.

What is charged to the pool:

* a claim per running request: the blocks of its own at its projected peak, or at its present
  length where it has outgrown the projection;
* blocks that several running requests hold, once: nothing can be evicted from those;
* what prompts hold beyond their claims: their chunks take the room there is, and give it back only
  when scores have come.

A request admitted so is not preempted later by its own growth or its neighbours', as far as the
estimate of output lengths holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from vtoken.core.budget import SCORE_DELAY_STEPS, Budget, peak_blocks
from vtoken.policies.base import ScoreKind
from vtoken.scheduling.budgets import RequestBudgets
from vtoken.scheduling.clock import StepClock
from vtoken.scheduling.output_lengths import OutputLengths
from vtoken.scheduling.ports import Block, BlockManager, Pool, Request, Scheduler
from vtoken.scheduling.requests import RunningRequests


class Admission:
    """Claims on the pool, by running request.

    Attributes:
        claims: per running request, blocks of its own at its projected peak.
        num_claimed: their sum.
        num_declined: admissions deferred for lack of projected room.
        lengths: running estimate of output lengths.
    """

    def __init__(
        self,
        budgets: RequestBudgets,
        requests: RunningRequests,
        clock: StepClock,
        pool: Pool,
        manager: BlockManager,
        scheduler: Scheduler,
    ) -> None:
        self.budgets, self.requests, self.clock = budgets, requests, clock
        self.pool, self.manager, self.scheduler = pool, manager, scheduler
        config, self.block_size = budgets.config, manager.block_size
        usable = pool.num_gpu_blocks - 1
        self.room = usable - int(config.low_watermark_frac * usable)
        self.is_active = budgets.common is not None and config.mode == "vtoken"
        self.under_pressure = config.evict_when == "pressure"
        # Under pressure scores are asked for once room is short, and come later.
        common = budgets.common if self.is_active else None
        scored = common is not None and common.policy.score_kind is not ScoreKind.NONE
        self._late_tokens = SCORE_DELAY_STEPS - 1 if scored and self.under_pressure else 0
        self.lengths = OutputLengths()
        self.claims: dict[str, int] = {}
        self.num_claimed = 0
        self.num_declined = 0
        self._hits: dict[str, list[int]] = {}  # block ids that a running request began with
        self._num_hitters: Counter[int] = Counter()  # by block id
        self._outgrown = (-1, 0)  # (step, blocks beyond the claims)

    def peak_blocks(self, request: Request, num_shared_tokens: int = 0) -> int:
        """Blocks of its own that a request will hold at its peak.

        Its output length is a running estimate, or its limit while too few have finished.

        Args:
            num_shared_tokens: tokens at its head in blocks that others hold too.
        """
        at_most = request.max_tokens - request.num_output_tokens
        limit = self.scheduler.max_model_len - request.num_tokens
        # Those that finish first are the short ones: wait for as many as are running.
        is_known = self.lengths.num_seen >= len(self.scheduler.running)
        output = max(1, min(at_most, limit))
        if is_known or at_most >= limit:
            output = self.lengths.estimate(output, at_most < limit)
        return self._own_blocks(
            self.budgets.of(request), request.num_tokens + output - num_shared_tokens
        )

    def _own_blocks(self, budget: Budget | None, num_tokens: int) -> int:
        """Blocks at the peak of a request of this length, shared tokens left out."""
        return peak_blocks(
            budget, num_tokens, self.block_size, chunk_tokens=1,
            under_pressure=self.under_pressure, late_tokens=self._late_tokens,
        )  # fmt: skip

    def admits(self, request: Request, hit_blocks: Sequence[Block]) -> bool:
        """Whether a waiting request's projected peak fits beside the running ones'.

        Args:
            hit_blocks: blocks of its prefix hit, as vLLM is about to give them to it.
        """
        if not self.is_active or not self.scheduler.running:
            return True  # an empty engine takes anything that check_fits let in
        held = [b for b in hit_blocks if b.ref_cnt > 0]
        newly_pinned = sum(b.ref_cnt == 1 for b in held)
        peak = self.peak_blocks(request, len(held) * self.block_size)
        fits = self.charged_blocks() + newly_pinned + peak <= self.room
        self.num_declined += not fits
        return fits

    def charged_blocks(self) -> int:
        """Blocks of the pool that running requests may come to need."""
        return (
            self.num_claimed
            + self._outgrown_blocks()
            + self._blocks_of_chunks()
            + self._pinned_blocks()
        )

    def _outgrown_blocks(self) -> int:
        """Blocks that requests need at their present lengths beyond their claims."""
        step = self.clock.seq
        if self._outgrown[0] != step:  # once a step is enough: a step adds a token a request
            beyond = 0
            for request in self.scheduler.running:
                state = self.requests.by_id.get(request.request_id)
                if state is None:
                    continue
                own = request.num_computed_tokens + 1 - state.num_protected
                needed = self._own_blocks(state.budget, own)
                beyond += max(0, needed - self.claims.get(request.request_id, 0))
            self._outgrown = (step, beyond)
        return self._outgrown[1]

    def _blocks_of_chunks(self) -> int:
        """Blocks that prompts hold beyond their claims.

        Under `evict_when: pressure` requests hold more than they claim, and give it when asked.
        """
        if self.under_pressure:
            return 0
        beyond = 0
        for request in self.scheduler.running:
            if request.is_prefill_chunk:
                state = self.requests.by_id.get(request.request_id)
                shared = 0 if state is None else state.num_protected // self.block_size
                held = len(self.manager.req_to_blocks[request.request_id]) - shared
                beyond += max(0, held - self.claims.get(request.request_id, 0))
        return beyond

    def _pinned_blocks(self) -> int:
        """Distinct blocks from prefix hits that several requests hold now."""
        blocks = self.pool.blocks
        return sum(blocks[i].ref_cnt > 1 for i in self._num_hitters)

    def admitted(self, request: Request, hit_blocks: Sequence[Block]) -> None:
        """A request got its first slots, its hit blocks among them: its peak counts from now on."""
        if not self.is_active:
            return
        req_id = request.request_id
        self.forget(req_id)
        shared = sum(b.ref_cnt > 1 for b in hit_blocks)
        claim = self.peak_blocks(request, shared * self.block_size)
        self.claims[req_id] = claim
        self.num_claimed += claim
        if len(hit_blocks):
            self._hits[req_id] = hits = [b.block_id for b in hit_blocks]
            self._num_hitters.update(hits)

    def forget(self, req_id: str) -> None:
        """A request's blocks are gone: so is its claim."""
        self.num_claimed -= self.claims.pop(req_id, 0)
        for block_id in self._hits.pop(req_id, ()):
            self._num_hitters[block_id] -= 1
            if not self._num_hitters[block_id]:
                del self._num_hitters[block_id]

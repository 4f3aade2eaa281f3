"""Who is let in: a request whose projected peak fits beside everybody else's.

What is charged to the pool:

* a claim per running request: the blocks of its own at its projected peak, or at its present
  length where it has outgrown the projection;
* blocks that several running requests hold, once: nobody can evict from those;
* what prompts hold beyond their claims: their chunks take the room there is, and give it back only
  when scores have come.

A request admitted so is not preempted later by its own growth or its neighbours', as far as the
estimate of output lengths holds.
"""

from __future__ import annotations

from collections import Counter

from vtoken.core.pressure import OutputLengths
from vtoken.units import cdiv
from vtoken.vllm_plugin.sizing import SCORE_DELAY_STEPS, peak_tokens


class Admission:
    """Claims on the pool, by running request.

    Attributes:
        claims: per running request, blocks of its own at its projected peak.
        num_claimed: their sum.
        declined: admissions put off for lack of projected room.
        lengths: running estimate of output lengths.
    """

    def __init__(self, hooks, low_watermark_blocks: int) -> None:
        self.hooks, self.pool = hooks, hooks.pool
        self.block_size = hooks.block_size
        self.room = self.pool.num_gpu_blocks - 1 - low_watermark_blocks
        self.is_active = hooks.budget is not None and hooks.config.mode == "vtoken"
        # Under pressure scores are asked for once room is short, and come later.
        is_late = hooks.scored and hooks.config.evict_when == "pressure"
        self._late_tokens = SCORE_DELAY_STEPS - 1 if is_late else 0
        self.lengths = OutputLengths()
        self.claims: dict[str, int] = {}
        self.num_claimed = 0
        self.declined = 0
        self._hits: dict[str, list[int]] = {}  # block ids that a running request began with
        self._num_hitters: Counter[int] = Counter()  # by block id
        self._outgrown = (-1, 0)  # (step, blocks beyond the claims)

    def peak_blocks(self, request, num_shared_tokens: int = 0) -> int:
        """Blocks of its own that a request will hold at its peak.

        Its output length is a running estimate, or its limit while too few have finished.

        Args:
            num_shared_tokens: tokens at its head in blocks that others hold too.
        """
        at_most = request.max_tokens - request.num_output_tokens
        limit = self.hooks.scheduler.max_model_len - request.num_tokens
        # Those that finish first are the short ones: wait for as many as are running.
        is_known = self.lengths.num_seen >= len(self.hooks.scheduler.running)
        output = max(1, min(at_most, limit))
        if is_known or at_most >= limit:
            output = self.lengths.estimate(output, at_most < limit)
        return self._own_blocks(
            self.hooks.budget_of(request), request.num_tokens + output - num_shared_tokens
        )

    def _own_blocks(self, budget, num_tokens: int) -> int:
        """Blocks at the peak of a request of this length, shared tokens left out."""
        num_tokens = max(1, num_tokens)
        if budget is not None and self.hooks.pressure.elastic:
            peak = int(budget.tokens(num_tokens)) + 1  # shrinks whenever asked to, no interval
        else:
            peak = peak_tokens(budget, num_tokens, 1)
        return cdiv(min(num_tokens, peak + self._late_tokens), self.block_size)

    def admits(self, request, hit_blocks) -> bool:
        """Whether a waiting request's projected peak fits beside the running ones'.

        Args:
            hit_blocks: blocks of its prefix hit, as vLLM is about to give them to it.
        """
        if not self.is_active or not self.hooks.scheduler.running:
            return True  # an empty engine takes anything that check_fits let in
        held = [b for b in hit_blocks if b.ref_cnt > 0]
        newly_pinned = sum(b.ref_cnt == 1 for b in held)
        peak = self.peak_blocks(request, len(held) * self.block_size)
        fits = self.charged_blocks() + newly_pinned + peak <= self.room
        self.declined += not fits
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
        step = self.hooks.step_seq
        if self._outgrown[0] != step:  # once a step is enough: a step adds a token a request
            beyond = 0
            for request in self.hooks.scheduler.running:
                state = self.hooks.states.get(request.request_id)
                if state is None:
                    continue
                own = request.num_computed_tokens + 1 - state.num_protected
                needed = self._own_blocks(state.budget, own)
                beyond += max(0, needed - self.claims.get(request.request_id, 0))
            self._outgrown = (step, beyond)
        return self._outgrown[1]

    def _blocks_of_chunks(self) -> int:
        """Blocks that prompts hold beyond their claims.

        Under `evict_when: pressure` everybody holds more than it claims, and gives it when asked.
        """
        if self.hooks.pressure.elastic:
            return 0
        beyond = 0
        for request in self.hooks.scheduler.running:
            if request.is_prefill_chunk:
                state = self.hooks.states.get(request.request_id)
                shared = 0 if state is None else state.num_protected // self.block_size
                held = len(self.hooks.manager.req_to_blocks[request.request_id]) - shared
                beyond += max(0, held - self.claims.get(request.request_id, 0))
        return beyond

    def _pinned_blocks(self) -> int:
        """Distinct blocks from prefix hits that several requests hold now."""
        blocks = self.pool.blocks
        return sum(blocks[i].ref_cnt > 1 for i in self._num_hitters)

    def admitted(self, request, hit_blocks) -> None:
        """A request got its first slots, its hit blocks among them: its peak counts from now on."""
        if not self.is_active:
            return
        req_id = request.request_id
        self.release(req_id)
        shared = sum(b.ref_cnt > 1 for b in hit_blocks)
        claim = self.peak_blocks(request, shared * self.block_size)
        self.claims[req_id] = claim
        self.num_claimed += claim
        if len(hit_blocks):
            self._hits[req_id] = hits = [b.block_id for b in hit_blocks]
            self._num_hitters.update(hits)

    def release(self, req_id: str) -> None:
        """A request's blocks are gone: so is its claim."""
        self.num_claimed -= self.claims.pop(req_id, 0)
        for block_id in self._hits.pop(req_id, ()):
            self._num_hitters[block_id] -= 1
            if not self._num_hitters[block_id]:
                del self._num_hitters[block_id]

"""An idle engine makes progress: the head of the queue is let in, or answered with an error.

With nothing running and the pool empty a waiting request can only be kept out by its own size, or
by blocks of the prefix cache that it hits. The second are given up; for the first it gets the
numbers. What else vLLM waits for (a grammar, a pause, output still on its way) is not counted.
"""

from __future__ import annotations

import logging

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from vtoken.core.budget import peak_blocks

logger = logging.getLogger(__name__)

# Steps in which the head was kept out of an idle engine. One is common: a block that it hits was
# given up for it (see chunks), and it is asked again in the next step.
STEPS_BEFORE_CACHE_IS_DROPPED = 4
STEPS_BEFORE_REFUSAL = 8
# Times that a request which runs alone may be preempted without a new token in between.
LONE_PREEMPTIONS_BEFORE_REFUSAL = 8


class ProgressGuard:
    """Part of the scheduler; see the module's head.

    Attributes:
        refused: sentences for requests that are about to be ended, by request id.
    """

    def __init__(self, scheduler) -> None:
        self.scheduler = scheduler
        self.pool = scheduler.kv_cache_manager.block_pool
        self.refused: dict[str, str] = {}
        self._kept_out: tuple[str, int] = ("", 0)  # (request id, steps)
        self._preempted: tuple[str, int, int] = ("", 0, 0)  # (request id, its tokens, times)

    def end_step(self) -> None:
        """Look at what was scheduled in this step."""
        head = self._head_kept_out()
        if head is None:
            self._kept_out = ("", 0)
            return
        name, steps = self._kept_out
        steps = steps + 1 if name == head.request_id else 1
        self._kept_out = (head.request_id, steps)
        if steps == STEPS_BEFORE_CACHE_IS_DROPPED:
            self.pool.reset_prefix_cache()
        elif steps == STEPS_BEFORE_REFUSAL:
            self._refuse(head)

    def _head_kept_out(self):
        """The request at the head of the queue of an idle engine, where its size keeps it out."""
        scheduler = self.scheduler
        if scheduler.running or not scheduler.waiting:
            return None
        if scheduler._pause_state is not PauseState.UNPAUSED:
            return None
        if self.pool.get_num_free_blocks() < self.pool.num_gpu_blocks - 1:
            return None  # blocks are still on their way back
        head = scheduler.waiting.peek_request()
        waits = head.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        return head if waits and not head.num_stale_output_tokens else None

    def note_preemption(self, request) -> None:
        """A request was preempted; alone, again and again, it would be so for ever."""
        if self.scheduler.running:
            return
        name, tokens, times = self._preempted
        is_same = (name, tokens) == (request.request_id, request.num_tokens)
        times = times + 1 if is_same else 1
        self._preempted = (request.request_id, request.num_tokens, times)
        if times >= LONE_PREEMPTIONS_BEFORE_REFUSAL:
            self._refuse(request)

    def _refuse(self, request) -> None:
        step = self.scheduler.vtoken
        N = step.manager.block_size
        budget = step.budgets.of(request) if step.config.mode == "vtoken" else None
        total = request.num_prompt_tokens + request.max_tokens
        needed = peak_blocks(budget, total, N)
        sentence = (
            f"request {request.request_id}: {request.num_prompt_tokens} prompt + "
            f"{request.max_tokens} output tokens need {needed} blocks of {N} tokens at their peak, "
            f"the pool has {self.pool.num_gpu_blocks - 1}; with nothing else running the request "
            f"got no further than {request.num_tokens} tokens"
        )
        logger.error("%s; it is ended", sentence)
        self.refused[request.request_id] = sentence
        # vLLM ends these with an error, and tells the client, when the step's output is here.
        self.scheduler.grammar_compile_error_reqs.add(request.request_id)

    def explain(self, outputs: dict) -> None:
        """Put the sentences into the outputs of requests that were ended.

        Args:
            outputs: vLLM's EngineCoreOutputs by client.
        """
        for per_client in outputs.values():
            for out in per_client.outputs:
                sentence = self.refused.pop(out.request_id, None)
                if sentence is not None:
                    out.stop_reason = sentence
        self.refused.clear()  # ended by its client meanwhile

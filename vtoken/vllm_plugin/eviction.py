"""Carrying out what was decided: ids die, blocks go back to the pool, survivors are placed.

    execute, execute_batch   ids die, emptied blocks go back; before or while slots are allocated
    finish                   end of schedule(): survivors and new tokens are placed
    shrink, compact          the same under memory pressure, at once

Requests that decode, fill all their holes at once and share no block go through the step together
(vtoken.core.batch_planner); everything else one by one (vtoken.core.planner).
"""

from __future__ import annotations

import numpy as np

from vtoken.core.batch_planner import BatchEvent, execute_batch, finalize_batch
from vtoken.core.events import BatchSteps, RequestStep
from vtoken.core.table import NO_SLOTS
from vtoken.units import cdiv
from vtoken.vllm_plugin.running import Running


class Evictor:
    """Part of SchedulerHooks; see the module's head.

    Attributes:
        num_new_tokens: of the request that allocate_slots is working on.
    """

    def __init__(self, hooks) -> None:
        self.hooks = hooks
        self.planner, self.counters = hooks.planner, hooks.counters
        self.pool, self.manager = hooks.pool, hooks.manager
        self.num_new_tokens = 0
        self._executed: list[str] = []
        self._event: BatchEvent | None = None

    def begin_step(self) -> None:
        self._executed.clear()
        self._event = None

    # ---- ids die, blocks go back -----------------------------------------------------------

    def execute_batch(self, states: list[Running], ids: np.ndarray, counts) -> None:
        """Carry out the evictions of requests that each get one token in this step.

        Args:
            ids, counts: victims, request after request; see vtoken.core.batch_planner.
        """
        hooks = self.hooks
        if not states:
            return
        if hooks.checker is not None:
            parts = np.split(ids, np.cumsum(counts)[:-1])
            for state, victims in zip(states, parts, strict=True):
                hooks.checker.before_change(state.table.req_id, state, victims)
        if hooks.scored:
            for state in states:  # they decode, and this decision is what the report was for
                hooks.reports.hold(state.table.req_id, hooks.step_seq - 2)
        assert self._event is None, "a step finishes one batch: the first would never be packed"
        self._event = event = execute_batch(states, ids, counts, 1, self.counters)
        if hooks.caching:  # see _forget_hashes
            written = [states[e].blocks[i] for e, i in zip(*event.rewritten(), strict=True)]
            self._forget_hashes(written)
        gone, cached, shift = [], self.manager.num_cached_block, hooks.shift
        eviction = event.eviction
        for state, released, last, num_evicted in zip(
            states, eviction.gone, eviction.last, eviction.num_evicted, strict=True
        ):
            req_id, blocks = state.table.req_id, state.blocks
            # The tail goes first: the front of a sequence is worth more to the prefix cache.
            released = released[::-1]
            gone += [blocks[i] for i in released]
            if last != len(blocks) - 1:
                blocks.append(blocks[last])
                released = sorted((*released, last), reverse=True)
            for i in released:
                del blocks[i]
            shift[req_id] = num_evicted  # packed from now on
            if req_id in cached:
                cached[req_id] = min(cached[req_id], len(blocks))
        hooks.chooser.schedule_all_next(states, eviction.num_evicted)
        if gone:
            free_before = self.pool.get_num_free_blocks()
            self.pool.free_blocks(gone)
            self.counters.released_blocks += self.pool.get_num_free_blocks() - free_before

    def execute(self, req_id: str, victims: np.ndarray, under_pressure: bool = False) -> None:
        """Carry out one request's eviction, or fill its holes where there are no victims."""
        hooks = self.hooks
        state, blocks = hooks.states[req_id], self.manager.req_to_blocks[req_id]
        if hooks.checker is not None:
            hooks.checker.before_change(req_id, state, victims)
        hooks.reports.hold(req_id)
        copy = hooks.shares.take(req_id, state, blocks)
        pinned = hooks.shares.shared(blocks) if copy is None else copy.keeps
        release = self.planner.execute(
            state, victims, self.num_new_tokens, pinned, under_pressure,
            leaves=None if copy is None else copy.leaves,
        )  # fmt: skip
        if copy is not None:
            state.added = np.array([b.block_id for b in copy.new_blocks], np.int32)
            self.counters.copied_blocks += len(copy.new_blocks)
        elif pinned is not None:
            self.counters.shared_tokens_skipped += state.num_protected
        self._executed.append(req_id)
        hooks.shift.pop(req_id, None)
        length = state.table.num_computed_tokens
        if hooks.log is not None and len(victims):
            hooks.log.died(hooks.scheduler.requests[req_id], length, victims)
        hooks.chooser.schedule_next(state, length)
        if release is not None:
            self._release(req_id, blocks, release)

    def _release(self, req_id: str, blocks: list, release) -> None:
        """Bring vLLM's row of a request in step with its new one."""
        writes = self.planner.settings.moves or not self.hooks.shares.copies_out
        if self.hooks.caching and writes:
            self._forget_hashes([blocks[i] for i in release.rewritten])
        gone = [blocks[i] for i in release.released]
        if release.leaves_placeholder:
            for i in release.released:
                blocks[i] = self.pool.null_block
        elif release.kept is not None:  # shorter, or the same blocks in another order
            blocks[:] = [blocks[i] for i in release.kept]
        if gone:
            self.hooks._give_back(req_id, blocks, gone)

    def _forget_hashes(self, blocks: list) -> None:
        """Take blocks that are about to be rewritten out of the prefix cache.

        Before anybody is admitted in this step: an admission could otherwise hit one.
        """
        hashed = {b.block_id for b in blocks if b.block_hash is not None}
        if hashed:
            self.pool.evict_blocks(hashed)

    def is_short(self, req_id: str) -> bool:
        """Whether the pool is too short for a request's new tokens unless its holes are filled."""
        hooks = self.hooks
        if hooks.config.fragmentation_threshold == 0.0:
            return False  # they are filled anyway
        slots = hooks.states[req_id].table.num_physical_tokens + self.num_new_tokens
        held = len(self.manager.req_to_blocks[req_id])
        free = self.pool.get_num_free_blocks() - hooks.pressure.low
        return cdiv(slots, hooks.block_size) - held > free

    # ---- under pressure --------------------------------------------------------------------

    def catch_up(self, request, num_new_tokens: int) -> None:
        """Carry out an eviction that was put off in this step: the pool is short after all."""
        victims = self.hooks.put_off.pop(request.request_id, None)
        if victims is not None:
            self.num_new_tokens = num_new_tokens
            self.execute(request.request_id, victims, under_pressure=True)

    def compact(self, request, num_new_tokens: int) -> None:
        """Fill a request's holes now, below the fragmentation threshold; no token is lost."""
        hooks, req_id = self.hooks, request.request_id
        state = hooks.states.get(req_id)
        if state is None or state.executed or not len(state.table.holes) or req_id in hooks.plans:
            return
        hooks.sync(state, self.manager.req_to_blocks[req_id], request.num_computed_tokens)
        if self.planner.packs_now(state, num_new_tokens, under_pressure=True):
            self.num_new_tokens = num_new_tokens
            self.execute(req_id, NO_SLOTS, under_pressure=True)

    def can_shrink(self, request) -> bool:
        """Whether a request may lose tokens in this step."""
        hooks, req_id = self.hooks, request.request_id
        state = hooks.states.get(req_id)
        if state is None or state.budget is None or state.executed or req_id in hooks.plans:
            return False
        if hooks.log is not None and hooks.log.next_length(req_id, request.num_computed_tokens):
            return False  # a replayed request loses what its record says, and nothing else
        if not hooks.needs_scores(state):
            return True
        return hooks.reports.has(req_id, hooks.chooser.report_step(request))

    def shrink(self, state: Running, num_evict: int, num_new_tokens: int) -> None:
        """Take tokens from a request now, at the head of the step, and give its blocks back."""
        hooks, request, req_id = self.hooks, state.request, state.table.req_id
        hooks.sync(state, state.blocks, request.num_computed_tokens)
        protected_ids = hooks.shares.protect(state, state.blocks)
        hooks.chooser.choose(request, state, num_evict, protected_ids)
        victims = hooks.plans.pop(req_id, None)
        if victims is not None:
            self.num_new_tokens = num_new_tokens
            self.execute(req_id, victims, under_pressure=True)

    def shrink_all(self, losses: list[tuple[Running, int, int]]) -> None:
        """`shrink` at the head of the step: decoding requests together, the others each alone.

        A prompt with a single token left is not one of them: while it waits, the same report serves
        it in every step, and a batch drops what it was served by.

        Args:
            losses: (request, num_evict, num_new_tokens) each.
        """
        hooks = self.hooks
        decodes = [s for s, _, num_new in losses if num_new == 1 and not s.request.is_prefill_chunk]
        together, _ = hooks.together.split(decodes)
        joining = {state.table.req_id for state in together}
        for state, num_evict, num_new in losses:
            if state.table.req_id not in joining:
                self.shrink(state, num_evict, num_new)
        if together:
            counts = [n for state, n, _ in losses if state.table.req_id in joining]
            self.execute_batch(*hooks.together.choose(together, counts))

    # ---- end of schedule() -----------------------------------------------------------------

    def finish(self, num_scheduled: dict[str, int]) -> tuple[list[RequestStep], BatchSteps | None]:
        """Place tokens with the real counts.

        Returns:
            The changed requests' entries for the StepPlan: one by one, and as a batch.
        """
        hooks = self.hooks
        batch = self._finish_batch(num_scheduled)
        steps: list[RequestStep] = []
        for req_id in self._executed:
            state = hooks.states.get(req_id)
            if state is not None:  # else preempted after its plan was carried out
                self._finish_one(req_id, state, num_scheduled.get(req_id, 0), steps)
        if hooks.config.fragmentation_threshold > 0.0:
            for req_id, n in num_scheduled.items():
                state = hooks.states[req_id]
                has_holes = len(state.table.holes) and not state.executed
                if n == 1 and has_holes and req_id not in self._executed:
                    self._finish_one(req_id, state, n, steps)
        return steps, batch

    def _finish_batch(self, num_scheduled: dict[str, int]) -> BatchSteps | None:
        event, hooks = self._event, self.hooks
        if event is None:
            return None
        state_of = hooks.states.get
        stays = [state_of(s.table.req_id) is s for s in event.states]
        if not all(stays):  # the others were preempted since
            if not any(stays):
                return None
            event = event.only(stays)
        states = event.states
        steps, num_moved = finalize_batch(
            event,
            [num_scheduled.get(s.table.req_id, 0) for s in states],
            lambda e, start: [b.block_id for b in states[e].blocks[start:]],
            self.counters,
        )
        for req_id, moved in zip(steps.req_ids, num_moved, strict=True):
            if moved:
                hooks.moved[req_id] = hooks.moved.get(req_id, 0) + moved
        return steps

    def _finish_one(self, req_id: str, state: Running, n: int, steps: list) -> None:
        hooks, blocks = self.hooks, state.blocks
        if not state.executed:
            hooks.sync(state, blocks, state.request.num_computed_tokens)
            if hooks.checker is not None and req_id not in self._executed:
                hooks.checker.before_change(req_id, state)
            hooks.reports.hold(req_id)
        step = self.planner.finalize(state, n, lambda start: [b.block_id for b in blocks[start:]])
        hooks.note_layout(req_id, state)
        if step is not None:
            steps.append(step)
            if step.move_source is not None:
                hooks.moved[req_id] = hooks.moved.get(req_id, 0) + len(step.move_source)

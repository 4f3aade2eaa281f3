"""Advance a dry engine by many decode steps at once, with the outcome of taking them one by one.

Between two arrivals, finishes, admissions and shortages of blocks a scheduler decides nothing:
every running request gets one token a step, and the pool gives blocks to those whose last one is
full. Such a stretch is taken here in one go: requests grow through vLLM's own `allocate_slots`,
several tokens at a time, and a step in which requests evict is a step of vLLM's own scheduler with
those requests alone in its running queue. Everything else is left to a plain step.

Why that is exact:

* Blocks are named differently, but no decision depends on a block's name. What does depend on
  order is which cached blocks are forgotten first; where blocks are both cached and given back,
  events are therefore carried out in the order of plain steps.
* A stretch is only as long as the free blocks of its start suffice for, so that no allocation in
  it fails, whatever is given back meanwhile.
* Requests that wait and did not get in stay out as long as there are no more free blocks than
  when they last failed; a stretch ends before that could be so.

tests/vllm/test_fast_forward.py runs both ways side by side.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

TOKEN = 7  # what every request "generates"


@dataclass(frozen=True, slots=True)
class BulkSteps:
    """What a stretch of decode steps was like; arrays have one entry per step (S steps).

    Attributes:
        num_running: requests, the same in all steps; each got one token in each.
        used_blocks: int64[S], distinct blocks in use.
        live_tokens: int64[S], live tokens after the step, over all requests.
        ideal_blocks: int64[S], blocks if every request's live tokens were packed.
        read_tokens: int64[S], slots that attention reads: live tokens, and holes in blocks held.
        moved_tokens: int64[S], tokens that relocation copied.
    """

    num_steps: int
    num_running: int
    used_blocks: np.ndarray
    live_tokens: np.ndarray
    ideal_blocks: np.ndarray
    read_tokens: np.ndarray
    moved_tokens: np.ndarray


class FastForward:
    """Takes stretches of decode steps on one dry engine; see the module's head."""

    MAX_STEPS = 16384
    MIN_STEPS = 2

    def __init__(self, engine) -> None:
        self.engine = engine
        self.scheduler, self.pool = engine.scheduler, engine.block_pool
        self.kv = self.scheduler.kv_cache_manager
        self.manager = self.kv.coordinator.single_type_managers[0]
        self._settled_free: int | None = None  # free blocks when those waiting last failed
        config, hooks = engine.config, engine.hooks
        self._evicts = hooks is not None and config.evicts
        self._in_order = self._evicts and self.manager.enable_caching

    def is_possible(self) -> bool:
        """Whether this engine's settings allow it at all; it takes plain steps otherwise."""
        engine, config = self.engine, self.engine.config
        if engine.settings.async_scheduling or engine.worker is not None:
            return False
        if engine.hooks is None:
            return True
        keeps_holes = config.fragmentation_threshold > 0.0 or config.max_moves_per_step is not None
        files = (config.record_decisions, config.replay_decisions, config.record_scores)
        return not (
            engine.hooks.collects_scores or config.trace or any(files) or config.evict_when != "always"
            or (keeps_holes and config.mode == "vtoken")
            # Copies take blocks in the middle of a stretch.
            or (config.shared_prefix == "copy" and engine.settings.enable_prefix_caching)
        )  # fmt: skip

    # ---- what is known of those that wait ------------------------------------------------------

    def note_added(self) -> None:
        """A request was submitted: whether it gets in is for a plain step to say."""
        self._settled_free = None

    def note_step(self, output, has_finished: bool) -> None:
        """A plain step was taken."""
        tried = (
            output.total_num_scheduled_tokens == len(output.num_scheduled_tokens) > 0
            and not output.preempted_req_ids
            and not has_finished
            and len(output.num_scheduled_tokens) == len(self.scheduler.running)
            and not output.scheduled_new_reqs
        )
        self._settled_free = self.pool.get_num_free_blocks() if tried else None

    # ---- a stretch -----------------------------------------------------------------------------

    def advance(self, limit: int | None = None) -> BulkSteps | None:
        """Take up to `limit` steps; None where a plain step must be taken instead."""
        scheduler = self.scheduler
        if not scheduler.running or scheduler.kv_holding_waiting or scheduler.deferred_waiting:
            return None
        waits = bool(scheduler.waiting)
        if waits and self._settled_free is None:
            return None
        stretch = _Stretch(self, list(scheduler.running), waits)
        num_steps = min(self.MAX_STEPS, limit or self.MAX_STEPS, stretch.steps_to_finish())
        num_steps = stretch.steps_with_room(num_steps) if num_steps >= self.MIN_STEPS else 0
        return stretch.run(num_steps) if num_steps >= self.MIN_STEPS else None


class _Stretch:
    """One stretch: where each of R requests stands in it.

    `done[r]` steps of request r are carried out; `room[r]` more tokens fit its blocks.
    """

    def __init__(self, owner: FastForward, requests: list, waits: bool) -> None:
        self.owner, self.requests, self.waits = owner, requests, waits
        self.N = owner.engine.block_size
        self.hooks = owner.engine.hooks
        self.states = (
            [None] * len(requests)
            if self.hooks is None
            else [self.hooks.requests.by_id[r.request_id] for r in requests]
        )
        self.start = [r.num_computed_tokens for r in requests]
        self.done = [0] * len(requests)
        self.room = [self._room(i) for i in range(len(requests))]
        self.free = owner.pool.get_num_free_blocks()

    def _room(self, i: int) -> int:
        request, state = self.requests[i], self.states[i]
        physical = request.num_computed_tokens
        if state is not None:
            physical -= state.table.num_reclaimed_tokens
        row = self.owner.manager.req_to_blocks[request.request_id]
        return len(row) * self.N - physical

    def steps_to_finish(self) -> int:
        """Steps before the first in which a request may end; 0 while one is in its prefill."""
        left = self.owner.scheduler.max_model_len
        for r in self.requests:
            num_tokens = r.num_tokens
            if r.num_computed_tokens != num_tokens - 1 or r.num_output_placeholders:
                return 0
            left = min(
                left, r.max_tokens - r.num_output_tokens - 1,
                self.owner.scheduler.max_model_len - num_tokens - 1,
            )  # fmt: skip
        return left

    def steps_with_room(self, limit: int) -> int:
        """Most steps, up to `limit`, that the free blocks suffice for if none is given back."""
        room = np.asarray(self.room)

        def fits(steps: int) -> bool:
            return int((-(-np.maximum(steps - room, 0) // self.N)).sum()) <= self.free

        low, high = 0, limit
        if fits(high):
            return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def run(self, num_steps: int) -> BulkSteps | None:
        R, owner = len(self.requests), self.owner
        used_0 = owner.engine.num_used_blocks()
        tables = [s.table for s in self.states if s is not None]
        live_0 = np.array(self.start) - (
            np.array([t.num_evicted_tokens for t in tables]) if tables else 0
        )
        holes_0 = sum(len(t.holes) for t in tables)
        self.blocks = np.zeros(num_steps, np.int64)  # changes, by step
        self.holes, self.moved = np.zeros(num_steps, np.int64), np.zeros(num_steps, np.int64)
        self.evicted = np.zeros((R, num_steps), np.int32) if tables else None
        num_steps = self._carry_out(num_steps)
        if num_steps == 0:
            return None
        for i in range(R):
            self._grow(i, num_steps)
        if self.hooks is not None:
            self.hooks.calendar.watch_all(r.request_id for r in self.requests)
        steps = np.arange(1, num_steps + 1)
        live = live_0[:, None] + steps
        if self.evicted is not None:
            live -= self.evicted[:, :num_steps].cumsum(axis=1)
        total = live.sum(axis=0)
        return BulkSteps(
            num_steps=num_steps,
            num_running=R,
            used_blocks=used_0 + self.blocks[:num_steps].cumsum(),
            live_tokens=total,
            ideal_blocks=(-(-live // self.N)).sum(axis=0),
            read_tokens=total + holes_0 + self.holes[:num_steps].cumsum(),
            moved_tokens=self.moved[:num_steps],
        )

    def _carry_out(self, num_steps: int) -> int:
        """Go through the events of the stretch in order; returns the steps it can have."""
        events: list[tuple[int, int, bool]] = []  # (step, request, it may evict)
        for i in range(len(self.requests)):
            self._push(events, i, num_steps)
        while events and events[0][0] < num_steps:
            step = events[0][0]
            due, growing = [], []
            while events and events[0][0] == step:
                _, i, evicts = heapq.heappop(events)
                (due if evicts else growing).append(i)
            if due and self.waits and self._may_let_in(step, due):
                return step  # a plain step: somebody might get in
            if growing and due:  # in running order, as a step does it: all in one
                due = sorted([*due, *growing])
            else:
                for i in growing:
                    self._grow(i, step + 1)
            if due:
                self._step_alone(step, due)
            for i in due or growing:
                self._push(events, i, num_steps)
        return num_steps

    def _push(self, events: list, i: int, num_steps: int) -> None:
        """Queue request i's next event: an eviction, or where order counts a full last block."""
        state, request = self.states[i], self.requests[i]
        if state is None or not self.owner._evicts:
            return
        step = max(self.done[i], state.next_eviction_len - self.start[i])
        if self.done[i] == 0 and request.request_id in self.hooks.prefix.sharing:
            step = 0  # what it shares may have changed since it was last looked at
        growth = self.done[i] + self.room[i]
        if self.owner._in_order and growth < min(num_steps, step):
            heapq.heappush(events, (growth, i, False))
        elif step < num_steps:
            heapq.heappush(events, (step, i, True))

    def _may_let_in(self, step: int, due: list[int]) -> bool:
        """Whether the blocks these could give back might be enough for a request that waits."""
        pending = 0
        for i in range(len(self.requests)):
            more = step - self.done[i] - self.room[i]
            pending += -(-more // self.N) if more > 0 else 0
        most = 0
        for i in due:
            state, length = self.states[i], self.start[i] + step
            victims = max(0, state.num_above_budget(length))
            moves = self.hooks.requests.rules.moves
            most += victims // self.N + 2 if moves else victims + len(state.table.holes) + 1
        free = self.owner.pool.get_num_free_blocks() - pending + most
        return free > self.owner._settled_free

    def _grow(self, i: int, upto: int) -> None:
        """Bring request i to the head of step `upto`, without an eviction."""
        count = upto - self.done[i]
        if count <= 0:
            return
        request, room, N = self.requests[i], self.room[i], self.N
        # vLLM caches up to the tokens that are known when it allocates: in a plain step the last
        # one sampled is not yet computed.
        if count > 1:
            request.append_output_token_ids([TOKEN] * (count - 1))
        if count > room or self.owner.manager.enable_caching:
            given = self.owner.kv.allocate_slots(request, count)
            assert given is not None, f"{request.request_id}: no room where there should be"
        request.append_output_token_ids(TOKEN)
        request.num_computed_tokens += count
        if count > room:
            self.blocks[self.done[i] + room : upto : N] += 1
        self.room[i] = room - count + N * max(0, -(-(count - room) // N))
        self.done[i] = upto

    def _step_alone(self, step: int, due: list[int]) -> None:
        """Take one plain step of vLLM's scheduler with these requests alone in it."""
        for i in due:
            self._grow(i, step)
        owner, scheduler = self.owner, self.owner.scheduler
        self.hooks.calendar.watch_all(self.requests[i].request_id for i in due)
        tables = [self.states[i].table for i in due]
        gone = [t.num_evicted_tokens for t in tables]
        holes, moved = sum(len(t.holes) for t in tables), self.hooks.counters.moved_tokens
        free = owner.pool.get_num_free_blocks()
        running, waiting = scheduler.running, scheduler.waiting
        scheduler.running = [self.requests[i] for i in due]
        scheduler.waiting = type(waiting)()
        try:
            # The class's: an observer may have wrapped the instance's, and is told at the end.
            output = type(scheduler).schedule(scheduler)
            assert len(output.num_scheduled_tokens) == len(due), "a step in which not all went on"
            scheduler.update_from_output(output, owner.engine._make_output(output))
        finally:
            scheduler.running, scheduler.waiting = running, waiting
        self.blocks[step] += free - owner.pool.get_num_free_blocks()
        self.moved[step] += self.hooks.counters.moved_tokens - moved
        self.holes[step] += sum(len(t.holes) for t in tables) - holes
        for i, table, before in zip(due, tables, gone, strict=True):
            self.evicted[i, step] = table.num_evicted_tokens - before
            self.done[i] = step + 1
            self.room[i] = self._room(i)

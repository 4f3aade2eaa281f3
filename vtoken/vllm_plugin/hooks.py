"""The one brain in the scheduler process: joins vLLM's requests and blocks to our planner.

Called in this order in every step (DESIGN section 4):

    begin_step     head of schedule(): who is due, and which ids go; nothing changes
    execute        from allocate_slots, per request: ids die, blocks go back to the pool
    finalize       from _update_after_schedule: placement with the real token counts, StepPlan
    forget         request finished, aborted or preempted
"""

from __future__ import annotations

import time
from collections import Counter
from zlib import crc32

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.core.events import Counters, RequestStep, StepPlan, TraceEntry, build_step_plan
from vtoken.core.planner import (
    NEVER,
    Budget,
    PlannerSettings,
    RequestPlanner,
    RequestState,
)
from vtoken.core.table import NO_SLOTS, TokenTable
from vtoken.errors import ConfigError
from vtoken.policies.base import ScoreKind
from vtoken.server.request_options import read_options, request_budget
from vtoken.units import cdiv
from vtoken.vllm_plugin.run_log import RunLog
from vtoken.vllm_plugin.pressure import PressureControl
from vtoken.vllm_plugin.scores import ReportBook, score_window
from vtoken.vllm_plugin.sharing import SharedBlocks
from vtoken.vllm_plugin.sizing import peak_tokens


class SchedulerHooks:
    """State and decisions of vToken in one scheduler.

    Attributes:
        states: per running request; made when it is first scheduled, gone with its blocks.
        counters: running totals.
        trace: TraceEntry of every scheduled request and step, when the config asks for it.
        log: files that are recorded to or replayed from, or None.
        chunk_limits: functions (request, num_computed_tokens, num_new_tokens) -> new tokens that
            a chunk may have; the smallest holds.
    """

    def __init__(self, config: VTokenConfig, scheduler, manager) -> None:
        self.config = config
        self.scheduler, self.manager = scheduler, manager
        self.pool = scheduler.kv_cache_manager.block_pool
        self.block_size = manager.block_size
        self.caching = manager.enable_caching
        self.budget = config.make_budget(self.block_size)
        self.counters = Counters()
        self.planner = RequestPlanner(
            PlannerSettings(
                moves=config.mode == "vtoken",
                fragmentation_threshold=config.fragmentation_threshold,
                seed=config.seed,
            ),
            self.counters,
        )
        self.tables = TokenTable(self.block_size)
        self.states: dict[str, RequestState] = {}
        self.step_seq = 0
        self.trace: list[TraceEntry] = []
        self.scored = self.budget is not None and self.budget.policy.score_kind != ScoreKind.NONE
        self.reports = ReportBook()
        self.log = RunLog.open(config, self.budget, scheduler)
        self.moved: dict[str, int] = {}  # tokens moved so far, by running request
        self._own_budgets: dict = {}  # of requests that asked for one, by what they asked for
        self._plans: dict[str, np.ndarray] = {}
        self._executed: list[str] = []
        self._num_new_tokens = 0  # of the request that allocate_slots is working on
        self.shares = SharedBlocks(self)
        self.pressure = PressureControl(self)
        self.checker = None
        if config.hash_kv_every:
            from vtoken.vllm_plugin.checks import SchedulerChecker  # brings torch in

            self.checker = SchedulerChecker(self)
        self.chunk_limits = [self.pressure.cap_chunk]
        if self.log is not None:
            self.chunk_limits.append(self.log.cut_chunk)

    # ---- head of the step ------------------------------------------------------------------

    def begin_step(self) -> None:
        """Find requests that are due and let their policies name victims."""
        self.step_seq += 1
        self.counters.hook_calls += 1
        self._plans.clear()
        self._executed.clear()
        self.shares.drop_unused()
        self.pressure.begin_step()
        states, sharing = self.states, self.shares.sharing
        due = [
            r
            for r in self.scheduler.running
            if (
                r.num_computed_tokens >= states[r.request_id].next_eviction_len
                or r.request_id in sharing
            )
            # Its blocks no longer match its table until finalize: it shrank under pressure.
            and not states[r.request_id].executed
        ]
        if not due:
            return
        start = time.perf_counter()
        for request in due:
            self._decide(request, states[request.request_id])
        self.counters.plan_s += time.perf_counter() - start

    def _decide(self, request, state: RequestState) -> None:
        if state.budget is None:
            return  # the request asked to keep all its tokens
        req_id, length = request.request_id, request.num_computed_tokens
        blocks = self.manager.req_to_blocks[req_id]
        self.sync(state, blocks, length)
        protected_ids = self.shares.protect(state, blocks)
        if self.log is not None and self._follow(req_id, state, length, protected_ids):
            return
        if self.shares.wants_copy(blocks):
            self._decide_copy(request, state, blocks, protected_ids)
            return
        num_evict = self.planner.num_to_evict(state, length)
        if num_evict < state.budget.interval_tokens or self.pressure.elastic:
            self._schedule_next(state, length)
            return
        self._choose_victims(request, state, num_evict, protected_ids)

    def _decide_copy(self, request, state: RequestState, blocks, protected_ids) -> None:
        """Plan an eviction that copies survivors out of shared and cached blocks where it pays.

        First with nothing protected; where the shared blocks would take more than they release,
        they are protected, and only cached blocks of the request's own are copied out of.
        """
        num_protected, expected = state.num_protected, self._expected_tokens(request)
        attempts = (False, True)
        if self.shares.was_declined(request.request_id, blocks):
            attempts = (True,)
        for keep_shared in attempts:
            state.num_protected = num_protected if keep_shared else 0
            num_evict = self.planner.num_to_evict(state, request.num_computed_tokens)
            if num_evict < state.budget.interval_tokens:
                continue
            self._choose_victims(request, state, num_evict, protected_ids if keep_shared else None)
            victims = self._plans.get(request.request_id)
            if victims is None:
                return
            outcome = self.shares.plan_copy(state, blocks, victims, expected)
            self.counters.copies += outcome == "copy"
            self.counters.copies_declined += outcome == "declined"
            if keep_shared or outcome != "declined":
                return
            self._plans.pop(request.request_id)
        self._schedule_next(state, request.num_computed_tokens)

    def _expected_tokens(self, request) -> int:
        """New tokens a running request will be given in this step, if there is room."""
        known = request.num_tokens + request.num_output_placeholders
        rest = max(1, known - request.num_computed_tokens)
        return min(rest, self.scheduler.max_num_scheduled_tokens)

    def _choose_victims(self, request, state, num_evict: int, protected_ids) -> None:
        """Let the policy name victims, with the scores of two steps ago where it needs some."""
        req_id, length = request.request_id, request.num_computed_tokens
        scores = None
        if self.needs_scores(state):
            scores = self.reports.scores_for(req_id, self.report_step(request), length)
            if scores is None:
                # Not asked for in time (a sharer may just have left): finalize asks now.
                state.next_eviction_len = length
                return
        victims = self.planner.decide(
            state,
            num_evict=num_evict,
            protected_ids=protected_ids,
            scores=scores,
            token_ids=lambda: np.asarray(request.all_token_ids, np.int32),
        )
        if len(victims):
            self._plans[req_id] = victims

    def report_step(self, request) -> int:
        """The step whose scores a decision of this step uses: exactly two steps ago.

        A prompt whose chunk was put off for lack of room has no scores of that step; its last
        chunk's are as good, for nothing attended since.
        """
        step = self.step_seq - 2
        last = self.states[request.request_id].last_chunk_step
        return min(step, last) if request.is_prefill_chunk and last >= 0 else step

    def _follow(self, req_id: str, state: RequestState, length: int, protected_ids) -> bool:
        """Plan what the replayed run did at this length; False where nothing is replayed."""
        due = self.log.next_length(req_id, length)
        if due is None:
            return False
        state.next_eviction_len = due
        if due == length:
            live = state.table.live_ids()
            evictable = live if protected_ids is None else np.setdiff1d(live, protected_ids, True)
            victims = self.log.victims(req_id, length, evictable)
            if len(victims):
                self._plans[req_id] = victims
        return True

    def _schedule_next(self, state: RequestState, length: int) -> None:
        """Set when the request is due next: by the replayed run, else by its budget.

        Under `evict_when: pressure` it is the pool that says so, not the length.
        """
        due = None if self.log is None else self.log.next_length(state.table.req_id, length)
        if due is None and self.pressure.elastic:
            state.next_eviction_len = NEVER
        elif due is None:
            self.planner.schedule_next(state, length)
        else:
            state.next_eviction_len = due

    def sync(self, state: RequestState, blocks, length: int) -> None:
        """Bring a request's table in step with vLLM: new blocks, tokens grown at the tail."""
        table = state.table
        table.sync([b.block_id for b in blocks[table.num_blocks :]], length)

    # ---- while vLLM schedules and allocates ------------------------------------------------

    def arrive(self, request) -> None:
        """A request enters the scheduler.

        Raises:
            ConfigError: decisions are replayed, and none were recorded of such a request.
        """
        if self.log is not None:
            self.log.arrive(request)

    def cap_chunk(self, request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """New tokens of a request that every limit on chunks allows."""
        for limit in self.chunk_limits:
            num_new_tokens = min(
                num_new_tokens, limit(request, num_computed_tokens, num_new_tokens)
            )
        return num_new_tokens

    def note_allocation(self, num_new_tokens: int) -> None:
        """allocate_slots is about to serve a request with this many new tokens."""
        self._num_new_tokens = num_new_tokens

    def execute(self, req_id: str) -> None:
        """Carry out a request's plan of this step: once, however often allocation is retried."""
        victims = self._plans.pop(req_id, None)
        if victims is None:
            return
        start = time.perf_counter()
        self._execute(req_id, victims, under_pressure=self._is_short(req_id))
        self.counters.plan_s += time.perf_counter() - start

    def _is_short(self, req_id: str) -> bool:
        """Whether the pool is too short for a request's new tokens unless its holes are filled."""
        if self.config.fragmentation_threshold == 0.0:
            return False  # they are filled anyway
        slots = self.states[req_id].table.num_physical_tokens + self._num_new_tokens
        held = len(self.manager.req_to_blocks[req_id])
        free = self.pool.get_num_free_blocks() - self.pressure.low
        return cdiv(slots, self.block_size) - held > free

    def _execute(self, req_id: str, victims: np.ndarray, under_pressure: bool = False) -> None:
        state, blocks = self.states[req_id], self.manager.req_to_blocks[req_id]
        if self.checker is not None:
            self.checker.before_change(req_id, state, victims)
        copy = self.shares.take(req_id, state, blocks)
        pinned = self.shares.shared(blocks) if copy is None else copy.keeps
        release = self.planner.execute(
            state, victims, self._num_new_tokens, pinned, under_pressure,
            leaves=None if copy is None else copy.leaves,
        )  # fmt: skip
        if copy is not None:
            state.added = np.array([b.block_id for b in copy.new_blocks], np.int32)
            self.counters.copied_blocks += len(copy.new_blocks)
        elif pinned is not None:
            self.counters.shared_tokens_skipped += state.num_protected
        self._executed.append(req_id)
        length = state.table.num_computed_tokens
        if self.log is not None and len(victims):
            self.log.died(self.scheduler.requests[req_id], length, victims)
        self._schedule_next(state, length)
        if release is None:
            return
        writes = self.planner.settings.moves or not self.shares.copies_out
        if self.caching and writes and len(release.rewritten):
            # Before anybody is admitted in this step: an admission could otherwise hit a block
            # that is about to be rewritten.
            hashed = {
                blocks[i].block_id for i in release.rewritten if blocks[i].block_hash is not None
            }
            if hashed:
                self.pool.evict_blocks(hashed)
        gone = [blocks[i] for i in release.released]
        if release.leaves_placeholder:
            for i in release.released:
                blocks[i] = self.pool.null_block
        elif release.kept is not None:  # shorter, or the same blocks in another order
            blocks[:] = [blocks[i] for i in release.kept]
        if gone:
            self._give_back(req_id, blocks, gone)

    def _give_back(self, req_id: str, blocks: list, gone: list) -> None:
        free_before = self.pool.get_num_free_blocks()
        # The tail goes first: the front of a sequence is worth more to the prefix cache.
        self.pool.free_blocks(reversed(gone))
        self.counters.released_blocks += self.pool.get_num_free_blocks() - free_before
        cached = self.manager.num_cached_block
        if req_id in cached:
            cached[req_id] = min(cached[req_id], len(blocks))

    # ---- shrinking under pressure ----------------------------------------------------------

    def compact(self, request, num_new_tokens: int) -> None:
        """Fill a request's holes now, below the fragmentation threshold; no token is lost."""
        req_id = request.request_id
        state = self.states.get(req_id)
        if state is None or state.executed or not len(state.table.holes) or req_id in self._plans:
            return
        self.sync(state, self.manager.req_to_blocks[req_id], request.num_computed_tokens)
        if self.planner.packs_now(state, num_new_tokens, under_pressure=True):
            self._num_new_tokens = num_new_tokens
            self._execute(req_id, NO_SLOTS, under_pressure=True)

    def can_shrink(self, request) -> bool:
        """Whether a request may lose tokens in this step."""
        state = self.states.get(request.request_id)
        if state is None or state.budget is None or state.executed:
            return False
        req_id = request.request_id
        if req_id in self._plans:
            return False
        if self.log is not None and self.log.next_length(req_id, request.num_computed_tokens):
            return False  # a replayed request loses what its record says, and nothing else
        return not self.needs_scores(state) or self.reports.has(req_id, self.report_step(request))

    def shrink(self, request, num_evict: int, num_new_tokens: int) -> None:
        """Take tokens from a request now, at the head of the step, and give its blocks back."""
        req_id, state = request.request_id, self.states[request.request_id]
        blocks = self.manager.req_to_blocks[req_id]
        self.sync(state, blocks, request.num_computed_tokens)
        protected_ids = self.shares.protect(state, blocks)
        self._choose_victims(request, state, num_evict, protected_ids)
        victims = self._plans.pop(req_id, None)
        if victims is not None:
            self._num_new_tokens = num_new_tokens
            self._execute(req_id, victims, under_pressure=True)

    def num_planned_victims(self, req_id: str) -> int:
        """Tokens that a request is about to lose in this step."""
        victims = self._plans.get(req_id)
        return 0 if victims is None else len(victims)

    def num_slots_needed(self, req_id: str, num_tokens: int) -> int:
        """Tokens' worth of slots a request needs to have `num_tokens` logical tokens computed.

        Called twice a step for every running request: integers only, the table is not read.
        """
        state = self.states.get(req_id)
        if state is None:
            return num_tokens
        table = state.table
        if state.executed:
            new_tokens = num_tokens - table.num_computed_tokens
            return self.planner.num_blocks_needed(state, new_tokens) * self.block_size
        # Growth at the tail leaves logical minus physical length as it is.
        slots = num_tokens - (table.num_computed_tokens - table.num_physical_tokens)
        if len(table.holes) and self.planner.settings.moves:
            new_tokens = num_tokens - self.scheduler.requests[req_id].num_computed_tokens
            return slots - (new_tokens == 1)  # one token takes a hole
        return slots

    def admission_cap_tokens(self, req_id: str, num_tokens: int) -> int:
        """Slots to reserve when a request is admitted: its peak, eviction between chunks counted."""
        budget = self.budget_of(self.scheduler.requests[req_id])
        if budget is None or self.config.mode != "vtoken":
            return num_tokens
        return peak_tokens(budget, num_tokens, self.block_size)

    def budget_of(self, request) -> Budget | None:
        """The budget a request asked for (`vllm_xargs`), else the server's."""
        params = request.sampling_params
        if params is None or not params.extra_args or self.budget is None:
            return self.budget
        try:
            options = read_options(params.extra_args)
            if options is None:
                return self.budget
            if options not in self._own_budgets:
                if len(self._own_budgets) >= 1024:
                    self._own_budgets.clear()
                self._own_budgets[options] = request_budget(self.config, options, self.block_size)
            return self._own_budgets[options]
        except ConfigError:
            return self.budget  # refused in the front end; never a reason to end the engine

    def needs_scores(self, state: RequestState) -> bool:
        """Whether this request's policy reads scores."""
        if not self.scored or state.budget is None:
            return False
        return state.budget.policy.score_kind is not ScoreKind.NONE

    def check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Refuse a request that could never be finished in this pool.

        Raises:
            ConfigError: says what it needs and what there is.
        """
        total = num_prompt_tokens + max_tokens
        budget = self.budget if self.config.mode == "vtoken" else None
        needed = cdiv(peak_tokens(budget, total, self.block_size), self.block_size)
        usable = self.pool.num_gpu_blocks - 1
        if needed > usable:
            raise ConfigError(
                "request", f"{num_prompt_tokens} prompt + {max_tokens} output tokens",
                f"needs {needed} blocks of {self.block_size} tokens at its peak, "
                f"the pool has {usable}",
            )  # fmt: skip

    def has_evicted(self, req_id: str) -> bool:
        state = self.states.get(req_id)
        return state is not None and (state.executed or state.table.num_evicted_tokens > 0)

    # ---- end of schedule() -----------------------------------------------------------------

    def finalize(self, scheduler_output) -> StepPlan | None:
        """Place tokens with the real counts; runs before vLLM advances the lengths."""
        start = time.perf_counter()
        num_scheduled = scheduler_output.num_scheduled_tokens
        fresh_blocks = self._add_states(scheduler_output)
        steps: list[RequestStep] = []
        for req_id in self._executed:
            state = self.states.get(req_id)
            if state is not None:  # else preempted after its plan was carried out
                self._finalize_one(req_id, state, num_scheduled.get(req_id, 0), steps)
        if self.config.fragmentation_threshold > 0.0:
            for req_id, n in num_scheduled.items():
                state = self.states[req_id]
                if n == 1 and len(state.table.holes) and not state.executed:
                    if req_id not in self._executed:
                        self._finalize_one(req_id, state, n, steps)
        self.shares.drop_unused()
        asks = self._ask_for_reports(num_scheduled) if self.scored else []
        if self.config.trace:
            self._record_trace(num_scheduled)
        if self.log is not None:
            self.log.flush()
        plan = build_step_plan(self.step_seq, steps, asks, fresh_blocks)
        if self.checker is not None:
            scheduler_output.vtoken_check = self.checker.after_plan(plan, scheduler_output)
        self.counters.finalize_s += time.perf_counter() - start
        return plan

    def _finalize_one(self, req_id: str, state: RequestState, n: int, steps: list) -> None:
        blocks = self.manager.req_to_blocks[req_id]
        if not state.executed:
            length = self.scheduler.requests[req_id].num_computed_tokens
            self.sync(state, blocks, length)
            if self.checker is not None and req_id not in self._executed:
                self.checker.before_change(req_id, state)
        step = self.planner.finalize(
            state, n, lambda start: [b.block_id for b in blocks[start:]]
        )
        if step is not None:
            steps.append(step)
            if step.move_source is not None:
                self.moved[req_id] = self.moved.get(req_id, 0) + len(step.move_source)

    def _add_states(self, scheduler_output) -> list[int]:
        """Start the tables of new and resumed requests.

        Returns:
            Blocks from the prefix cache whose scores start again: nobody else holds them.
        """
        started = [new.req_id for new in scheduler_output.scheduled_new_reqs]
        started += scheduler_output.scheduled_cached_reqs.resumed_req_ids
        for req_id in started:
            self._add_state(req_id)
        if not (self.scored and self.caching and started):
            return []
        hit = []
        for req_id in started:
            num_hits = self.scheduler.requests[req_id].num_computed_tokens // self.block_size
            hit += self.manager.req_to_blocks[req_id][:num_hits]
        taken = Counter(b.block_id for b in hit)
        return [b.block_id for b in hit if b.ref_cnt == taken[b.block_id]]

    def _add_state(self, req_id: str) -> None:
        request = self.scheduler.requests[req_id]
        prompt = np.asarray(request.prompt_token_ids, np.int32)
        state = RequestState(
            table=self.tables.add(req_id),
            budget=self.budget_of(request),
            num_prompt_tokens=request.num_prompt_tokens,
            prompt_hash=crc32(prompt.tobytes()),
        )
        if self.log is not None:
            self.log.start(request)
        self._schedule_next(state, request.num_computed_tokens)
        self.states[req_id] = state

    def _ask_for_reports(self, num_scheduled: dict[str, int]) -> list[str]:
        """Requests that may be due two steps from now; remember which id sits where."""
        asks = []
        for req_id in self.pressure.wants_reports():
            n = num_scheduled.get(req_id, 0)
            if n:
                self._ask(req_id, self.scheduler.requests[req_id].num_computed_tokens + n, asks)
        for req_id, n in num_scheduled.items():
            state, request = self.states[req_id], self.scheduler.requests[req_id]
            if n > 1:
                state.last_chunk_step = self.step_seq
            if req_id in asks or not self.needs_scores(state):
                continue
            if self.pressure.elastic and n > 1:
                # The next chunk may find no room, and without scores nothing could be evicted.
                self._ask(req_id, request.num_computed_tokens + n, asks)
                continue
            if state.next_eviction_len >= NEVER:
                continue
            length = request.num_computed_tokens + n
            rest = request.num_tokens - length
            next_chunk = min(rest, self.scheduler.max_num_scheduled_tokens) if rest > 1 else 1
            if length + next_chunk < state.next_eviction_len:
                continue
            if n == 1 and self.reports.asked_at(req_id) == self.step_seq - 1:
                continue  # the report of the last step is the one the coming decision uses
            self._ask(req_id, length, asks)
        return asks

    def _ask(self, req_id: str, length: int, asks: list[str]) -> None:
        state = self.states[req_id]
        self.sync(state, self.manager.req_to_blocks[req_id], length)
        self.reports.ask(req_id, self.step_seq, state.table.ids_by_physical_index())
        asks.append(req_id)

    def _record_trace(self, num_scheduled: dict[str, int]) -> None:
        for req_id, n in num_scheduled.items():
            state, request = self.states[req_id], self.scheduler.requests[req_id]
            first = request.num_computed_tokens
            blocks = self.manager.req_to_blocks[req_id]
            self.sync(state, blocks, first + n)
            live = state.table.live_ids()
            self.trace.append(
                TraceEntry(
                    req_id=req_id,
                    step_seq=self.step_seq,
                    first_id=first,
                    num_new_tokens=n,
                    live_ids=live[live < first],
                    num_preemptions=request.num_preemptions,
                    num_blocks=sum(not b.is_null for b in blocks),
                    is_sampled=first + n == request.num_tokens + request.num_output_placeholders,
                )
            )

    # ---- the end of a request --------------------------------------------------------------

    def forget(self, req_id: str) -> None:
        """Drop everything known of a request whose blocks are being freed."""
        request = self.scheduler.requests.get(req_id)
        if self.log is not None and request is not None:
            self.log.end(request)
        self.states.pop(req_id, None)
        self.tables.forget(req_id)
        self.moved.pop(req_id, None)
        self._plans.pop(req_id, None)
        self.shares.forget(req_id)
        self.reports.forget(req_id)
        self.pressure.release(req_id)
        if request is not None and request.is_finished():
            self.pressure.lengths.add(request.num_output_tokens)

    def describe(self) -> dict[str, object]:
        """What results say of the scores in force: their kind, and which queries count."""
        kind = ScoreKind.NONE if self.budget is None else self.budget.policy.score_kind
        return score_window(kind, self.config.score_queries)

    def take_scores(self, reports) -> None:
        """Take in the ScoreReports of a finished step."""
        if self.log is not None:
            self.log.take_scores(reports, self.reports, self.scheduler.requests)
        self.reports.receive(reports)


__all__ = ["SchedulerHooks", "NO_SLOTS"]

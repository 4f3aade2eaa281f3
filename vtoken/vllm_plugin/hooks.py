"""The one brain in the scheduler process: joins vLLM's requests and blocks to our planner.

Called in this order in every step (DESIGN section 4):

    begin_step     head of schedule(): who is due, and which ids go; of decoding requests they die
                   at once, of those that share nothing all together
    execute        from allocate_slots, for prompts: ids die, blocks go back to the pool
    finalize       from _update_after_schedule: placement with the real token counts, StepPlan
    forget         request finished, aborted or preempted

The work is in its parts: who is due and what goes (`choosing`, `together`), carrying it out
(`eviction`), whose scores are asked for (`asking`), blocks of several requests (`sharing`), who is let in
(`admission`), how long chunks are (`chunks`), shortage (`pressure`), files (`run_log`).
"""

from __future__ import annotations

import time
from collections import Counter
from zlib import crc32

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.core.batch import Tables
from vtoken.core.budget import Budget
from vtoken.core.calendar import Calendar
from vtoken.core.events import Counters, StepPlan, TraceEntry, build_step_plan
from vtoken.core.planner import PlannerSettings, RequestPlanner
from vtoken.core.table import TokenTable
from vtoken.kernels.tables import load_ops
from vtoken.policies.base import ScoreKind
from vtoken.vllm_plugin.admission import Admission
from vtoken.vllm_plugin.asking import ReportAsker
from vtoken.vllm_plugin.budgets import RequestBudgets
from vtoken.vllm_plugin.choosing import VictimChooser
from vtoken.vllm_plugin.chunks import ChunkLimits
from vtoken.vllm_plugin.eviction import Evictor
from vtoken.vllm_plugin.pressure import PressureControl
from vtoken.vllm_plugin.run_log import RunLog
from vtoken.vllm_plugin.running import Running
from vtoken.vllm_plugin.scores import ReportBook, score_window
from vtoken.vllm_plugin.sharing import SharedBlocks
from vtoken.vllm_plugin.together import JointChooser


class SchedulerHooks:
    """State and decisions of vToken in one scheduler.

    Attributes:
        states: per running request; made when it is first scheduled, gone with its blocks.
        counters: running totals.
        trace: TraceEntry of every scheduled request and step, when the config asks for it.
        plans: ids that a request loses in this step, until `execute`.
        put_off: ids that a request would lose in this step but for `max_moves_per_step`.
        shift: logical minus physical length, of every request whose slots are just that many less
            than its tokens; the others have holes, or a plan in progress.
        calendar: when each request has to be looked at.
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
        self.tables = TokenTable(self.block_size, load_ops())
        self.states: dict[str, Running] = {}
        self.step_seq = 0
        self.trace: list[TraceEntry] = []
        self.scored = self.budget is not None and self.budget.policy.score_kind != ScoreKind.NONE
        self.reports = ReportBook(self.sync_request)
        self.log = RunLog.open(config, self.budget, scheduler)
        self.moved: dict[str, int] = {}  # tokens moved so far, by running request
        self.plans: dict[str, np.ndarray] = {}
        self.put_off: dict[str, np.ndarray] = {}
        self.shift: dict[str, int] = {}
        self.calendar = Calendar()
        self.budgets = RequestBudgets(self)
        self.shares = SharedBlocks(self)
        self.chooser = VictimChooser(self)
        self.together = JointChooser(self, self.chooser)
        self.evictor, self.asker = Evictor(self), ReportAsker(self)
        self.pressure = PressureControl(self)
        self.checker = None
        if config.hash_kv_every:
            from vtoken.vllm_plugin.checks import SchedulerChecker  # brings torch in

            self.checker = SchedulerChecker(self)
        self.admission = Admission(self, self.pressure.low)
        self.chunk_limits = [ChunkLimits(self, self.pressure).cap_chunk]
        if self.log is not None:
            self.chunk_limits.append(self.log.cut_chunk)

    # ---- head of the step ------------------------------------------------------------------

    def begin_step(self) -> None:
        """Find requests that are due and let their policies name victims."""
        self.step_seq += 1
        self.counters.hook_calls += 1
        self.plans.clear()
        self.put_off.clear()
        self.evictor.begin_step()
        self.shares.drop_unused()
        self.pressure.begin_step()
        due = self.chooser.due()
        if not due:
            return
        start = time.perf_counter()
        together, alone = self.together.split(due)
        for state in alone:
            self.chooser.decide(state.request, state)
            self.chooser.limit_moves(state.request)
        # Nothing is released before everybody's copies have their blocks.
        for state in alone:
            req_id = state.table.req_id
            if req_id in self.plans and self.chooser.goes_at_once(state.request):
                self.evictor.num_new_tokens = 1
                self.evictor.execute(req_id, self.plans.pop(req_id))
        if together:
            self.evictor.execute_batch(*self.together.decide(together))
        self.counters.plan_s += time.perf_counter() - start

    def sync(self, state: Running, blocks, length: int) -> None:
        """Bring a request's table in step with vLLM: new blocks, tokens grown at the tail."""
        table = state.table
        table.sync([b.block_id for b in blocks[table.num_blocks :]], length)

    def sync_request(self, req_id: str) -> None:
        """`sync` with what vLLM has of a request."""
        length = self.scheduler.requests[req_id].num_computed_tokens
        self.sync(self.states[req_id], self.manager.req_to_blocks[req_id], length)

    def sync_all(self, states: list[Running], batch: Tables, lengths: list[int]) -> None:
        """`sync` for the tables of several requests, at these lengths."""
        batch.sync([[b.block_id for b in s.blocks[s.table.num_blocks :]] for s in states], lengths)

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
        self.evictor.num_new_tokens = num_new_tokens

    def execute(self, req_id: str) -> None:
        """Carry out a request's plan of this step: once, however often allocation is retried."""
        victims = self.plans.pop(req_id, None)
        if victims is None:
            return
        start = time.perf_counter()
        self.evictor.execute(req_id, victims, under_pressure=self.evictor.is_short(req_id))
        self.counters.plan_s += time.perf_counter() - start

    def _give_back(self, req_id: str, blocks: list, gone: list) -> None:
        free_before = self.pool.get_num_free_blocks()
        # The tail goes first: the front of a sequence is worth more to the prefix cache.
        self.pool.free_blocks(reversed(gone))
        self.counters.released_blocks += self.pool.get_num_free_blocks() - free_before
        cached = self.manager.num_cached_block
        if req_id in cached:
            cached[req_id] = min(cached[req_id], len(blocks))

    # ---- what vLLM and the parts ask ---------------------------------------------------------

    def num_planned_victims(self, req_id: str) -> int:
        """Tokens that a request is about to lose in this step."""
        victims = self.plans.get(req_id)
        return 0 if victims is None else len(victims)

    def num_slots_needed(self, req_id: str, num_tokens: int) -> int:
        """Tokens' worth of slots a request needs to have `num_tokens` logical tokens computed.

        Called twice a step for every running request: integers only, the table is not read.
        """
        shift = self.shift.get(req_id)
        if shift is not None:  # growth at the tail leaves it as it is
            return num_tokens - shift
        state = self.states.get(req_id)
        if state is None:
            return num_tokens
        table = state.table
        if state.executed:
            new_tokens = num_tokens - table.num_computed_tokens
            return self.planner.num_blocks_needed(state, new_tokens) * self.block_size
        new_tokens = num_tokens - self.scheduler.requests[req_id].num_computed_tokens
        return num_tokens - table.num_reclaimed_tokens - (new_tokens == 1)  # one takes a hole

    def note_layout(self, req_id: str, state: Running) -> None:
        """A request's layout was changed, and the change is complete."""
        table = state.table
        if not self.planner.settings.moves or not len(table.holes):
            self.shift[req_id] = table.num_reclaimed_tokens

    def admission_cap_tokens(self, req_id: str, num_tokens: int) -> int:
        """Slots to reserve when a request is admitted: its peak, eviction between chunks counted."""
        return self.budgets.admission_cap_tokens(self.scheduler.requests[req_id], num_tokens)

    def budget_of(self, request) -> Budget | None:
        """The budget a request asked for, else the server's."""
        return self.budgets.of(request)

    def check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Refuse a request that could never be finished in this pool.

        Raises:
            ConfigError: says what it needs and what there is.
        """
        self.budgets.check_fits(num_prompt_tokens, max_tokens)

    def needs_scores(self, state: Running) -> bool:
        """Whether this request's policy reads scores."""
        return self.chooser.needs_scores(state)

    def has_evicted(self, req_id: str) -> bool:
        state = self.states.get(req_id)
        return state is not None and (state.executed or state.table.num_evicted_tokens > 0)

    # ---- end of schedule() -----------------------------------------------------------------

    def finalize(self, scheduler_output) -> StepPlan | None:
        """Place tokens with the real counts; runs before vLLM advances the lengths."""
        start = time.perf_counter()
        num_scheduled = scheduler_output.num_scheduled_tokens
        fresh_blocks = self._add_states(scheduler_output)
        chunks = []
        if scheduler_output.total_num_scheduled_tokens > len(num_scheduled):
            chunks = [req_id for req_id, n in num_scheduled.items() if n > 1]
            for req_id in chunks:
                self.states[req_id].last_chunk_step = self.step_seq
                self.calendar.watch(req_id)
        steps, batch = self.evictor.finish(num_scheduled)
        self.shares.drop_unused()
        asks = self.asker.ask(num_scheduled, chunks) if self.scored else []
        self.chooser.settle(num_scheduled)
        if self.config.trace:
            self._record_trace(num_scheduled)
        if self.log is not None:
            self.log.flush()
        plan = build_step_plan(self.step_seq, steps, asks, fresh_blocks, batch)
        if self.checker is not None:
            check = self.checker.after_plan(plan, scheduler_output)
            if check is not None:
                plan = plan or StepPlan.empty(self.step_seq)
                plan.check = check
        self.counters.finalize_s += time.perf_counter() - start
        return plan

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
        state = Running(
            request=request,
            blocks=self.manager.req_to_blocks[req_id],
            table=self.tables.add(req_id),
            budget=self.budget_of(request),
            num_prompt_tokens=request.num_prompt_tokens,
            prompt_hash=crc32(prompt.tobytes()),
        )
        if self.log is not None:
            self.log.start(request)
        self.states[req_id], self.shift[req_id] = state, 0
        self.chooser.schedule_next(state, request.num_computed_tokens)

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
        self.shift.pop(req_id, None)
        self.calendar.forget(req_id)
        self.tables.forget(req_id)
        self.moved.pop(req_id, None)
        self.plans.pop(req_id, None)
        self.put_off.pop(req_id, None)
        self.shares.forget(req_id)
        self.reports.forget(req_id)
        self.admission.release(req_id)
        if request is not None and request.is_finished():
            self.admission.lengths.add(request.num_output_tokens)

    def describe(self) -> dict[str, object]:
        """What results say of the scores in force: their kind, and which queries count."""
        kind = ScoreKind.NONE if self.budget is None else self.budget.policy.score_kind
        return score_window(kind, self.config.score_queries)

    def take_scores(self, reports) -> None:
        """Take in the ScoreReports of a finished step."""
        if self.log is not None:
            self.log.take_scores(reports, self.reports, self.scheduler.requests)
        self.reports.receive(reports)

"""One step of vToken in one scheduler: what happens, in order.

    begin         head of schedule(): requests that are due lose tokens, emptied blocks go back
    on_allocate   vLLM gives a running request its slots: what had to wait for that is carried out
    finish        end of schedule(): survivors and new tokens get their slots, the plan is written

The parts are in the files beside this one, each with what it needs as constructor arguments;
`vtoken.scheduling.build` puts them together.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.core.counters import Counters
from vtoken.core.messages import StepPlan, WorkerReport, plan_of_layouts
from vtoken.recording.run_log import RunLog
from vtoken.recording.trace import Trace
from vtoken.scheduling.admission import Admission
from vtoken.scheduling.asks import ScoreAsker
from vtoken.scheduling.budgets import RequestBudgets
from vtoken.scheduling.calendar import Calendar
from vtoken.scheduling.chunks import ChunkLimits
from vtoken.scheduling.clock import StepClock
from vtoken.scheduling.due import DueRequests
from vtoken.scheduling.evict import Evictor
from vtoken.scheduling.naming import Victims
from vtoken.scheduling.ports import BlockManager, Checker, Pool, Request, Scheduler
from vtoken.scheduling.prefix import PrefixBlocks
from vtoken.scheduling.reports import ReportBook
from vtoken.scheduling.requests import RunningRequests
from vtoken.scheduling.select import Selector
from vtoken.scheduling.shortage import Shortage

# (request, tokens computed, new tokens) -> new tokens that the chunk may have
ChunkLimit = Callable[[Request, int, int], int]


class Step:
    """The step under way; see the module's head.

    Attributes:
        chunk_limits: the smallest holds.
    """

    def __init__(
        self,
        *,
        config: VTokenConfig,
        requests: RunningRequests,
        budgets: RequestBudgets,
        calendar: Calendar,
        clock: StepClock,
        prefix: PrefixBlocks,
        reports: ReportBook,
        due: DueRequests,
        selector: Selector,
        evictor: Evictor,
        admission: Admission,
        shortage: Shortage,
        chunks: ChunkLimits,
        asker: ScoreAsker,
        manager: BlockManager,
        pool: Pool,
        scheduler: Scheduler,
        counters: Counters,
        log: RunLog | None,
        trace: Trace | None,
    ) -> None:
        self.config, self.counters, self.log, self.trace = config, counters, log, trace
        self.requests, self.budgets, self.calendar, self.clock = requests, budgets, calendar, clock
        self.prefix, self.reports, self.due, self.selector = prefix, reports, due, selector
        self.evictor, self.admission, self.shortage = evictor, admission, shortage
        self.asker = asker
        self.chunk_limits: list[ChunkLimit] = [chunks.cap_chunk]
        if log is not None:
            self.chunk_limits.append(log.cut_chunk)
        self.manager, self.pool, self.scheduler = manager, pool, scheduler

    @property
    def checker(self) -> Checker | None:
        """Watches every change; set after the step was built."""
        return self.evictor.checker

    @checker.setter
    def checker(self, checker: Checker) -> None:
        self.evictor.checker = checker

    @property
    def collects_scores(self) -> bool:
        """Whether the workers keep attention scores."""
        return self.shortage.collects_scores

    # ---- the three phases ------------------------------------------------------------------

    def begin(self) -> None:
        """Let requests that are due, or must make room, lose tokens."""
        start = self._start()
        self.shortage.relieve()
        due = self.due.find()
        if due:
            victims = self.selector.victims_of_due(due)  # blocks for copies are reserved here
            self.evictor.carry_out(victims)  # and only then are others released
            self.counters.plan_s += time.perf_counter() - start

    def on_allocate(self, request: Request, num_new_tokens: int) -> None:
        """Carry out what waited for a request's slots: once, however often that is retried."""
        victims = self.selector.waiting.pop(request.request_id, None)
        if victims is not None:
            start, state = time.perf_counter(), self.requests.by_id[request.request_id]
            is_short = self.shortage.is_short(state, num_new_tokens)
            self.evictor.carry_out(
                Victims.of([(state, victims)]), [num_new_tokens], under_pressure=is_short
            )
            self.counters.plan_s += time.perf_counter() - start

    def finish(self, scheduler_output: Any) -> StepPlan | None:
        """Place tokens with the real counts; runs before vLLM advances the lengths.

        Args:
            scheduler_output: vllm.v1.core.sched.output.SchedulerOutput.
        """
        start, num_scheduled = time.perf_counter(), scheduler_output.num_scheduled_tokens
        fresh_blocks = self._start_requests(scheduler_output)
        chunks = self._note_chunks(scheduler_output)
        plan = self.evictor.place(num_scheduled)
        self.prefix.drop_unused()
        asked = self.asker.ask(num_scheduled, chunks) if self.collects_scores else []
        self.due.settle(num_scheduled, set(asked))
        self._record(num_scheduled)
        plan = self._complete(plan, asked, fresh_blocks, scheduler_output)
        self.counters.finalize_s += time.perf_counter() - start
        return plan

    # ---- their parts -----------------------------------------------------------------------

    def _start(self) -> float:
        self.clock.advance(bool(self.scheduler.running))
        self.counters.hook_calls += 1
        self.selector.begin_step()
        self.evictor.begin_step()
        self.prefix.drop_unused()
        return time.perf_counter()

    def _start_requests(self, scheduler_output: Any) -> list[int]:
        """Start the tables of new and resumed requests.

        Returns:
            Blocks from the prefix cache that no other request holds: their scores start again.
        """
        started = [new.req_id for new in scheduler_output.scheduled_new_reqs]
        started += scheduler_output.scheduled_cached_reqs.resumed_req_ids
        for req_id in started:
            request = self.scheduler.requests[req_id]
            state = self.requests.start(request, self.budgets.of(request))
            if self.log is not None:
                self.log.start(request)
            self.due.schedule_next(state, request.num_computed_tokens)
        if not (self.collects_scores and self.prefix.caching and started):
            return []
        hit = []
        for req_id in started:
            request = self.scheduler.requests[req_id]
            num_hits = request.num_computed_tokens // self.manager.block_size
            hit += self.manager.req_to_blocks[req_id][:num_hits]
        taken = Counter(b.block_id for b in hit)
        return [b.block_id for b in hit if b.ref_cnt == taken[b.block_id]]

    def _note_chunks(self, scheduler_output: Any) -> list[str]:
        """Requests with more than one token in this step."""
        num_scheduled = scheduler_output.num_scheduled_tokens
        if scheduler_output.total_num_scheduled_tokens == len(num_scheduled):
            return []
        chunks = [req_id for req_id, n in num_scheduled.items() if n > 1]
        for req_id in chunks:
            self.requests.by_id[req_id].last_chunk_step = self.clock.seq
            self.calendar.watch(req_id)
        return chunks

    def _record(self, num_scheduled: dict[str, int]) -> None:
        if self.trace is not None:
            self.trace.add(self.clock.seq, num_scheduled, self.requests.by_id)
        if self.log is not None:
            self.log.flush()

    def _complete(
        self,
        plan: StepPlan | None,
        asked: list[str],
        fresh_blocks: list[int],
        scheduler_output: Any,
    ) -> StepPlan | None:
        """Add what else the workers are told; None when there is nothing to say."""
        if plan is None and (asked or fresh_blocks or self.checker is not None):
            plan = plan_of_layouts(())
        if plan is None:
            return None
        plan.step_seq, plan.report_req_ids = self.clock.seq, asked
        if fresh_blocks:
            plan.fresh_blocks = np.array(fresh_blocks, np.int32)
        if self.checker is not None:
            plan.check = self.checker.after_plan(
                plan if plan.says_something else None, scheduler_output
            )
        return plan if plan.says_something else None

    # ---- what else vLLM tells --------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """A request enters the scheduler.

        Raises:
            ConfigError: decisions are replayed, and none were recorded of such a request.
        """
        if self.log is not None:
            self.log.arrive(request)

    def cap_chunk(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """New tokens of a request that every limit on chunks allows."""
        for limit in self.chunk_limits:
            num_new_tokens = min(
                num_new_tokens, limit(request, num_computed_tokens, num_new_tokens)
            )
        return num_new_tokens

    def take_report(self, report: WorkerReport) -> None:
        """Take in what a worker says of a finished step."""
        if report.scores is not None:
            if self.log is not None:
                requests = self.scheduler.requests
                self.log.take_scores(report.scores, self.reports.ids_asked, requests)
            self.reports.receive(report.scores)
        if self.checker is not None:
            self.checker.note_worker(report.check_counts)

    def forget(self, req_id: str) -> None:
        """Drop everything known of a request whose blocks are being freed."""
        request = self.scheduler.requests.get(req_id)
        if self.log is not None and request is not None:
            self.log.end(request)
        for part in (
            self.requests, self.calendar, self.selector, self.prefix, self.reports, self.admission,
        ):  # fmt: skip
            part.forget(req_id)
        if request is not None and request.is_finished():
            self.admission.lengths.add(request.num_output_tokens)

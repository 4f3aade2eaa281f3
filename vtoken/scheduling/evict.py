"""Carrying out what was decided: ids die, blocks go back to the pool, survivors are placed.

carry_out   ids die and emptied blocks go back; before or while slots are allocated
place       end of schedule(): survivors and the step's new tokens get their slots
"""

from __future__ import annotations

from collections.abc import Sequence

from vtoken.core.budget import REPORT_AGE_STEPS
from vtoken.core.counters import Counters
from vtoken.core.messages import StepPlan
from vtoken.core.ops import Change, TableOps, apply_to_block_table
from vtoken.core.reclaim import packs_now
from vtoken.core.table import NO_SLOTS
from vtoken.recording.run_log import RunLog
from vtoken.scheduling.clock import StepClock
from vtoken.scheduling.due import DueRequests
from vtoken.scheduling.naming import Victims
from vtoken.scheduling.ports import Block, BlockManager, Checker, Pool
from vtoken.scheduling.prefix import PrefixBlocks
from vtoken.scheduling.reports import ReportBook
from vtoken.scheduling.requests import RunningRequest, RunningRequests


class Evictor:
    """Executes evictions on token tables, vLLM's block tables and the pool.

    Attributes:
        checker: watches every change, or None.
    """

    def __init__(
        self,
        requests: RunningRequests,
        ops: TableOps,
        prefix: PrefixBlocks,
        reports: ReportBook,
        due: DueRequests,
        clock: StepClock,
        pool: Pool,
        manager: BlockManager,
        log: RunLog | None,
        counters: Counters,
    ) -> None:
        self.requests, self.ops, self.prefix = requests, ops, prefix
        self.reports, self.due, self.clock = reports, due, clock
        self.pool, self.manager, self.log, self.counters = pool, manager, log, counters
        self.rules = requests.rules
        self.checker: Checker | None = None
        self._changed: list[RunningRequest] = []

    def begin_step(self) -> None:
        self._changed.clear()

    # ---- ids die, blocks go back -----------------------------------------------------------

    def carry_out(
        self, victims: Victims, num_new: list[int] | None = None, *, under_pressure: bool = False
    ) -> None:
        """Carry out evictions.

        Args:
            victims: of requests whose tables are in step.
            num_new: tokens about to be scheduled, by request; None: one each.
            under_pressure: holes are filled even below the fragmentation threshold.
        """
        if not victims:
            return
        self._note(victims)
        changes = []
        for e, state in enumerate(victims.states):
            change = Change(
                state.table, self.rules, 1 if num_new is None else num_new[e], under_pressure
            )
            if self.prefix.caching:
                self._reserve_copies(state, change)
            state.change = change
            changes.append(change)
        self.ops.evict(changes, victims.ids, victims.counts)
        self.counters.note_evicted(changes, len(victims.ids))
        self._take(victims.states, changes)
        self.due.schedule_evicted(victims.states, changes)

    def fill_holes(self, state: RunningRequest, num_new_tokens: int) -> None:
        """Fill a request's holes now, below the fragmentation threshold; no token is lost."""
        table = state.sync()
        if not packs_now(table, num_new_tokens, self.rules.fragmentation_threshold, True):
            return
        if self.checker is not None:
            self.checker.before_change(state.req_id, state)
        self.reports.hold(state.req_id)
        state.change = change = Change(table, self.rules, num_new_tokens, under_pressure=True)
        if self.prefix.caching:
            self._reserve_copies(state, change)
        self.ops.evict([change], NO_SLOTS, [0])
        self._take([state], [change])

    def _note(self, victims: Victims) -> None:
        """Tell those who must know of a change before it is made."""
        if self.checker is not None or self.log is not None:
            for state, ids in victims.parts():
                if self.checker is not None:
                    self.checker.before_change(state.req_id, state, ids)
                if self.log is not None:
                    self.log.died(state.request, state.request.num_computed_tokens, ids)
        for state in victims.states:
            if state.needs_scores:
                # A decode's report has served. While a prompt waits, the same report serves it
                # in every step.
                decodes = not state.request.is_prefill_chunk
                served = self.clock.seq - REPORT_AGE_STEPS if decodes else -1
                self.reports.hold(state.req_id, served)

    def _reserve_copies(self, state: RunningRequest, change: Change) -> None:
        num_copies = self.prefix.reserve(state, change)
        self.counters.copied_blocks += num_copies
        if change.leaves is None and change.pinned is not None:
            self.counters.shared_tokens_skipped += state.num_protected

    def _take(self, states: Sequence[RunningRequest], changes: list[Change]) -> None:
        """Bring vLLM's block tables, the prefix cache and the pool in step with changes."""
        gone: list[Block] = []
        reclaimed, cached = self.requests.num_reclaimed, self.manager.num_cached_block
        if self.prefix.caching and (self.rules.moves or not self.prefix.copies_out):
            self._forget_hashes(states, changes)
        for state, change in zip(states, changes, strict=True):
            blocks, req_id = state.blocks, state.table.req_id
            gone += apply_to_block_table(change, blocks, self.pool.null_block)
            self.counters.dropped_blocks += len(change.released)
            if change.is_compiled:
                reclaimed[req_id] = change.num_evicted  # packed from now on
            else:
                reclaimed.pop(req_id, None)
            if req_id in cached:
                cached[req_id] = min(cached[req_id], len(blocks))
        self._changed += states
        if gone:
            free_before = self.pool.get_num_free_blocks()
            self.pool.free_blocks(gone)
            self.counters.released_blocks += self.pool.get_num_free_blocks() - free_before

    def _forget_hashes(self, states: Sequence[RunningRequest], changes: list[Change]) -> None:
        """Take blocks that are about to be rewritten out of the prefix cache.

        Before any request is admitted in this step: an admission could otherwise hit one.
        """
        hashed = set()
        for state, change in zip(states, changes, strict=True):
            blocks = [state.blocks[i] for i in change.written_positions()]
            hashed |= {b.block_id for b in blocks if b.block_hash is not None}
        if hashed:
            self.pool.evict_blocks(hashed)

    # ---- end of schedule() -----------------------------------------------------------------

    def place(self, num_scheduled: dict[str, int]) -> StepPlan | None:
        """Place tokens with the real counts; None where no layout changed.

        Args:
            num_scheduled: tokens of every request of the step.
        """
        by_id = self.requests.by_id
        # The others were preempted after their change was carried out.
        states = [s for s in self._changed if by_id.get(s.table.req_id) is s]
        if self.rules.fragmentation_threshold > 0.0 and self.rules.moves:
            states += self._those_with_holes(num_scheduled)
        if not states:
            return None
        changes = [s.change for s in states if s.change is not None]  # each has one
        plan = self.ops.place(
            changes,
            [num_scheduled.get(s.table.req_id, 0) for s in states],
            lambda e, position: states[e].block_ids_from(position),
        )
        num_moves = self.counters.note_placed(changes, plan)
        for state, change, moved in zip(states, changes, num_moves, strict=True):
            state.num_moved += moved
            state.change = None
            if not change.is_compiled:  # else `_take` has said so
                self.requests.layout_settled(state)
        return plan

    def _those_with_holes(self, num_scheduled: dict[str, int]) -> list[RunningRequest]:
        """Requests whose holes stay for now: the step's single new token takes one."""
        found = []
        for req_id, n in num_scheduled.items():
            state = self.requests.by_id[req_id]
            if n == 1 and state.change is None and len(state.table.holes):
                state.sync()
                if self.checker is not None:
                    self.checker.before_change(req_id, state)
                self.reports.hold(req_id)
                state.change = Change(state.table, self.rules)
                found.append(state)
        return found

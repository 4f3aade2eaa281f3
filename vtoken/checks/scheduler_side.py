"""The scheduler's half: a step's plan against a snapshot of every request it changes.

Legend: M live tokens of a request.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np

from vtoken.checks.base import Tally
from vtoken.checks.checker import Checker
from vtoken.checks.plan import Arrival, CheckPlan, RequestCheck
from vtoken.core import invariants
from vtoken.core.messages import StepPlan
from vtoken.scheduling.requests import RunningRequest
from vtoken.scheduling.step import Step
from vtoken.units import cdiv

logger = logging.getLogger("vllm.vtoken")

LOG_EVERY_S = 60.0
NO_IDS = np.empty(0, np.int32)
NO_SLOTS = np.empty(0, np.int64)


@dataclass(slots=True)
class _Snapshot:
    """A request's layout before a step changes it; slots are vLLM's."""

    state: RunningRequest
    victims: np.ndarray
    ids: np.ndarray
    block_table: np.ndarray

    def surviving_slots(self, block_size: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32[M], slots int64[M]) of the live tokens, less the victims."""
        physical = np.flatnonzero((self.ids >= 0) & ~np.isin(self.ids, self.victims))
        row = self.block_table.astype(np.int64)
        return self.ids[physical], row[physical // block_size] * block_size + physical % block_size


class SchedulerChecker(Checker):
    """Checks tables, plans and the pool; writes the CheckPlan. Called once a step at its end.

    Attributes:
        worker_counts: what the worker had checked by its last message, `Tally.counts`.
    """

    def __init__(self, step: Step, vllm_config) -> None:
        super().__init__(vllm_config, step.config)
        self.step, self.block_size = step, step.manager.block_size
        self.worker_counts: dict[str, list[int]] = {}
        self._snapshots: dict[str, _Snapshot] = {}
        self._num_seen = 0
        self._next_log_s = time.monotonic() + LOG_EVERY_S
        self._logged_events = 0

    def before_change(self, req_id: str, state, victims: np.ndarray = NO_IDS) -> None:
        """A request's table is in step and about to be changed by this step's plan."""
        victims = np.asarray(victims, np.int32)
        known = self._snapshots.get(req_id)
        if known is not None:  # shrunk twice in one step
            known.victims = np.concatenate([known.victims, victims])
            return
        self._num_seen += 1
        if self._num_seen % self.every == 0:
            ids, row = state.table.ids_by_physical_index(), state.table.block_ids()
            self._snapshots[req_id] = _Snapshot(state, victims, ids.copy(), row.copy())

    def after_plan(self, plan: StepPlan | None, scheduler_output) -> CheckPlan | None:
        """Check what a step's plan did; runs before vLLM advances the lengths.

        Returns:
            What the workers need for their half; None when they have nothing to do.
        """
        arrivals = self._arrivals(scheduler_output)
        snapshots, self._snapshots = self._snapshots, {}
        if self.every == 1:
            self._require_snapshots(plan, snapshots)
        checks = [
            self._check_request(req_id, snapshot, plan, scheduler_output)
            for req_id, snapshot in snapshots.items()
            if self.step.requests.by_id.get(req_id) is snapshot.state  # else preempted since
        ]
        if checks:
            self._check_plan(plan, checks)
            self._check_pool()
        if not checks and not arrivals:
            return None
        return CheckPlan(self.step.clock.seq, checks, arrivals)

    # ---- what both sides found -------------------------------------------------------------

    def note_worker(self, check_counts: dict[str, list[int]] | None) -> None:
        """Take in the worker's counts, which come where something changed."""
        if check_counts is not None:
            self.worker_counts = check_counts
        now = time.monotonic()
        if now < self._next_log_s:
            return
        self._next_log_s = now + LOG_EVERY_S
        rows = self.rows()
        events = sum(row["events"] for row in rows)
        if events > self._logged_events:
            self._logged_events = events
            text = ", ".join(f"{row['name']} {row['events']:,}" for row in rows)
            logger.info("vToken: checked so far, no violation: %s", text)

    def rows(self) -> list[dict[str, object]]:
        """Result rows of this scheduler and its first worker, one per invariant."""
        total = Tally()
        total.add(self.tally)
        total.add_counts(self.worker_counts)
        return total.rows()

    def _arrivals(self, scheduler_output) -> list[Arrival]:
        found = []
        for new in scheduler_output.scheduled_new_reqs:
            request = self.step.scheduler.requests[new.req_id]
            prompt = np.array(request.prompt_token_ids, np.int32)
            found.append(Arrival(self.step.clock.seq, new.req_id, prompt, request.max_tokens))
        self.replay.extend(found)
        return found

    # ---- one request -----------------------------------------------------------------------

    def _require_snapshots(self, plan: StepPlan | None, snapshots: dict) -> None:
        """I4: every plan was made in this step."""
        for req_id in plan.req_ids if plan is not None else ():
            snapshot = snapshots.get(req_id)
            if snapshot is None or self.step.requests.by_id.get(req_id) is not snapshot.state:
                wrong = f"{req_id}: its plan was not made from its layout in this step"
                self._require("I4.snapshot", [wrong], req_id, plan)

    def _check_request(self, req_id, snapshot: _Snapshot, plan, scheduler_output) -> RequestCheck:
        table = snapshot.state.table
        n = scheduler_output.num_scheduled_tokens.get(req_id, 0)
        first_id = self.step.scheduler.requests[req_id].num_computed_tokens
        snapshot.state.sync(first_id + n)
        block_ids = [b.block_id for b in snapshot.state.blocks]
        wrong = invariants.check_unique_mapping(table) + invariants.check_block_table(
            table, block_ids
        )
        self._require("I2.table", wrong + invariants.check_packed(table), req_id, plan)
        self._check_ids(req_id, snapshot, first_id, n, plan)
        moves = (NO_SLOTS, NO_SLOTS)
        if plan is not None and req_id in plan.req_ids:
            moves = plan.moves_of(plan.req_ids.index(req_id))
        self._check_moves(req_id, snapshot, moves, plan)
        wrong = invariants.check_conservation(table)
        self._require("conservation.request", wrong, req_id, plan)
        released = np.setdiff1d(snapshot.block_table, [*block_ids, 0])
        relocates = bool(len(moves[0]) or len(released))
        if relocates:
            for name in ("I2", "I4", "conservation"):
                self.tally.count(name)
        ids_after = table.ids_by_physical_index().copy()
        return RequestCheck(
            req_id, snapshot.victims, snapshot.ids, ids_after, first_id, relocates
        )  # fmt: skip

    def _check_ids(self, req_id, snapshot: _Snapshot, first_id: int, n: int, plan) -> None:
        live = snapshot.state.table.live_ids()
        before = np.setdiff1d(snapshot.ids[snapshot.ids >= 0], snapshot.victims)
        expected = np.concatenate([before, np.arange(first_id, first_id + n)])
        if not np.array_equal(live, expected):
            odd = np.setxor1d(live, expected)
            wrong = f"{req_id}: ids {odd[:8].tolist()} were lost or came back"
            self._require("I1.ids", [wrong], req_id, plan, ids=odd)

    def _check_moves(self, req_id, snapshot: _Snapshot, moves, plan) -> None:
        """Moves start from the snapshot's live tokens, and the table has them where they go."""
        source, destination = moves
        if not len(source):
            return
        table = snapshot.state.table
        ids, slots = snapshot.surviving_slots(self.block_size)
        order = np.argsort(slots)
        at = np.searchsorted(slots[order], source).clip(max=max(len(slots) - 1, 0))
        found = len(slots) > 0 and bool((slots[order][at] == source).all())
        stay = np.setdiff1d(slots, source)
        if not found or len(np.intersect1d(stay, destination)):
            wrong = f"{req_id}: a move starts where no live token is, or ends on one"
            self._require("I4.snapshot", [wrong], req_id, plan, slots=source)
            return
        moved_ids = ids[order][at]
        bad = moved_ids[table.slots_of(table.index_of[moved_ids]) != destination]
        if len(bad):
            wrong = (
                f"{req_id}: the table does not have moved ids {bad[:8].tolist()} in their new slots"
            )
            self._require("I2.table", [wrong], req_id, plan, ids=bad)

    # ---- the step --------------------------------------------------------------------------

    def _check_plan(self, plan: StepPlan | None, checks: list[RequestCheck]) -> None:
        if plan is None:
            return
        step, N = self.step, self.block_size
        shared = {
            b.block_id
            for c in checks
            for b in step.requests.by_id[c.req_id].blocks
            if b.ref_cnt > 1 and not b.is_null
        }
        num_slots = step.pool.num_gpu_blocks * N
        wrong = invariants.check_step_plan(plan, num_slots, shared, N)
        for c in checks:
            table = step.requests.by_id[c.req_id].table
            new = table.index_of[c.first_id : table.num_computed_tokens]
            if shared.intersection((table.slots_of(new) // N).tolist()):
                wrong.append(f"{c.req_id}: a new token is written into a shared block")
            if step.config.fragmentation_threshold > 0.0 and c.req_id in plan.req_ids:
                r = plan.req_ids.index(c.req_id)
                if plan.rewrites_block_table[r]:
                    before, num_moves = cdiv(len(c.ids_before), N), len(plan.moves_of(r)[0])
                    wrong += invariants.check_release(before, len(plan.kept_of(r)), num_moves)
        self._require("I4.plan", wrong, checks[0].req_id, plan)

    def _check_pool(self) -> None:
        """Distinct blocks add up, and every block has as many references as holders."""
        pool, rows = self.step.pool, self._held_blocks()
        wrong = invariants.check_pool(pool.num_gpu_blocks, pool.get_num_free_blocks(), rows)
        held = np.fromiter((b for row in rows for b in row), np.int64)
        holders = np.bincount(held, minlength=pool.num_gpu_blocks)[1:]
        counts = np.fromiter((b.ref_cnt for b in pool.blocks[1:]), np.int64)
        odd = np.flatnonzero((counts < holders) | (counts < 0)) + 1
        if len(odd):
            wrong.append(f"blocks {odd[:8].tolist()} have fewer references than holders")
        slots = odd * self.block_size
        self._require("conservation.pool", wrong, None, None, slots=slots)

    def _held_blocks(self) -> list[list[int]]:
        """Block ids by holder: requests, and copies that were planned and not carried out."""
        copies = [copy.new_blocks for copy in self.step.prefix.copies.values()]
        holders = [*self.step.manager.req_to_blocks.values(), *copies]
        return [[b.block_id for b in blocks] for blocks in holders]

    def _require(self, check: str, wrong: list[str], req_id: str | None, plan, **details) -> None:
        step_seq = self.step.clock.seq
        self.require(check, wrong, step_seq=step_seq, req_id=req_id, plan=plan, **details)

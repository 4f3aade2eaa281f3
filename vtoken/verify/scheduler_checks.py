"""The scheduler's half: a step's plan against a snapshot of every request it changes.

Legend: M live tokens of a request.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from vtoken.core.events import StepPlan
from vtoken.core.invariants import (
    check_conservation,
    check_packed,
    check_pool,
    check_release,
    check_row,
    check_step_plan,
    check_unique_mapping,
)
from vtoken.verify.base import Tally
from vtoken.verify.checker import Checker
from vtoken.verify.plan import Arrival, CheckPlan, RequestCheck

logger = logging.getLogger("vllm.vtoken")

LOG_EVERY_S = 60.0


class _Snapshot:
    """A request's layout before a step changes it; slots are vLLM's."""

    __slots__ = ("ids", "row", "state", "victims")

    def __init__(self, state, victims: np.ndarray) -> None:
        table = state.table
        self.state, self.victims = state, victims
        self.ids = table.ids_by_physical_index().copy()
        self.row = table.row_block_ids().copy()

    def live_slots(self, block_size: int, *, after_eviction: bool) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32[M], slots int64[M]) of the live tokens."""
        physical = np.flatnonzero(self.ids >= 0)
        ids = self.ids[physical]
        if after_eviction and len(self.victims):
            stays = ~np.isin(ids, self.victims)
            ids, physical = ids[stays], physical[stays]
        row = self.row.astype(np.int64)
        return ids, row[physical // block_size] * block_size + physical % block_size


class SchedulerChecker(Checker):
    """Checks tables, plans and the pool; writes the CheckPlan. Called by `SchedulerHooks`.

    Attributes:
        worker_counts: what the worker had checked by its last message, `Tally.counts`.
    """

    def __init__(self, hooks) -> None:
        super().__init__(hooks.scheduler.vllm_config, hooks.config)
        self.hooks = hooks
        self.worker_counts: dict[str, list[int]] = {}
        self._snapshots: dict[str, _Snapshot] = {}
        self._num_seen = 0
        self._next_log_s = time.monotonic() + LOG_EVERY_S
        self._logged_events = 0

    def before_change(self, req_id: str, state, victims: np.ndarray | None = None) -> None:
        """A request's table is in step and about to be changed by this step's plan."""
        gone = np.empty(0, np.int32) if victims is None else np.asarray(victims, np.int32)
        known = self._snapshots.get(req_id)
        if known is not None:  # shrunk twice in one step
            known.victims = np.concatenate([known.victims, gone])
            return
        self._num_seen += 1
        if self._num_seen % self.every == 0:
            self._snapshots[req_id] = _Snapshot(state, gone)

    def after_plan(self, plan: StepPlan | None, scheduler_output) -> CheckPlan | None:
        """Check what a step's plan did; runs before vLLM advances the lengths.

        Returns:
            What the workers need for their half; None when they have nothing to do.
        """
        hooks = self.hooks
        arrivals = self._arrivals(scheduler_output)
        snapshots, self._snapshots = self._snapshots, {}
        if self.every == 1:
            self._require_snapshots(plan, snapshots)
        checks = []
        for req_id, snapshot in snapshots.items():
            if hooks.states.get(req_id) is snapshot.state:  # else preempted since
                checks.append(self._check_request(req_id, snapshot, plan, scheduler_output))
        if checks:
            self._check_plan(plan, checks)
            self._check_pool()
        if not checks and not arrivals:
            return None
        return CheckPlan(hooks.step_seq, checks, arrivals)

    # ---- what both sides found, for whoever asks -------------------------------------------

    def note_worker(self, counts: dict[str, list[int]] | None) -> None:
        """Take in the worker's counts so far; None: its report had no news of them."""
        if counts is not None:
            self.worker_counts = counts
        now = time.monotonic()
        if now >= self._next_log_s:
            self._next_log_s = now + LOG_EVERY_S
            rows = self.rows()
            events = sum(row["events"] for row in rows)
            if events > self._logged_events:
                self._logged_events = events
                logger.info(
                    "vToken: checked so far, no violation: %s",
                    ", ".join(f"{row['name']} {row['events']:,}" for row in rows),
                )

    def rows(self) -> list[dict[str, object]]:
        """Result rows of this scheduler and its first worker, one per invariant."""
        total = Tally()
        total.add(self.tally)
        for name, (events, violations) in self.worker_counts.items():
            total.events[name] += events
            total.violations[name] += violations
        return total.rows()

    def _arrivals(self, scheduler_output) -> list[Arrival]:
        found = []
        for new in scheduler_output.scheduled_new_reqs:
            request = self.hooks.scheduler.requests[new.req_id]
            prompt = np.array(request.prompt_token_ids, np.int32)
            found.append(Arrival(self.hooks.step_seq, new.req_id, prompt, request.max_tokens))
        self.replay.extend(found)
        return found

    def _require_snapshots(self, plan: StepPlan | None, snapshots: dict) -> None:
        """I4: every plan was made in this step."""
        for req_id in plan.req_ids if plan is not None else ():
            snapshot = snapshots.get(req_id)
            if snapshot is None or self.hooks.states.get(req_id) is not snapshot.state:
                wrong = f"{req_id}: its plan was not made from its layout in this step"
                self._require("I4.snapshot", [wrong], req_id, plan)

    def _check_request(self, req_id, snapshot: _Snapshot, plan, scheduler_output) -> RequestCheck:
        hooks, table = self.hooks, snapshot.state.table
        request, n = (
            hooks.scheduler.requests[req_id],
            scheduler_output.num_scheduled_tokens.get(req_id, 0),
        )
        first_id, blocks = request.num_computed_tokens, hooks.manager.req_to_blocks[req_id]
        hooks.sync(snapshot.state, blocks, first_id + n)
        block_ids = [b.block_id for b in blocks]
        wrong = check_unique_mapping(table) + check_row(table, block_ids) + check_packed(table)
        self._require("I2.table", wrong, req_id, plan)
        live = table.live_ids()
        self._check_ids(req_id, snapshot, live, first_id, n, plan)
        moves = self._moves_of(plan, req_id)
        self._check_moves(req_id, snapshot, moves, plan)
        self._require("conservation.request", check_conservation(table), req_id, plan)
        released = np.setdiff1d(snapshot.row, [*block_ids, 0])
        relocates = bool(len(moves[0]) or len(released))
        if relocates:
            for name in ("I2", "I4", "conservation"):
                self.tally.count(name)
        return RequestCheck(
            req_id, snapshot.victims, snapshot.ids, table.ids_by_physical_index().copy(),
            first_id, relocates,
        )  # fmt: skip

    def _check_ids(self, req_id, snapshot: _Snapshot, live, first_id: int, n: int, plan) -> None:
        before = np.setdiff1d(snapshot.ids[snapshot.ids >= 0], snapshot.victims)
        expected = np.concatenate([before, np.arange(first_id, first_id + n)])
        if not np.array_equal(live, expected):
            odd = np.setxor1d(live, expected)
            wrong = f"{req_id}: ids {odd[:8].tolist()} were lost or came back"
            self._require("I1.ids", [wrong], req_id, plan, ids=odd)

    @staticmethod
    def _moves_of(plan: StepPlan | None, req_id: str) -> tuple[np.ndarray, np.ndarray]:
        if plan is None or req_id not in plan.req_ids:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return plan.moves_of(plan.req_ids.index(req_id))

    def _check_moves(self, req_id, snapshot: _Snapshot, moves, plan) -> None:
        """Moves start from the snapshot's live tokens, and the table has them where they go."""
        source, destination = moves
        if not len(source):
            return
        N, table = self.hooks.block_size, snapshot.state.table
        ids, slots = snapshot.live_slots(N, after_eviction=True)
        order = np.argsort(slots)
        at = np.searchsorted(slots[order], source).clip(max=max(len(slots) - 1, 0))
        found = len(slots) > 0 and bool((slots[order][at] == source).all())
        stay = np.setdiff1d(slots, source)
        if not found or len(np.intersect1d(stay, destination)):
            wrong = f"{req_id}: a move starts where no live token is, or ends on one"
            self._require("I4.snapshot", [wrong], req_id, plan, slots=source)
            return
        moved_ids = ids[order][at]
        now = table.slots_of(table.index_of[moved_ids])
        if not np.array_equal(now, destination):
            bad = moved_ids[now != destination]
            wrong = (
                f"{req_id}: the table does not have moved ids {bad[:8].tolist()} in their new slots"
            )
            self._require("I2.table", [wrong], req_id, plan, ids=bad)

    def _check_plan(self, plan: StepPlan | None, checks: list[RequestCheck]) -> None:
        if plan is None:
            return
        hooks, N = self.hooks, self.hooks.block_size
        shared: set[int] = set()
        for c in checks:
            blocks = hooks.manager.req_to_blocks[c.req_id]
            shared.update(b.block_id for b in blocks if b.ref_cnt > 1 and not b.is_null)
        wrong = check_step_plan(plan, hooks.pool.num_gpu_blocks * N, shared, N)
        for c in checks:
            table = hooks.states[c.req_id].table
            new = table.index_of[c.first_id : table.num_computed_tokens]
            if shared.intersection((table.slots_of(new) // N).tolist()):
                wrong.append(f"{c.req_id}: a new token is written into a shared block")
            if hooks.config.fragmentation_threshold > 0.0 and c.req_id in plan.req_ids:
                r = plan.req_ids.index(c.req_id)
                if plan.rewrites_row[r]:
                    num_moves = len(plan.moves_of(r)[0])
                    wrong += check_release(self._row_len(c), len(plan.row_of(r)), num_moves)
        self._require("I4.plan", wrong, checks[0].req_id, plan)

    def _row_len(self, check: RequestCheck) -> int:
        return -(-len(check.ids_before) // self.hooks.block_size)

    def _check_pool(self) -> None:
        """Distinct blocks add up, and every block has as many references as holders."""
        pool, rows = self.hooks.pool, self.hooks.manager.req_to_blocks.values()
        rows = [[b.block_id for b in row] for row in rows]
        # Taken for copies that were planned and not carried out; given back in the next step.
        copies = self.hooks.shares.copies.values()
        rows += [[b.block_id for b in plan.new_blocks] for plan in copies]
        wrong = check_pool(pool.num_gpu_blocks, pool.get_num_free_blocks(), rows)
        held = np.fromiter((b for row in rows for b in row), np.int64)
        holders = np.bincount(held, minlength=pool.num_gpu_blocks)[1:]
        counts = np.fromiter((b.ref_cnt for b in pool.blocks[1:]), np.int64)
        odd = np.flatnonzero(counts < holders) + 1
        odd = np.union1d(odd, np.flatnonzero(counts < 0) + 1)
        if len(odd):
            wrong.append(f"blocks {odd[:8].tolist()} have fewer references than holders")
        if self.tally.is_on("conservation.pool") and wrong:
            slots = odd * self.hooks.block_size
            self.fail(
                "conservation.pool", "; ".join(wrong), step_seq=self.hooks.step_seq, slots=slots
            )

    def _require(self, check: str, wrong: list[str], req_id: str, plan, **details) -> None:
        self.require(
            check, wrong, step_seq=self.hooks.step_seq, req_id=req_id, plan=plan, **details
        )

"""The invariants watched online, in the scheduler and in the worker (config `hash_kv_every`).

The two sides keep books of their own and compare them at every relocation event:

    scheduler  a snapshot of a request's table before it changes; after the plan is made, the
               table, the plan and the pool must be what the snapshot and the victims give
    worker     ids by slot from what it wrote itself (slot mapping and positions) and from the
               moves it ran; K/V hashes of the layout it used in its last step against those of
               the layout it is about to use

The order of ids comes from the scheduler, on a CheckPlan beside the StepPlan.

Legend: M slots of a request, S slots of the pool, R requests.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from vtoken.core.events import StepPlan
from vtoken.core.invariants import (
    check_conservation,
    check_pool,
    check_release,
    check_row,
    check_step_plan,
    check_table,
    check_unique_mapping,
)
from vtoken.errors import InvariantViolation
from vtoken.verify.base import Tally, invariant_of
from vtoken.verify.hashing import SlotHasher, digest
from vtoken.verify.operations import OperationLog, check_order
from vtoken.verify.plan import Arrival, CheckPlan, RequestCheck
from vtoken.verify.report import ReplayLog, make_report, save_report

logger = logging.getLogger("vllm.vtoken")


def replay_settings(vllm_config) -> dict[str, object]:
    """What an engine of the same behaviour is built from; keys are EngineSettings' fields."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    scheduler = vllm_config.scheduler_config
    blocks = cache.num_gpu_blocks or cache.num_gpu_blocks_override
    return {
        "model": model.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "seed": model.seed,
        "max_model_len": model.max_model_len,
        "block_size": cache.block_size,
        "num_kv_blocks": blocks - 1 if blocks else None,  # less the null block
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "async_scheduling": bool(scheduler.async_scheduling) or None,
    }


class Checker:
    """What both sides share: the tally, the report, and how a run is stopped.

    Attributes:
        tally: events and violations so far.
        report_dir: where a report is written besides being raised; None: nowhere.
    """

    def __init__(self, vllm_config, config) -> None:
        self.every = config.hash_kv_every
        self.tally = Tally()
        self.report_dir: Path | None = Path(".")
        self.replay = ReplayLog(replay_settings(vllm_config), config.model_dump(mode="json"))

    def fail(self, check: str, message: str, **details) -> None:
        """Stop the run.

        Raises:
            InvariantViolation: always; `report` tells everything.
        """
        name = invariant_of(check)
        self.tally.violations[name] += 1
        report = make_report(check, message, replay=self.replay, **details)
        if self.report_dir is not None:
            path = save_report(report, self.report_dir)
            logger.error("vToken: %s violated: %s; report: %s", name, message, path)
        raise InvariantViolation(name, message, report)

    def require(self, check: str, wrong: list[str], **details) -> None:
        """Stop the run if there is something wrong and the check is not left out."""
        if wrong and self.tally.is_on(check):
            self.fail(check, "; ".join(wrong[:4]), **details)


# ---- scheduler ----------------------------------------------------------------------------------


class _Snapshot:
    """A request's layout before a step changes it; slots are vLLM's."""

    __slots__ = ("state", "ids", "row", "victims")

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
    """Checks tables, plans and the pool; writes the CheckPlan. Called by `SchedulerHooks`."""

    def __init__(self, hooks) -> None:
        super().__init__(hooks.scheduler.vllm_config, hooks.config)
        self.hooks = hooks
        self._snapshots: dict[str, _Snapshot] = {}
        self._num_seen = 0

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

    def _arrivals(self, scheduler_output) -> list[Arrival]:
        found = []
        for new in scheduler_output.scheduled_new_reqs:
            request = self.hooks.scheduler.requests[new.req_id]
            prompt = [int(t) for t in request.prompt_token_ids]
            found.append(Arrival(self.hooks.step_seq, new.req_id, prompt, request.max_tokens))
        self.replay.arrivals.extend(found)
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
        request, n = hooks.scheduler.requests[req_id], scheduler_output.num_scheduled_tokens.get(req_id, 0)
        first_id, blocks = request.num_computed_tokens, hooks.manager.req_to_blocks[req_id]
        hooks.sync(snapshot.state, blocks, first_id + n)
        block_ids = [b.block_id for b in blocks]
        wrong = check_unique_mapping(table) + check_row(table, block_ids)
        self._require("I2.table", wrong or check_table(table), req_id, plan)
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
            wrong = f"{req_id}: the table does not have moved ids {bad[:8].tolist()} in their new slots"
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
            self.fail("conservation.pool", "; ".join(wrong), step_seq=self.hooks.step_seq, slots=slots)

    def _require(self, check: str, wrong: list[str], req_id: str, plan, **details) -> None:
        self.require(
            check, wrong, step_seq=self.hooks.step_seq, req_id=req_id, plan=plan, **details
        )


# ---- worker -------------------------------------------------------------------------------------


class _Before:
    """A request's live tokens in the layout of the last step, less the victims; sorted by id."""

    __slots__ = ("ids", "hashes", "scores", "slots")

    def __init__(self, ids, hashes, scores, slots) -> None:
        self.ids, self.hashes, self.scores, self.slots = ids, hashes, scores, slots


class WorkerChecker(Checker):
    """Checks layouts, K/V, order, positions and scores. Called by the runner.

    Attributes:
        labels: int32[S], the logical id that the worker last put in each slot; -1: not known.
        records: uint32[S], the hash of what was computed for it; valid where `recorded`.
        lengths: per request, slots its attention covered in its last step.
    """

    def __init__(self, runner, attention, vllm_config, config) -> None:
        super().__init__(vllm_config, config)
        self.attention = attention
        self.block_size = attention.block_size
        num_slots = attention.kvs[0].shape[0] * self.block_size
        self.hasher = SlotHasher(attention.kvs, attention.layout)
        self.labels = np.full(num_slots, -1, np.int32)
        self.records = np.zeros(num_slots, np.uint32)
        self.recorded = np.zeros(num_slots, bool)
        self.lengths: dict[str, int] = {}
        self.log = OperationLog()
        self._plan: CheckPlan | None = None
        self._step_plan: StepPlan | None = None
        self._before: dict[str, _Before] = {}
        self._written = np.empty(0, np.int64)
        self._undo = []
        self._watch(runner)

    # ---- recording ---------------------------------------------------------------------------

    def _watch(self, runner) -> None:
        """Record moves, zeroing, KV writes and attention where they happen."""
        first = self.attention.layers[0].impl

        def after(owner, name, note):
            inner = getattr(owner, name)

            def watched(*args, **kwargs):
                out = inner(*args, **kwargs)
                note(*args, **kwargs)
                return out

            setattr(owner, name, watched)
            self._undo.append((owner, name, inner))

        after(self.attention, "move", self._note_move)
        after(runner, "_zero_block_ids", self._note_zero)
        after(first, "do_kv_cache_update", lambda *a, **k: self.log.record("write", self._written))
        after(first, "forward", lambda *a, **k: self.log.record("attention"))

    def stop(self) -> None:
        """Take the recording off."""
        for owner, name, inner in reversed(self._undo):
            setattr(owner, name, inner)
        self._undo.clear()

    def _note_move(self, source: np.ndarray, destination: np.ndarray) -> None:
        self.log.record("move", source, destination)
        for book in (self.labels, self.records, self.recorded):
            book[destination] = book[source]

    def _note_zero(self, block_ids) -> None:
        slots = self._block_slots(block_ids)
        self.log.record("zero", slots)
        self.labels[slots] = -1
        self.recorded[slots] = False

    def _note_copies(self, copies) -> None:
        """vLLM's copy-on-write of blocks, which `_update_states` ran after zeroing."""
        pairs = np.array([(c.src_block_id, c.dst_block_id) for c in copies], np.int64)
        source, destination = self._block_slots(pairs[:, 0]), self._block_slots(pairs[:, 1])
        self.log.record("copy", destination, source)
        for book in (self.labels, self.records, self.recorded):
            book[destination] = book[source]

    def _block_slots(self, block_ids) -> np.ndarray:
        blocks = np.asarray(block_ids, np.int64)
        return (blocks[:, None] * self.block_size + np.arange(self.block_size)).reshape(-1)

    # ---- before the moves --------------------------------------------------------------------

    def before_moves(self, runner, scheduler_output) -> None:
        """Hash the layouts of the last step, of all requests that change in this one."""
        self._plan = plan = getattr(scheduler_output, "vtoken_check", None)
        self._step_plan = getattr(scheduler_output, "vtoken", None)
        self._before = {}
        self.log.begin_step(plan.step_seq if plan is not None else self.log.step_seq + 1)
        for req_id in scheduler_output.finished_req_ids:
            self.lengths.pop(req_id, None)
        for req_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self.lengths.pop(req_id, None)
        if plan is None:
            return
        self.replay.arrivals.extend(plan.arrivals)
        slots_of, masks = {}, runner.vtoken_layouts.masks
        for c in plan.requests:
            length = self.lengths.get(c.req_id)
            if length is None:
                wrong = f"{c.req_id}: planned for, but this worker holds no KV of it"
                self._require("I4.snapshot", [wrong], c)
                continue
            row = np.asarray(runner.requests[c.req_id].block_ids[0], np.int64)
            slots_of[c.req_id] = self._live_slots(row, length, masks.get(c.req_id))
        if slots_of:
            self._take_before(plan, slots_of)

    def _live_slots(self, row: np.ndarray, length: int, mask) -> np.ndarray:
        """int64[M], slots of a layout's live tokens by physical index."""
        N = self.block_size
        physical = np.arange(length)
        if mask is not None:
            covered = mask[:length]
            keep = np.ones(length, bool)
            keep[: len(covered)] = covered
            physical = physical[keep]
        return row[physical // N] * N + physical % N

    def _take_before(self, plan: CheckPlan, slots_of: dict[str, np.ndarray]) -> None:
        hashes = self._hash(list(slots_of.values()))
        for c in plan.requests:
            slots = slots_of.get(c.req_id)
            if slots is None:
                continue
            h = hashes.pop(0)
            ids = c.ids_before[c.ids_before >= 0]
            if not self._agree(c, slots, ids, "before the step"):
                continue
            known = self.recorded[slots]
            bad = known & (self.records[slots] != h)
            if bad.any():
                wrong = f"{c.req_id}: K/V of ids {ids[bad][:8].tolist()} changed since computed"
                self._require("I1.written", [wrong], c, ids=ids[bad], slots=slots[bad])
            stays = ~np.isin(ids, c.victims)
            order = np.argsort(ids[stays])
            slots = slots[stays][order]
            scores = self.attention.scores
            taken = None if scores is None else scores.numpy()[slots]
            self._before[c.req_id] = _Before(ids[stays][order], h[stays][order], taken, slots)

    def _hash(self, parts: list[np.ndarray]) -> list[np.ndarray]:
        """Hash several requests' slots at once."""
        hashes = self.hasher.hash_slots(np.concatenate(parts))
        self.tally.hashed_tokens += len(hashes)
        return np.split(hashes, np.cumsum([len(p) for p in parts])[:-1])

    def _agree(self, c: RequestCheck, slots: np.ndarray, ids: np.ndarray, when: str) -> bool:
        """The worker's own labels of its live slots are the ids the scheduler has there."""
        if len(slots) != len(ids):
            labels = self.labels[slots]
            odd = np.setxor1d(labels[labels >= 0], ids)
            wrong = f"{c.req_id}: {len(slots)} live tokens {when}, the scheduler has {len(ids)}"
            self._require("I1.ids", [wrong], c, ids=odd, slots=slots)
            return False
        low, high = self.block_size, len(self.labels)
        valid = not len(slots) or (slots.min() >= low and slots.max() < high)
        if not valid or len(np.unique(slots)) != len(slots):
            wrong = f"{c.req_id}: a slot is used twice, or lies outside the pool, {when}"
            self._require("I2.worker", [wrong], c, slots=slots)
            return False
        labels = self.labels[slots]
        unknown = labels < 0  # computed before anybody watched
        self.labels[slots[unknown]] = ids[unknown]
        bad = ~unknown & (labels != ids)
        if bad.any():
            wrong = (
                f"{c.req_id}: slots {slots[bad][:8].tolist()} hold ids {labels[bad][:8].tolist()} "
                f"{when}, the scheduler has ids {ids[bad][:8].tolist()} there"
            )
            self._require("I2.worker", [wrong], c, ids=ids[bad], slots=slots[bad])
            return False
        return True

    # ---- before attention --------------------------------------------------------------------

    def before_attention(self, runner, scheduler_output) -> None:
        """Compare; the rows are final, moves and zeroing are done, attention has not begun."""
        if scheduler_output.kv_cache_block_copies:
            self._note_copies(scheduler_output.kv_cache_block_copies)
        self._check_order()
        batch, n = runner.input_batch, runner.input_batch.num_reqs
        starts = runner.query_start_loc.np[: n + 1]
        total = int(starts[n])
        positions = runner.positions[:total].cpu().numpy()
        self._check_positions(batch, starts, positions, scheduler_output)
        # A copy: vLLM fills this buffer anew while an async step is still to be recorded.
        slots = batch.block_table[0].slot_mapping.gpu[:total].cpu().numpy().astype(np.int64)
        if self._before:
            self._check_after(runner, starts, slots)
        self.labels[slots] = positions
        self.recorded[slots] = False
        self._written = slots
        self.lengths.update(zip(batch.req_ids, runner.seq_lens[:n].tolist(), strict=True))

    def _check_order(self) -> None:
        plan = self._step_plan
        if plan is None or not len(plan.move_source):
            return
        wrong = check_order(self.log.current, plan.move_source, plan.move_destination)
        self._require("I3.order", wrong, None, slots=plan.move_source)

    def _check_positions(self, batch, starts, positions, scheduler_output) -> None:
        cached = scheduler_output.scheduled_cached_reqs
        first = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        first.update((r.req_id, r.num_computed_tokens) for r in scheduler_output.scheduled_new_reqs)
        counts = np.diff(starts)
        begin = np.array([first[r] for r in batch.req_ids], np.int64)
        expected = np.repeat(begin - starts[:-1], counts) + np.arange(len(positions))
        self.tally.count("positions", len(positions))
        bad = np.flatnonzero(positions != expected)
        if len(bad) and self.tally.is_on("positions"):
            r = int(np.searchsorted(starts, bad[0], side="right")) - 1
            req_id = batch.req_ids[r]
            self.fail(
                "positions",
                f"{req_id}: the model is given position {positions[bad[0]]} for id {expected[bad[0]]}",
                step_seq=self.log.step_seq, req_id=req_id, ids=expected[bad], log=self.log,
                plan=self._step_plan,
            )  # fmt: skip

    def _check_after(self, runner, starts, new_slots) -> None:
        checks = [c for c in self._plan.requests if c.req_id in self._before]
        parts, ids_of, kept = [], [], []
        for c in checks:
            slots, ids = self._after_layout(runner, c, starts, new_slots)
            if self._agree(c, slots, ids, "after the step's changes"):
                order = np.argsort(ids)
                parts.append(slots[order])
                ids_of.append(ids[order])
                kept.append(c)
        if not kept:
            return
        for c, slots, ids, h in zip(kept, parts, ids_of, self._hash(parts), strict=True):
            self._compare(c, slots, ids, h)

    def _after_layout(self, runner, c: RequestCheck, starts, new_slots):
        """Live slots and ids of all tokens computed before this step, by physical index."""
        mask = runner.vtoken_layouts.masks.get(c.req_id)
        index = runner.input_batch.req_id_to_index.get(c.req_id)
        ids = c.ids_after[(c.ids_after >= 0) & (c.ids_after < c.first_id)]
        if index is None:  # planned for, but not scheduled in this step
            row = np.asarray(runner.requests[c.req_id].block_ids[0], np.int64)
            self.lengths[c.req_id] = len(c.ids_after)
            return self._live_slots(row, len(c.ids_after), mask), ids
        table = runner.input_batch.block_table[0].block_table.np
        slots = self._live_slots(
            table[index].astype(np.int64), int(runner.seq_lens[index]), mask
        )
        own = new_slots[starts[index] : starts[index + 1]]
        return slots[~np.isin(slots, own)], ids

    def _compare(self, c: RequestCheck, slots, ids, hashes) -> None:
        before = self._before[c.req_id]
        if c.relocates:
            self.tally.count("I1")
        if not np.array_equal(ids, before.ids):
            odd = np.setxor1d(ids, before.ids)
            wrong = f"{c.req_id}: ids {odd[:8].tolist()} were lost or came back"
            self._require("I1.ids", [wrong], c, ids=odd)
            return
        if digest(ids, hashes) != digest(before.ids, before.hashes):
            bad = hashes != before.hashes
            wrong = (
                f"{c.req_id}: K/V of ids {ids[bad][:8].tolist()} changed on the way from slots "
                f"{before.slots[bad][:8].tolist()} to {slots[bad][:8].tolist()}"
            )
            self._require("I1.relocated", [wrong], c, ids=ids[bad], slots=slots[bad])
        if before.scores is not None:
            if c.relocates:
                self.tally.count("scores")
            now = self.attention.scores.numpy()[slots]
            bad = now != before.scores
            if bad.any():
                wrong = f"{c.req_id}: the scores of ids {ids[bad][:8].tolist()} did not move along"
                self._require("scores", [wrong], c, ids=ids[bad], slots=slots[bad])

    # ---- after attention ---------------------------------------------------------------------

    def after_attention(self) -> None:
        """Check the step's whole trace, and remember what was computed."""
        plan = self._step_plan
        if plan is not None and len(plan.move_source):
            self.tally.count("I3")
            self._check_order()
        if self.every == 1 and len(self._written):
            self.records[self._written] = self.hasher.hash_slots(self._written)
            self.recorded[self._written] = True
        self._written = np.empty(0, np.int64)

    def _require(self, check: str, wrong: list[str], c: RequestCheck | None, **details) -> None:
        req_id = c.req_id if c is not None else None
        if c is None and self._step_plan is not None and self._step_plan.req_ids:
            req_id = self._step_plan.req_ids[0]
        self.require(
            check, wrong, step_seq=self.log.step_seq, req_id=req_id, plan=self._step_plan,
            log=self.log, **details,
        )  # fmt: skip


def make_worker_checker(runner, config) -> WorkerChecker | None:
    """A checker for a runner whose KV is set up, if the config asks for one."""
    if not config.hash_kv_every or runner.vtoken_attention is None:
        return None
    return WorkerChecker(runner, runner.vtoken_attention, runner.vllm_config, config)


def tallies(engine) -> Tally:
    """The sum of both sides' tallies of an in-process engine."""
    total = Tally()
    for checker in checkers(engine):
        total.add(checker.tally)
    return total


def checkers(engine) -> list[Checker]:
    """Both sides' checkers of an in-process engine; empty where checks are off."""
    found = [getattr(engine.hooks, "checker", None), getattr(engine.runner, "vtoken_checker", None)]
    return [c for c in found if c is not None]


__all__ = [
    "Checker", "SchedulerChecker", "WorkerChecker", "checkers", "make_worker_checker", "tallies",
]  # fmt: skip

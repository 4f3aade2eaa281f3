"""The worker's half: K/V, order, positions and scores, from books that the worker keeps itself.

Before a step's moves it hashes the layouts used in the last step; before attention, the layouts
about to be used. Which id a slot holds it knows from what it wrote (slot mapping and positions)
and moved; the scheduler's CheckPlan says which id it should be.

Legend: M live tokens of a request, S slots of the pool.
"""

from __future__ import annotations

import numpy as np

from vtoken.core.events import StepPlan
from vtoken.verify.checker import Checker
from vtoken.verify.hashing import SlotHasher, digest
from vtoken.verify.operations import OperationLog, check_order
from vtoken.verify.plan import CheckPlan, RequestCheck


class _Before:
    """A request's live tokens in the layout of the last step, less the victims; sorted by id."""

    __slots__ = ("hashes", "ids", "scores", "slots")

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
        self._told: dict[str, list[int]] = {}
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
        sent = getattr(scheduler_output, "vtoken", None)
        self._plan = plan = None if sent is None else sent.check
        self._step_plan = getattr(scheduler_output, "vtoken", None)
        self._before = {}
        self.log.begin_step(plan.step_seq if plan is not None else self.log.step_seq + 1)
        for req_id in scheduler_output.finished_req_ids:
            self.lengths.pop(req_id, None)
        for req_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self.lengths.pop(req_id, None)
        if plan is None:
            return
        self.replay.extend(plan.arrivals)
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
        slots = self._live_slots(table[index].astype(np.int64), int(runner.seq_lens[index]), mask)
        own = new_slots[starts[index] : starts[index + 1]]
        return slots[~np.isin(slots, own)], ids

    def _compare(self, c: RequestCheck, slots, ids, hashes) -> None:
        before = self._before[c.req_id]
        self.tally.changes += 1
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

    def take_counts(self) -> dict[str, list[int]] | None:
        """What was checked so far, where it grew since the last call: for the scheduler."""
        counts = self.tally.counts()
        if counts == self._told:
            return None
        self._told = counts
        return counts

    def _require(self, check: str, wrong: list[str], c: RequestCheck | None, **details) -> None:
        req_id = c.req_id if c is not None else None
        if c is None and self._step_plan is not None and self._step_plan.req_ids:
            req_id = self._step_plan.req_ids[0]
        self.require(
            check, wrong, step_seq=self.log.step_seq, req_id=req_id, plan=self._step_plan,
            log=self.log, **details,
        )  # fmt: skip

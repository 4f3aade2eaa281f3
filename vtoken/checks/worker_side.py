"""The worker's half: K/V, order, positions and scores, from books that the worker keeps itself.

Before a step's moves it hashes the layouts used in the last step; before attention, the layouts
about to be used. Which id a slot holds it knows from what it wrote (slot mapping and positions)
and moved; the scheduler's CheckPlan says which id it should be.

Legend: M live tokens of a request, S slots of the pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vtoken.checks.checker import Checker
from vtoken.checks.hashing import SlotHasher, digest
from vtoken.checks.operations import NO_SLOTS, check_order
from vtoken.checks.plan import CheckPlan, RequestCheck, first_ids
from vtoken.checks.slot_books import SlotBooks
from vtoken.core.messages import StepPlan


@dataclass(slots=True)
class _Before:
    """A request's live tokens in the layout of the last step, less the victims; sorted by id."""

    ids: np.ndarray
    hashes: np.ndarray
    scores: np.ndarray | None
    slots: np.ndarray


class WorkerChecker(Checker):
    """Checks layouts, K/V, order, positions and scores. Called by the runner.

    Attributes:
        books: what the worker put in each slot.
        lengths: per request, slots its attention covered in its last step.
    """

    def __init__(self, runner, config) -> None:
        super().__init__(runner.vllm_config, config)
        self.attention = attention = runner.vtoken_attention
        self.block_size = attention.block_size
        self.hasher = SlotHasher(attention.kvs, attention.layout)
        self.books = SlotBooks(attention.kvs[0].shape[0] * self.block_size, self.block_size)
        self.books.listen(runner, attention)
        self.lengths: dict[str, int] = {}
        self._plan: CheckPlan | None = None
        self._step_plan: StepPlan | None = None
        self._before: dict[str, _Before] = {}
        self._told: dict[str, list[int]] = {}

    def stop(self) -> None:
        """Watch the runner no more."""
        self.books.stop()

    # ---- before the moves --------------------------------------------------------------------

    def before_moves(self, runner, scheduler_output) -> None:
        """Hash the layouts of the last step, of all requests that change in this one."""
        sent = getattr(scheduler_output, "vtoken", None)
        self._plan = plan = None if sent is None else sent.check
        self._step_plan = getattr(scheduler_output, "vtoken", None)
        self._before = {}
        log = self.books.log
        log.begin_step(plan.step_seq if plan is not None else log.step_seq + 1)
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        for req_id in (*scheduler_output.finished_req_ids, *resumed):
            self.lengths.pop(req_id, None)
        if plan is None:
            return
        self.replay.extend(plan.arrivals)
        slots_of, masks = {}, runner.vtoken_layouts.masks
        for c in plan.requests:
            length = self.lengths.get(c.req_id)
            if length is None:
                wrong = f"{c.req_id}: planned for, but this worker holds no KV of it"
                self._require("I4.snapshot", [wrong], c.req_id)
                continue
            row = np.asarray(runner.requests[c.req_id].block_ids[0], np.int64)
            slots_of[c.req_id] = self._live_slots(row, length, masks.get(c.req_id))
        if slots_of:
            self._take_before(plan, slots_of)

    def _live_slots(self, row: np.ndarray, length: int, mask) -> np.ndarray:
        """int64[M], slots of a layout's live tokens by physical index."""
        N = self.block_size
        live = np.ones(length, bool)
        if mask is not None:
            covered = mask[:length]
            live[: len(covered)] = covered
        physical = np.flatnonzero(live)
        return row[physical // N] * N + physical % N

    def _take_before(self, plan: CheckPlan, slots_of: dict[str, np.ndarray]) -> None:
        hashes = self._hash(list(slots_of.values()))
        for c in plan.requests:
            if c.req_id not in slots_of:
                continue
            slots, h = slots_of[c.req_id], hashes.pop(0)
            ids = c.ids_before[c.ids_before >= 0]
            if not self._agree(c, slots, ids, "before the step"):
                continue
            bad = self.books.recorded[slots] & (self.books.records[slots] != h)
            if bad.any():
                wrong = f"{c.req_id}: K/V of ids {ids[bad][:8].tolist()} changed since computed"
                self._require("I1.written", [wrong], c.req_id, ids=ids[bad], slots=slots[bad])
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
        book = self.books.labels
        if len(slots) != len(ids):
            labels = book[slots]
            odd = np.setxor1d(labels[labels >= 0], ids)
            wrong = f"{c.req_id}: {len(slots)} live tokens {when}, the scheduler has {len(ids)}"
            self._require("I1.ids", [wrong], c.req_id, ids=odd, slots=slots)
            return False
        low, high = self.block_size, len(book)
        valid = not len(slots) or (slots.min() >= low and slots.max() < high)
        if not valid or len(np.unique(slots)) != len(slots):
            wrong = f"{c.req_id}: a slot is used twice, or lies outside the pool, {when}"
            self._require("I2.worker", [wrong], c.req_id, slots=slots)
            return False
        labels = book[slots]
        unknown = labels < 0  # computed before the checks began
        book[slots[unknown]] = ids[unknown]
        bad = ~unknown & (labels != ids)
        if bad.any():
            wrong = (
                f"{c.req_id}: slots {slots[bad][:8].tolist()} hold ids {labels[bad][:8].tolist()} "
                f"{when}, the scheduler has ids {ids[bad][:8].tolist()} there"
            )
            self._require("I2.worker", [wrong], c.req_id, ids=ids[bad], slots=slots[bad])
            return False
        return True

    # ---- before attention --------------------------------------------------------------------

    def before_attention(self, runner, scheduler_output) -> None:
        """Compare; the rows are final, moves and zeroing are done, attention has not begun."""
        if scheduler_output.kv_cache_block_copies:
            self.books.note_block_copies(scheduler_output.kv_cache_block_copies)
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
        self.books.expect_tokens(slots, positions)
        self.lengths.update(zip(batch.req_ids, runner.seq_lens[:n].tolist(), strict=True))

    def _check_order(self) -> None:
        plan = self._step_plan
        if plan is None or not len(plan.move_source):
            return
        wrong = check_order(self.books.log.current, plan.move_source, plan.move_destination)
        self._require("I3.order", wrong, None, slots=plan.move_source)

    def _check_positions(self, batch, starts, positions, scheduler_output) -> None:
        first, counts = first_ids(scheduler_output), np.diff(starts)
        begin = np.array([first[r] for r in batch.req_ids], np.int64)
        expected = np.repeat(begin - starts[:-1], counts) + np.arange(len(positions))
        self.tally.count("positions", len(positions))
        bad = np.flatnonzero(positions != expected)
        if len(bad):
            r = int(np.searchsorted(starts, bad[0], side="right")) - 1
            req_id = batch.req_ids[r]
            position, logical = positions[bad[0]], expected[bad[0]]
            wrong = f"{req_id}: the model is given position {position} for id {logical}"
            self._require("positions", [wrong], req_id, ids=expected[bad])

    def _check_after(self, runner, starts, new_slots) -> None:
        agreed = []
        for c in self._plan.requests:
            if c.req_id not in self._before:
                continue
            slots, ids = self._after_layout(runner, c, starts, new_slots)
            if self._agree(c, slots, ids, "after the step's changes"):
                order = np.argsort(ids)
                agreed.append((c, slots[order], ids[order]))
        if not agreed:
            return
        hashes = self._hash([slots for _, slots, _ in agreed])
        for (c, slots, ids), h in zip(agreed, hashes, strict=True):
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
            self._require("I1.ids", [wrong], c.req_id, ids=odd)
            return
        if digest(ids, hashes) != digest(before.ids, before.hashes):
            bad = hashes != before.hashes
            wrong = (
                f"{c.req_id}: K/V of ids {ids[bad][:8].tolist()} changed on the way from slots "
                f"{before.slots[bad][:8].tolist()} to {slots[bad][:8].tolist()}"
            )
            self._require("I1.relocated", [wrong], c.req_id, ids=ids[bad], slots=slots[bad])
        if before.scores is not None:
            if c.relocates:
                self.tally.count("scores")
            now = self.attention.scores.numpy()[slots]
            bad = now != before.scores
            if bad.any():
                wrong = f"{c.req_id}: the scores of ids {ids[bad][:8].tolist()} did not move along"
                self._require("scores", [wrong], c.req_id, ids=ids[bad], slots=slots[bad])

    # ---- after attention ---------------------------------------------------------------------

    def after_attention(self) -> None:
        """Check the step's whole trace, and remember what was computed."""
        plan = self._step_plan
        if plan is not None and len(plan.move_source):
            self.tally.count("I3")
            self._check_order()
        books, written = self.books, self.books.written
        if self.every == 1 and len(written):
            books.records[written] = self.hasher.hash_slots(written)
            books.recorded[written] = True
        books.written = NO_SLOTS

    def take_counts(self) -> dict[str, list[int]] | None:
        """What was checked so far, where it grew since the last call: for the scheduler."""
        counts = self.tally.counts()
        if counts == self._told:
            return None
        self._told = counts
        return counts

    def _require(self, check: str, wrong: list[str], req_id: str | None, **details) -> None:
        plan, log = self._step_plan, self.books.log
        if req_id is None and plan is not None and plan.req_ids:
            req_id = plan.req_ids[0]
        self.require(
            check, wrong, step_seq=log.step_seq, req_id=req_id, plan=plan, log=log, **details
        )

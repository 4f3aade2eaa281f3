"""A worker without a model: KV slots that hold the numbers of `vtoken.verify.contents`.

`WorkerModel.execute` applies a SchedulerOutput and its StepPlan in the order runner V1 does
(`vtoken.vllm_plugin.runner_v1`): moves, rows, layouts, vLLM's own work, attention. It imports
neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vtoken.checks.plan import first_ids
from vtoken.core.messages import MASK_GIVEN, MASK_PACKED, StepPlan
from vtoken.errors import InvariantViolation
from vtoken.units import cdiv
from vtoken.verify.contents import Read, chunk_contents, mix, sample, sum_of


@dataclass(slots=True)
class WorkerRequest:
    """A request as the worker knows it; `mask` covers physical indices, those beyond are live."""

    req_id: str
    tokens: list[int]
    block_ids: list[int]
    num_reclaimed: int = 0
    mask: np.ndarray | None = None


@dataclass
class WorkerModel:
    """KV slots and requests of one worker.

    Attributes:
        num_blocks: blocks in the pool, the null block included.
        kv: uint64[num_blocks * block_size], contents by slot.
        labels: (request id, logical id) that wrote each slot; moved with its content.
        requests: by id. reads: of the last executed step, by request id.
    """

    num_blocks: int
    block_size: int
    requests: dict[str, WorkerRequest] = field(default_factory=dict)
    reads: dict[str, Read] = field(default_factory=dict)

    def __post_init__(self) -> None:
        num_slots = self.num_blocks * self.block_size
        # Never written: a number that no computed token has (and finite, as real slots are kept).
        self.kv = np.arange(1, num_slots + 1, dtype=np.uint64)
        self.labels: list[tuple[str, int] | None] = [None] * num_slots
        self._stamp = 0

    # ---- a step ----------------------------------------------------------------------------

    def execute(self, scheduler_output, plan: StepPlan | None) -> dict[str, int | None]:
        """Apply a step and compute its tokens.

        Returns:
            The sampled token per scheduled request, None where it still prefills.

        Raises:
            InvariantViolation: a row or slot is used that cannot be right whatever it holds.
        """
        for req_id in scheduler_output.finished_req_ids:
            self.requests.pop(req_id, None)
        new_index = self._apply_plan(plan) if plan is not None else {}
        self._update_rows(scheduler_output)
        self.reads = {}
        written: dict[int, str] = {}
        first = first_ids(scheduler_output)
        # Scheduled order: a prefix hit may point at a block that is filled in this same step.
        for req_id, n in scheduler_output.num_scheduled_tokens.items():
            self._compute(req_id, first[req_id], n, new_index.get(req_id, -1), written)
        return {req_id: read.sampled for req_id, read in self.reads.items()}

    def _apply_plan(self, plan: StepPlan) -> dict[str, int]:
        """Moves, then rows, then layouts; returns where single new tokens go."""
        if len(plan.move_source):
            self.move(plan.move_source, plan.move_destination)
        new_index: dict[str, int] = {}
        for r, req_id in enumerate(plan.req_ids):
            request = self.requests.get(req_id)
            if request is None:
                raise InvariantViolation("I4", f"step {plan.step_seq} plans for unknown {req_id}")
            if plan.rewrites_block_table[r]:
                row = [*request.block_ids, *plan.added_of(r).tolist()]
                request.block_ids = [row[i] for i in plan.kept_of(r)]
            request.num_reclaimed = int(plan.num_reclaimed[r])
            if plan.mask_kind[r] == MASK_PACKED:
                request.mask = None
            elif plan.mask_kind[r] == MASK_GIVEN:
                request.mask = plan.mask_of(r).copy()
            index = int(plan.new_token_index[r])
            if index >= 0:
                new_index[req_id] = index
                if request.mask is not None and index < len(request.mask):
                    request.mask[index] = True
        return new_index

    def move(self, source: np.ndarray, destination: np.ndarray) -> None:
        """Copy slots to slots; all are read before any is written."""
        self.kv[destination] = self.kv[source]
        labels = [self.labels[s] for s in source]
        for slot, label in zip(destination, labels, strict=True):
            self.labels[slot] = label

    def _update_rows(self, scheduler_output) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            row = list(new.block_ids[0])
            self.requests[new.req_id] = WorkerRequest(new.req_id, list(new.prompt_token_ids), row)
            self._poison(row[cdiv(new.num_computed_tokens, self.block_size) :])
        cached = scheduler_output.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            new_ids = cached.new_block_ids[i]
            fresh = list(new_ids[0]) if new_ids is not None else []
            if req_id in cached.resumed_req_ids:
                tokens = list(cached.all_token_ids[req_id])
                self.requests[req_id] = WorkerRequest(req_id, tokens, fresh)
                fresh = fresh[cdiv(cached.num_computed_tokens[i], self.block_size) :]
            else:
                self.requests[req_id].block_ids.extend(fresh)
            self._poison(fresh)

    def _poison(self, block_ids: Sequence[int]) -> None:
        """Fill blocks just handed out with numbers that no token has."""
        N = self.block_size
        for b in block_ids:
            self._stamp += 1
            noise = [mix(-2, self._stamp, i) for i in range(N)]
            self.kv[b * N : (b + 1) * N] = np.array(noise, np.uint64)
            self.labels[b * N : (b + 1) * N] = [None] * N

    # ---- attention -------------------------------------------------------------------------

    def slots_of(self, request: WorkerRequest, physical: np.ndarray) -> np.ndarray:
        """int64[K], slots of physical indices.

        Raises:
            InvariantViolation: an index lies beyond the row.
        """
        N = self.block_size
        if len(physical) and int(physical.max()) >= len(request.block_ids) * N:
            raise InvariantViolation(
                "I2", f"{request.req_id}: index {int(physical.max())} lies beyond its "
                f"{len(request.block_ids)} blocks"
            )  # fmt: skip
        row = np.asarray(request.block_ids, np.int64)
        return row[physical // N] * N + physical % N

    def _compute(self, req_id: str, first: int, n: int, index: int, written: dict) -> None:
        request = self.requests[req_id]
        length = first + n - request.num_reclaimed  # physical, after this step
        own = np.arange(length - n, length) if index < 0 else np.array([index])
        live = np.ones(length, bool)
        if request.mask is not None:
            covered = min(length, len(request.mask))
            live[:covered] = request.mask[:covered]
        live[own[own < length]] = False  # computed now, not read
        slots = self.slots_of(request, np.flatnonzero(live))
        own_slots = self.slots_of(request, own)
        for slot in own_slots:
            other = written.setdefault(int(slot), req_id)
            if other != req_id or slot < self.block_size:
                raise InvariantViolation("I2", f"slot {slot} is written by {other} and {req_id}")
        read = Read(first, n, slots, self.kv[slots])
        tokens = request.tokens[first : first + n]
        if len(tokens) != n:
            raise InvariantViolation(
                "positions", f"{req_id}: token {first + n - 1} is not known yet"
            )
        contents = chunk_contents(tokens, first, sum_of(read.contents))
        self.kv[own_slots] = np.array(contents, np.uint64)
        for j, slot in enumerate(own_slots):
            self.labels[slot] = (req_id, first + j)
        if first + n == len(request.tokens):
            read.sampled = sample(contents[-1])
            request.tokens.append(read.sampled)
        self.reads[req_id] = read

"""What crosses from the scheduler to the workers, and what is counted and recorded on the way.

Shape legend: R requests changed in a step, M moves of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache

import numpy as np

# StepPlan.mask_kind
MASK_KEPT = 0  # the worker's mask of this request stays as it is (growth is live)
MASK_PACKED = 1  # no holes below the physical length
MASK_GIVEN = 2  # mask_bits holds the mask


@dataclass(slots=True)
class StepPlan:
    """Every structural change of one step, as flat arrays; pickled to every rank.

    A request that only grew at its tail does not appear: its worker-side state stays valid.

    Attributes:
        step_seq: number of the step, counted by the scheduler.
        req_ids: R requests.
        num_reclaimed: int32[R], logical minus physical length, valid from this step on.
        new_token_index: int32[R], physical index of this step's single new token, -1 for the
            packed end.
        rewrites_row: bool[R]; row_kept[row_start[r]:row_start[r+1]]: int32, row positions that
            stay, in new order, before this step's new blocks are appended. Positions, not ids:
            a freed id can come back in this same step.
        row_added[added_start[r]:added_start[r+1]]: int32, block ids put at the end of the row
            before `row_kept` chooses from it: private blocks for tokens copied out of shared ones.
        mask_kind: uint8[R]; mask_bits[mask_start[r]:mask_start[r+1]]: packed little-endian bits,
            one per physical index, set where live; bits past the end are set: growth is live.
        move_source, move_destination: int64[M], vLLM slots; move_start: int32[R+1].
            All sources are read before any destination is written.
        report_req_ids: requests whose scores the worker sends back after this step.
        fresh_blocks: int32, block ids that came from the prefix cache to a request that now holds
            them alone: the scores of their tokens start at zero.
        check: what a worker's checker compares this step with (`vtoken.verify.plan.CheckPlan`).
    """

    step_seq: int
    req_ids: list[str]
    num_reclaimed: np.ndarray
    new_token_index: np.ndarray
    rewrites_row: np.ndarray
    row_start: np.ndarray
    row_kept: np.ndarray
    added_start: np.ndarray
    row_added: np.ndarray
    mask_kind: np.ndarray
    mask_start: np.ndarray
    mask_bits: np.ndarray
    move_start: np.ndarray
    move_source: np.ndarray
    move_destination: np.ndarray
    report_req_ids: list[str] = field(default_factory=list)
    fresh_blocks: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    check: object | None = None

    @classmethod
    def empty(cls, step_seq: int) -> StepPlan:
        """A plan that changes nothing."""
        nothing, _ = _constants(0)
        ids, slots = np.empty(0, np.int32), np.empty(0, np.int64)
        return cls(
            step_seq, [], ids, ids, np.empty(0, bool), nothing, ids, nothing, ids,
            np.empty(0, np.uint8), nothing, np.empty(0, np.uint8), nothing, slots, slots,
        )  # fmt: skip

    def row_of(self, r: int) -> np.ndarray:
        return self.row_kept[self.row_start[r] : self.row_start[r + 1]]

    def added_of(self, r: int) -> np.ndarray:
        return self.row_added[self.added_start[r] : self.added_start[r + 1]]

    def mask_of(self, r: int) -> np.ndarray:
        """bool[physical length rounded up to 8], the live mask of request r."""
        bits = self.mask_bits[self.mask_start[r] : self.mask_start[r + 1]]
        return np.unpackbits(bits, bitorder="little").view(bool)

    def moves_of(self, r: int) -> tuple[np.ndarray, np.ndarray]:
        span = slice(self.move_start[r], self.move_start[r + 1])
        return self.move_source[span], self.move_destination[span]


@dataclass(slots=True)
class RequestStep:
    """One request's entry of a StepPlan, before it is flattened."""

    req_id: str
    num_reclaimed: int
    new_token_index: int = -1
    kept: np.ndarray | None = None
    added: np.ndarray | None = None
    mask_kind: int = MASK_PACKED
    mask: np.ndarray | None = None
    move_source: np.ndarray | None = None
    move_destination: np.ndarray | None = None


_NO_KEPT = np.empty(0, np.int32)
_NO_MOVES = np.empty(0, np.int64)
_NO_BITS = np.empty(0, np.uint8)


def _packed(mask: np.ndarray) -> np.ndarray:
    """Pack a mask into bytes; the bits past its end are set: tokens that grow there are live."""
    bits = np.packbits(mask, bitorder="little")
    if len(mask) % 8:
        bits[-1] |= 0xFF & (0xFF << (len(mask) % 8))
    return bits


@dataclass(slots=True)
class BatchSteps:
    """Entries of a StepPlan for E requests whose holes were all filled in this step."""

    req_ids: list[str]
    num_reclaimed: np.ndarray
    new_token_index: np.ndarray
    rewrites_row: np.ndarray
    row_start: np.ndarray
    row_kept: np.ndarray
    move_start: np.ndarray
    move_source: np.ndarray
    move_destination: np.ndarray


def starts(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """int32[E + 1], where the parts of a ragged array begin and end."""
    start = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=start[1:])
    return start


def _flatten(parts: list[np.ndarray], dtype) -> tuple[list[int], np.ndarray]:
    flat = np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)
    return [len(p) for p in parts], flat


def build_step_plan(
    step_seq: int,
    steps: list[RequestStep],
    report_req_ids: list[str],
    fresh_blocks: Sequence[int] = (),
    batch: BatchSteps | None = None,
) -> StepPlan | None:
    """Flatten a step's entries, those of `batch` first; None when there is nothing to say."""
    if not steps and batch is None and not report_req_ids and not fresh_blocks:
        return None
    if batch is not None and not steps:
        return _plan_of_batch(step_seq, batch, report_req_ids, fresh_blocks)

    def join(name: str, mine: Sequence, dtype) -> np.ndarray:
        if batch is None:
            return np.asarray(mine, dtype)
        theirs = getattr(batch, name)
        return (np.concatenate([theirs, mine]) if len(mine) else theirs).astype(dtype, copy=False)

    def join_starts(name: str, counts: list[int]) -> np.ndarray:
        return starts(counts if batch is None else [*np.diff(getattr(batch, name)), *counts])

    row_counts, row_kept = _flatten(
        [s.kept if s.kept is not None else _NO_KEPT for s in steps], np.int32
    )
    added_counts, row_added = _flatten(
        [s.added if s.added is not None else _NO_KEPT for s in steps], np.int32
    )
    mask_counts, mask_bits = _flatten(
        [_NO_BITS if s.mask is None else _packed(s.mask) for s in steps], np.uint8
    )
    moving = [s.move_source is not None for s in steps]
    move_counts, move_source = _flatten(
        [s.move_source if m else _NO_MOVES for s, m in zip(steps, moving, strict=True)], np.int64
    )
    targets = [s.move_destination if m else _NO_MOVES for s, m in zip(steps, moving, strict=True)]
    none = [0] * (0 if batch is None else len(batch.req_ids))  # nothing added, no mask
    return StepPlan(
        step_seq=step_seq,
        req_ids=([] if batch is None else list(batch.req_ids)) + [s.req_id for s in steps],
        num_reclaimed=join("num_reclaimed", [s.num_reclaimed for s in steps], np.int32),
        new_token_index=join("new_token_index", [s.new_token_index for s in steps], np.int32),
        rewrites_row=join("rewrites_row", [s.kept is not None for s in steps], bool),
        row_start=join_starts("row_start", row_counts),
        row_kept=join("row_kept", row_kept, np.int32),
        added_start=starts(none + added_counts),
        row_added=row_added,
        mask_kind=np.array([MASK_PACKED] * len(none) + [s.mask_kind for s in steps], np.uint8),
        mask_start=starts(none + mask_counts),
        mask_bits=mask_bits,
        move_start=join_starts("move_start", move_counts),
        move_source=join("move_source", move_source, np.int64),
        move_destination=join("move_destination", _flatten(targets, np.int64)[1], np.int64),
        report_req_ids=report_req_ids,
        fresh_blocks=np.array(fresh_blocks, np.int32),
    )


@lru_cache(maxsize=64)
def _constants(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts of empty parts, and MASK_PACKED, for this many requests; nobody may write into them."""
    nothing, packed = np.zeros(size + 1, np.int32), np.full(size, MASK_PACKED, np.uint8)
    nothing.flags.writeable = packed.flags.writeable = False
    return nothing, packed


def _plan_of_batch(
    step_seq: int, batch: BatchSteps, report_req_ids: list[str], fresh_blocks: Sequence[int]
) -> StepPlan:
    """`build_step_plan` without entries of single requests, as in most steps."""
    size = len(batch.req_ids)
    nothing, packed = _constants(size)
    return StepPlan(
        step_seq=step_seq,
        req_ids=list(batch.req_ids),
        num_reclaimed=batch.num_reclaimed,
        new_token_index=batch.new_token_index,
        rewrites_row=batch.rewrites_row,
        row_start=batch.row_start,
        row_kept=batch.row_kept,
        added_start=nothing,
        row_added=_NO_KEPT,
        mask_kind=packed,
        mask_start=nothing,
        mask_bits=_NO_BITS,
        move_start=batch.move_start,
        move_source=batch.move_source,
        move_destination=batch.move_destination,
        report_req_ids=report_req_ids,
        fresh_blocks=np.array(fresh_blocks, np.int32),
    )


@dataclass(slots=True)
class Counters:
    """Running totals of one scheduler; what results call vtoken_<name>.

    A relocation event is one request in one step whose KV moved or whose blocks were released.
    `dropped_blocks` are references given up; `released_blocks` of them went back to the pool
    (a shared block that others still use does not). `copies` are evictions that copied survivors
    out of shared or cached blocks, into `copied_blocks` new ones; `copies_declined` those where
    it would have taken more than it released.
    """

    evicted_tokens: int = 0
    moved_tokens: int = 0
    released_blocks: int = 0
    dropped_blocks: int = 0
    reused_slots: int = 0
    relocation_events: int = 0
    eviction_events: int = 0
    shared_tokens_skipped: int = 0
    copies: int = 0
    copies_declined: int = 0
    copied_blocks: int = 0
    repacking_moves: int = 0
    preemptions: int = 0
    hook_calls: int = 0
    plan_s: float = 0.0
    finalize_s: float = 0.0

    def as_dict(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def reset(self) -> None:
        for f in fields(self):
            setattr(self, f.name, f.default)


@dataclass(slots=True)
class TraceEntry:
    """What one request attended to in one step; enough to replay it on a reference model.

    Attributes:
        first_id, num_new_tokens: the step computed ids first_id .. first_id + num_new_tokens - 1.
        live_ids: int32, ids < first_id that were live in that step, ascending.
        num_preemptions: how often the request had been preempted: KV before that is gone.
        num_blocks: distinct blocks the request held in that step.
        is_sampled: the step drew a token; a chunk of a prompt, or of output that is computed again
            after a preemption, does not.
    """

    req_id: str
    step_seq: int
    first_id: int
    num_new_tokens: int
    live_ids: np.ndarray
    num_preemptions: int
    num_blocks: int
    is_sampled: bool = True

"""What goes over the wire: one attribute each way, plain data, picklable.

scheduler_output.vtoken        StepPlan, None where nothing changes
model_runner_output.vtoken     WorkerReport, absent where there is nothing to say

Shape legend: R requests whose layout changes in a step, M moves of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

# StepPlan.mask_kind
MASK_KEPT = 0  # the worker's mask of this request stays as it is (growth is live)
MASK_PACKED = 1  # no holes below the physical length
MASK_GIVEN = 2  # mask_bits holds the mask

_NO_INTS = np.empty(0, np.int32)
_NO_SLOTS = np.empty(0, np.int64)
_NO_BITS = np.empty(0, np.uint8)


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
        rewrites_block_table: bool[R]; kept_positions[kept_start[r]:kept_start[r+1]]: int32,
            positions that stay, in new order, before this step's new blocks are appended. Positions, not ids:
            a freed id can come back in this same step.
        added_blocks[added_start[r]:added_start[r+1]]: int32, block ids put at the end
            before `kept_positions` chooses from it: private blocks for tokens copied out of shared ones.
        mask_kind: uint8[R]; mask_bits[mask_start[r]:mask_start[r+1]]: packed little-endian bits,
            one per physical index, set where live; bits past the end are set: growth is live.
        move_source, move_destination: int64[M], vLLM slots; move_start: int32[R+1].
            All sources are read before any destination is written.
        report_req_ids: requests whose scores the worker sends back after this step.
        fresh_blocks: int32, block ids that came from the prefix cache to a request that now holds
            them alone: the scores of their tokens start at zero.
        check: what the worker is to check in this step (vtoken.checks), or None.
    """

    req_ids: list[str]
    num_reclaimed: np.ndarray
    new_token_index: np.ndarray
    rewrites_block_table: np.ndarray
    kept_start: np.ndarray
    kept_positions: np.ndarray
    added_start: np.ndarray
    added_blocks: np.ndarray
    mask_kind: np.ndarray
    mask_start: np.ndarray
    mask_bits: np.ndarray
    move_start: np.ndarray
    move_source: np.ndarray
    move_destination: np.ndarray
    step_seq: int = -1
    report_req_ids: list[str] = field(default_factory=list)
    fresh_blocks: np.ndarray = field(default_factory=lambda: _NO_INTS)
    check: object | None = None

    @property
    def says_something(self) -> bool:
        """Whether the workers have to hear of this step at all."""
        return bool(
            self.req_ids or self.report_req_ids or len(self.fresh_blocks) or self.check is not None
        )

    def kept_of(self, r: int) -> np.ndarray:
        return self.kept_positions[self.kept_start[r] : self.kept_start[r + 1]]

    def added_of(self, r: int) -> np.ndarray:
        return self.added_blocks[self.added_start[r] : self.added_start[r + 1]]

    def mask_of(self, r: int) -> np.ndarray:
        """bool[physical length rounded up to 8], the live mask of request r."""
        bits = self.mask_bits[self.mask_start[r] : self.mask_start[r + 1]]
        return np.unpackbits(bits, bitorder="little").view(bool)

    def moves_of(self, r: int) -> tuple[np.ndarray, np.ndarray]:
        span = slice(self.move_start[r], self.move_start[r + 1])
        return self.move_source[span], self.move_destination[span]

    def num_moves(self) -> list[int]:
        """ints[R], tokens that move, by request."""
        starts = self.move_start.tolist()
        return [end - start for start, end in pairwise(starts)]


@dataclass(slots=True)
class Layout:
    """One request's entry of a StepPlan, before it is flattened; fields as there."""

    req_id: str
    num_reclaimed: int = 0
    new_token_index: int = -1
    kept: np.ndarray | None = None
    added: Sequence[int] = ()
    mask_kind: int = MASK_PACKED
    mask: np.ndarray | None = None
    move_source: np.ndarray = field(default_factory=lambda: _NO_SLOTS)
    move_destination: np.ndarray = field(default_factory=lambda: _NO_SLOTS)


def plan_of_layouts(layouts: Sequence[Layout]) -> StepPlan:
    """Flatten entries, in their order."""
    kept_start, kept_positions = _ragged(
        [_NO_INTS if x.kept is None else x.kept for x in layouts], np.int32
    )
    added_start, added_blocks = _ragged([np.array(x.added, np.int32) for x in layouts], np.int32)
    mask_start, mask_bits = _ragged([_bits(x.mask) for x in layouts], np.uint8)
    move_start, move_source = _ragged([x.move_source for x in layouts], np.int64)
    _, move_destination = _ragged([x.move_destination for x in layouts], np.int64)
    return StepPlan(
        req_ids=[x.req_id for x in layouts],
        num_reclaimed=np.array([x.num_reclaimed for x in layouts], np.int32),
        new_token_index=np.array([x.new_token_index for x in layouts], np.int32),
        rewrites_block_table=np.array([x.kept is not None for x in layouts], bool),
        kept_start=kept_start,
        kept_positions=kept_positions,
        added_start=added_start,
        added_blocks=added_blocks,
        mask_kind=np.array([x.mask_kind for x in layouts], np.uint8),
        mask_start=mask_start,
        mask_bits=mask_bits,
        move_start=move_start,
        move_source=move_source,
        move_destination=move_destination,
    )


def plan_of_packed(
    *,
    req_ids: list[str],
    num_reclaimed: np.ndarray,
    new_token_index: np.ndarray,
    rewrites_block_table: np.ndarray,
    kept_start: np.ndarray,
    kept_positions: np.ndarray,
    move_start: np.ndarray,
    move_source: np.ndarray,
    move_destination: np.ndarray,
) -> StepPlan:
    """A plan of requests that are all packed and share no block; arrays as in StepPlan."""
    nothing, packed = _constants(len(req_ids))
    return StepPlan(
        req_ids, num_reclaimed, new_token_index, rewrites_block_table, kept_start, kept_positions,
        nothing, _NO_INTS, packed, nothing, _NO_BITS, move_start, move_source, move_destination,
    )  # fmt: skip


def joined(first: StepPlan, second: StepPlan) -> StepPlan:
    """One plan of what two say of different requests."""
    parts: dict[str, Any] = {"req_ids": first.req_ids + second.req_ids}
    for f in fields(StepPlan)[1:14]:
        a, b = getattr(first, f.name), getattr(second, f.name)
        if f.name.endswith("_start"):
            b = b[1:] + a[-1]
        parts[f.name] = np.concatenate([a, b])
    return StepPlan(**parts)


def _ragged(parts: list[np.ndarray], dtype: npt.DTypeLike) -> tuple[np.ndarray, np.ndarray]:
    """(starts int32[E + 1], flat array) of parts one after another."""
    start = np.zeros(len(parts) + 1, np.int32)
    np.cumsum([len(p) for p in parts], out=start[1:])
    flat = np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)
    return start, flat


def _bits(mask: np.ndarray | None) -> np.ndarray:
    """A mask as bytes; the bits past its end are set: tokens that grow there are live."""
    if mask is None:
        return _NO_BITS
    bits = np.packbits(mask, bitorder="little")
    if len(mask) % 8:
        bits[-1] |= 0xFF & (0xFF << (len(mask) % 8))
    return bits


@lru_cache(maxsize=64)
def _constants(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts of empty parts, and MASK_PACKED, for this many requests; read-only."""
    nothing, packed = np.zeros(size + 1, np.int32), np.full(size, MASK_PACKED, np.uint8)
    nothing.flags.writeable = packed.flags.writeable = False
    return nothing, packed


@dataclass(slots=True)
class ScoreReport:
    """Scores that a worker sends back after a step.

    Attributes:
        step_seq: the step whose attention produced the scores.
        req_ids: R requests; scores[start[r]:start[r+1]] float32, one per physical index.
    """

    step_seq: int
    req_ids: list[str]
    start: np.ndarray
    scores: np.ndarray

    @classmethod
    def of_parts(cls, step_seq: int, req_ids: list[str], parts: list[np.ndarray]) -> ScoreReport:
        """Join the scores of each request."""
        start = np.concatenate([[0], np.cumsum([len(p) for p in parts])]).astype(np.int32)
        return cls(step_seq, list(req_ids), start, np.concatenate(parts))


@dataclass(slots=True)
class WorkerReport:
    """Everything a worker tells the scheduler beside vLLM's own output of a step.

    Attributes:
        scores: of the requests the plan asked for, or None.
        relocation_ns: host time spent on copies since the last report.
        check_counts: what the worker has checked so far, by invariant, or None.
    """

    scores: ScoreReport | None = None
    relocation_ns: int = 0
    check_counts: dict[str, list[int]] | None = None

    def __bool__(self) -> bool:
        return bool(self.scores is not None or self.relocation_ns or self.check_counts is not None)

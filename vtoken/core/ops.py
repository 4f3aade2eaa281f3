"""What one step does to token tables: the one seam between decisions and their effect on a layout.

A step calls these operations with lists; one request is a list of one. Two implementations give the
same results to the byte (tests/unit/test_ops.py): `vtoken.core.scalar_ops` in plain Python, which
handles every layout, and `vtoken.kernels.tables`, compiled, for packed tables that share no block.

    evict   ids die, and the blocks that stay are chosen; the pool's view of the request follows
    place   once the step's token counts are final: survivors and new tokens get their slots

Legend: E requests, N block size (tokens), K tokens over all requests, ints[E] a list with a number
for each request. A ragged array holds its parts one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from vtoken.core.messages import StepPlan
from vtoken.core.table import RequestTable


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRules:
    """How one engine lays out what is left after an eviction.

    Attributes:
        moves: False for `naive`: holes stay, no slot is reused, only fully dead blocks go.
        fragmentation_threshold: hole fraction at which a request is packed; 0: always packed.
    """

    moves: bool = True
    fragmentation_threshold: float = 0.0


@dataclass(slots=True)
class Change:
    """One request's change of layout in one step: what it starts from, and what `evict` decided.

    Attributes:
        table: in step with the request.
        rules: of the engine.
        num_new_tokens: tokens about to be scheduled; blocks for them are kept.
        under_pressure: pack even below the fragmentation threshold.
        pinned: bool[B] or None, shared blocks: nothing is placed in or moved out of them.
        leaves: bool[B] or None, blocks that go although they hold live tokens, which are copied
            out; nothing is written into them.
        added: block ids that were put at the end of the block table for those copies.

        packs: every hole is filled in this step.
        has_evicted: `evict` had an effect.
        num_evicted: ids the request has lost so far, after `evict`.
        released: block table positions whose block goes, ascending.
        last: the position that comes last among those that stay, where it was not; else -1.
        order: int32, explicit new order of the positions that stay; None: as `last` says.
        written: int, old positions of blocks that stay and will be written into, where the table
            does not say so any more.
        keeps_placeholders: a released block keeps its place in the block table (naive).
        is_compiled: `place` may run compiled.
    """

    table: RequestTable
    rules: LayoutRules
    num_new_tokens: int = 1
    under_pressure: bool = False
    pinned: np.ndarray | None = None
    leaves: np.ndarray | None = None
    added: Sequence[int] = ()

    packs: bool = False
    has_evicted: bool = False
    num_evicted: int = 0
    released: Sequence[int] = ()
    last: int = -1
    order: np.ndarray | None = None
    written: np.ndarray | None = None
    keeps_placeholders: bool = False
    is_compiled: bool = False

    @property
    def rewrites_block_table(self) -> bool:
        """Whether the positions that stay are not all of them in their old order."""
        if self.keeps_placeholders:
            return False
        return self.order is not None or self.last >= 0 or len(self.released) > 0

    def new_order(self) -> np.ndarray:
        """int32, old positions in the new block table's order; before `place`."""
        if self.order is not None:
            return self.order
        stays = np.ones(self.table.num_blocks, bool)
        stays[list(self.released)] = False
        if self.last >= 0:
            stays[self.last] = False
        order = np.flatnonzero(stays).astype(np.int32)
        return np.append(order, np.int32(self.last)) if self.last >= 0 else order

    def written_positions(self) -> np.ndarray:
        """int, old positions of blocks that stay and will be written into; before `place`.

        Such a block must leave the prefix cache before anything is admitted in this step.
        """
        if self.written is not None:
            return self.written
        table, N = self.table, self.table.block_size
        positions = table.pos_of[table.holes // N]
        if self.packs:  # from the packed end on, new tokens overwrite what moves out
            positions = np.append(positions, self.new_order()[table.num_live_tokens // N :])
        return np.setdiff1d(positions[positions >= 0], self.released)


def apply_to_block_table(
    change: Change, blocks: list[Any], placeholder: object = None
) -> list[Any]:
    """Bring a pool's list of a request's blocks in step with a change, in place.

    Returns:
        The blocks that go. The tail goes first: the front of a sequence is worth more to the
        prefix cache.
    """
    gone = [blocks[i] for i in reversed(change.released)]
    if change.keeps_placeholders:
        for i in change.released:
            blocks[i] = placeholder
    elif change.order is not None:
        blocks[:] = [blocks[i] for i in change.order]
    else:
        leaving = change.released
        if change.last >= 0:
            blocks.append(blocks[change.last])
            leaving = sorted((*leaving, change.last))
        for i in reversed(leaving):
            del blocks[i]
    return gone


class ScoredIds(NamedTuple):
    """One request's scores: entries start .. start + num_ids - 1 of an array.

    Attributes:
        ids: int32[num_ids], their logical ids in no order, -1 for a hole; None: those at the first
            physical indices of the request's table.
        scores: float32, NaN for none.
    """

    ids: np.ndarray | None
    scores: np.ndarray
    start: int
    num_ids: int


class Draw(NamedTuple):
    """One request's random draw: `num_draws` different numbers below `num_candidates`.

    Attributes:
        entropy: what `RequestView.rng` seeds its generator with.
    """

    entropy: tuple[int, int, int]
    num_candidates: int
    num_draws: int


class TableOps(Protocol):
    """Operations on E tables of one arena, E > 0."""

    name: str

    def sync(
        self,
        tables: Sequence[RequestTable],
        new_block_ids: Sequence[Sequence[int]],
        lengths: Sequence[int],
    ) -> None:
        """Register blocks and tokens that were appended; `RequestTable.sync_new_tokens` of each."""

    def oldest(
        self,
        tables: Sequence[RequestTable],
        first_ids: Sequence[int],
        end_ids: Sequence[int],
        counts: Sequence[int],
    ) -> tuple[np.ndarray, list[int]]:
        """The lowest live ids of half-open ranges, at most ints[E] `counts`.

        Returns:
            (ids int64[K] ascending by request, counts ints[E]): as many as there are.
        """

    def lowest_scored(
        self,
        tables: Sequence[RequestTable],
        scored: Sequence[ScoredIds],
        first_ids: Sequence[int],
        end_ids: Sequence[int],
        counts: Sequence[int],
        sign: int,
    ) -> tuple[np.ndarray, list[int]]:
        """The live ids of half-open ranges with the lowest `sign` * score; returns as `oldest`.

        Among equal scores the lower id goes first; ids without a score are never named.
        """

    def count_below(self, tables: Sequence[RequestTable], bounds: Sequence[int]) -> list[int]:
        """ints[E], live ids below ints[E] `bounds`."""

    def at_ranks(
        self, tables: Sequence[RequestTable], ranks: np.ndarray, counts: Sequence[int]
    ) -> np.ndarray:
        """int64[K] ascending by request: the live ids with these ranks, 0 the lowest.

        Args:
            ranks: int64[K] in any order, ragged with `counts` ints[E].
        """

    def draw(self, draws: Sequence[Draw]) -> np.ndarray:
        """int64[K], ranks drawn without replacement, as `RequestView.rng().choice` draws them."""

    def evict(self, changes: Sequence[Change], ids: np.ndarray, counts: Sequence[int]) -> None:
        """Mark ids dead and choose the blocks that stay, so that the fewest tokens move.

        Args:
            ids: int[K], live ids, ascending by request, ragged with `counts` ints[E]. A count of
                0 packs what has holes already.
        """

    def place(
        self,
        changes: Sequence[Change],
        num_new: Sequence[int],
        block_ids_from: Callable[[int, int], Sequence[int]],
    ) -> StepPlan:
        """Give survivors and the step's new tokens their slots.

        Args:
            changes: after `evict` in this step, or of requests with holes from earlier steps.
            num_new: ints[E], tokens scheduled in this step; 0: the request was passed over.
            block_ids_from: (e, position) -> ids of the e-th request's block table, after
                allocation, from a position on.

        Returns:
            The layouts that are not plain growth; `step_seq` and what is asked for are not set.
        """

"""What one step does to the tables of many requests, done for all of them at once.

The same as `RequestPlanner.execute` and `finalize` do for one request whose holes are all filled
in the same step, which is the steady state of decoding under a budget. `BatchOps` is the seam:
`vtoken.core.batch_numpy` does it with numpy calls, whoever may import more can hand an arena a
compiled form (`vtoken.kernels.tables`). tests/unit/test_batch.py holds them all against each other.

Shape legend: E requests, N block size (tokens), K tokens over all requests. A ragged array holds
its parts one after another; `owner[k]` is the request of entry k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from vtoken.core.arena import COLUMN
from vtoken.core.table import RequestTable


class Tables:
    """The tables of E requests of one arena; E > 0.

    Attributes:
        rows: int64[E], their rows of the arena's numbers.
    """

    __slots__ = ("arena", "block_size", "rows", "tables")

    def __init__(self, tables: Sequence[RequestTable]) -> None:
        self.tables, self.arena = tables, tables[0].arena
        self.block_size = self.arena.block_size
        self.rows = np.array([t.number_row for t in tables])

    def __len__(self) -> int:
        return len(self.tables)

    def number(self, name: str) -> np.ndarray:
        """int64[E], a copy of one of `arena.NUMBERS`."""
        return self.arena.numbers[self.rows, COLUMN[name]]

    def add(self, name: str, change: np.ndarray | int) -> None:
        """Add int64[E] to one of `arena.NUMBERS`."""
        self.arena.numbers[self.rows, COLUMN[name]] += change

    # What the arena's ops do, for those who need no more than one of them.

    def sync(self, new_block_ids: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        self.arena.ops.sync(self, new_block_ids, lengths)

    def oldest(self, counts: np.ndarray, first_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.arena.ops.oldest(self, counts, first_ids)

    def count_below(self, bounds: np.ndarray) -> np.ndarray:
        return self.arena.ops.count_below(self, bounds)

    def at_ranks(self, ranks: np.ndarray, counts: np.ndarray) -> np.ndarray:
        return self.arena.ops.at_ranks(self, ranks, counts)


@dataclass(slots=True)
class Eviction:
    """What an eviction leaves in E rows that were packed; the rows themselves are as they were.

    Attributes:
        num_blocks, num_keep: int64[E], blocks of the row, and of the new one.
        gone: int32, ragged with `num_blocks - num_keep`: row positions that go, ascending.
        last: int64[E], old position of the new row's last block; the others that stay keep their
            order.
        holes: int32[K], local slots of the victims, ragged with `counts`: int64[E].
    """

    num_blocks: np.ndarray
    num_keep: np.ndarray
    gone: np.ndarray
    last: np.ndarray
    holes: np.ndarray
    counts: np.ndarray

    def only(self, stays: np.ndarray) -> Eviction:
        """The part of some requests: bool[E]."""
        num_gone = self.num_blocks - self.num_keep
        return Eviction(
            self.num_blocks[stays], self.num_keep[stays], self.gone[stays.repeat(num_gone)],
            self.last[stays], self.holes[stays.repeat(self.counts)], self.counts[stays],
        )  # fmt: skip

    def gone_lists(self) -> list[list[int]]:
        """`gone`, by request."""
        gone, parts, first = self.gone.tolist(), [], 0
        for count in (self.num_blocks - self.num_keep).tolist():
            parts.append(gone[first : first + count])
            first += count
        return parts


@dataclass(slots=True)
class Packed:
    """What packing did, for the step's plan.

    Attributes:
        new_token_index: int32[E], as in StepPlan.
        num_appended: int64[E], new tokens that are still to be appended at the packed end.
        num_reused: new tokens that took a hole inside the layout.
        rewrites_row: bool[E], rows that are not as they were.
        row_kept: int32, the old position at each new one, of the rows that are rewritten; ragged
            with `row_counts` int64[E], 0 for the others.
        source, destination: int64[M], vLLM slots, ragged with `move_counts` int64[E].
    """

    new_token_index: np.ndarray
    num_appended: np.ndarray
    num_reused: int
    rewrites_row: np.ndarray
    row_counts: np.ndarray
    row_kept: np.ndarray
    source: np.ndarray
    destination: np.ndarray
    move_counts: np.ndarray


class ScoredIds(NamedTuple):
    """One request's scores, in no order: entries start .. start + count - 1 of each array.

    Attributes:
        ids: int32, logical ids, -1 for a hole. scores: float32, NaN for none.
    """

    ids: np.ndarray
    ids_start: int
    scores: np.ndarray
    scores_start: int
    count: int


class BatchOps(Protocol):
    """What is done to E tables of one arena at once. All give the same results, to the byte."""

    name: str

    def sync(
        self, batch: Tables, new_block_ids: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> None:
        """Register blocks and tokens that were appended; as `RequestTable.sync`."""

    def oldest(
        self, batch: Tables, counts: np.ndarray, first_ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The lowest live ids; as `RequestTable.oldest`.

        Args:
            counts, first_ids: int64[E].

        Returns:
            (ids int64[K], counts int64[E]): as many as there are.
        """

    def count_below(self, batch: Tables, bounds: np.ndarray) -> np.ndarray:
        """int64[E], live ids below int64[E]; as `LiveIndex.count_below`."""

    def at_ranks(self, batch: Tables, ranks: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """int64[K], ascending by request: the live ids with these ranks; as `LiveIndex.at`.

        Args:
            ranks: int64[K] in any order, ragged with `counts` int64[E].
        """

    def lowest_scored(
        self,
        batch: Tables,
        scored: Sequence[ScoredIds],
        first_ids: np.ndarray,
        end_ids: np.ndarray,
        counts: np.ndarray,
        sign: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The live ids with the lowest `sign` * score; as `Policy.lowest_scored`.

        Args:
            first_ids, end_ids: int64[E], half-open range of ids that may be named.
            counts: int64[E], how many, at most.

        Returns:
            (ids int64[K] ascending by request, counts int64[E]).
        """

    def draw(
        self, entropy: np.ndarray, num_candidates: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        """int64[K], ranks drawn without replacement; as `RequestView.rng().choice`.

        Args:
            entropy: int64[E, 3], what the generators are seeded with.
            num_candidates, counts: int64[E], draw counts[e] of range(num_candidates[e]).
        """

    def execute(
        self, batch: Tables, ids: np.ndarray, counts: np.ndarray, num_new: int
    ) -> Eviction:
        """Mark live ids dead and choose the blocks to keep, so that the fewest tokens move.

        As `RequestTable.evict` and `reclaim.choose_kept`. Before the eviction every block is full
        but for the tail, so those that go are among those that lost a token, and the tail: the
        cost does not grow with the row.

        Args:
            batch: packed, `sync`ed.
            ids: int[K], ascending by request, ragged with `counts` int64[E], at least one each.
            num_new: tokens about to be scheduled; blocks for them are kept.
        """

    def pack(self, batch: Tables, eviction: Eviction, num_new: np.ndarray) -> Packed:
        """Move what lies outside the packed prefix into the holes; one new token takes a hole.

        As `reclaim.place_packed` and what `RequestPlanner` does with it.

        Args:
            eviction: what `execute` said of the same tables, untouched since.
            num_new: int64[E], tokens scheduled in this step.
        """

    def ids_by_index(self, batch: Tables) -> tuple[np.ndarray, list[int]]:
        """As `RequestTable.ids_by_physical_index`.

        Returns:
            (ids int32[K], E + 1 starts): ragged with the physical lengths.
        """

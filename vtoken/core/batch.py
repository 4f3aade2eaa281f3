"""What one step does to the tables of many requests, done for all of them at once.

The same as `RequestPlanner.execute` and `finalize` do for one request whose holes are all filled
in the same step, which is the steady state of decoding under a budget. `BatchOps` is the seam:
`vtoken.core.batch_numpy` does it with numpy calls, whoever may import more can hand an arena a
compiled form (`vtoken.kernels.tables`). tests/unit/test_batch.py holds them all against each other.

Shape legend: E requests, N block size (tokens), K tokens over all requests, ints[E] a list with a
number for each request. A ragged array holds its parts one after another; `owner[k]` is the request
of entry k. What there is one of for each request comes in lists and what there is one of for each
token in arrays: a step has a few dozen requests, and for so few a list is the faster one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple, Protocol

import numpy as np

from vtoken.core.arena import COLUMN
from vtoken.core.events import BatchSteps
from vtoken.core.table import RequestTable


class Tables:
    """The tables of E requests of one arena; E > 0.

    Attributes:
        rows: their rows of the arena's numbers, E of them, with an address.
    """

    __slots__ = ("arena", "block_size", "rows", "tables")

    def __init__(self, tables: Sequence[RequestTable]) -> None:
        self.tables, self.arena = tables, tables[0].arena
        self.block_size = self.arena.block_size
        self.rows = array("q", [t.number_row for t in tables])

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

    def oldest(
        self, counts: list[int], first_ids: list[int], end_ids: list[int]
    ) -> tuple[np.ndarray, list[int]]:
        return self.arena.ops.oldest(self, counts, first_ids, end_ids)

    def count_below(self, bounds: list[int]) -> list[int]:
        return self.arena.ops.count_below(self, bounds)

    def at_ranks(self, ranks: np.ndarray, counts: list[int]) -> np.ndarray:
        return self.arena.ops.at_ranks(self, ranks, counts)


@dataclass(slots=True)
class Eviction:
    """What an eviction leaves in E rows that were packed; the rows themselves are as they were.

    Attributes:
        num_blocks, num_keep: ints[E], blocks of the row, and of the new one.
        gone: row positions that go, ascending, by request.
        last: ints[E], old position of the new row's last block; the others that stay keep their
            order.
        num_evicted: ints[E], ids that each has lost so far, these ones counted.
        holes: int32[K], local slots of the victims, ragged with `counts`: ints[E].
    """

    num_blocks: list[int]
    num_keep: list[int]
    gone: list[list[int]]
    last: list[int]
    num_evicted: list[int]
    holes: np.ndarray
    counts: list[int]

    def only(self, stays: Sequence[bool]) -> Eviction:
        """The part of some requests: bools[E]."""
        of_tokens = np.array(stays).repeat(self.counts)
        *lists, counts = (
            list(compress(part, stays))
            for part in (
                self.num_blocks, self.num_keep, self.gone, self.last, self.num_evicted, self.counts
            )
        )  # fmt: skip
        return Eviction(*lists, self.holes[of_tokens], counts)


@dataclass(slots=True)
class Packed:
    """What packing did.

    Attributes:
        steps: for the step's plan.
        num_appended: ints[E], new tokens that are still to be appended at the packed end.
        num_reused: new tokens that took a hole inside the layout.
    """

    steps: BatchSteps
    num_appended: list[int]
    num_reused: int


class ScoredIds(NamedTuple):
    """One request's scores: entries start .. start + count - 1 of an array.

    Attributes:
        ids: int32[count], their logical ids in no order, -1 for a hole; None: those at the first
            physical indices of the request's table.
        scores: float32, NaN for none.
    """

    ids: np.ndarray | None
    scores: np.ndarray
    start: int
    count: int


class BatchOps(Protocol):
    """What is done to E tables of one arena at once. All give the same results, to the byte."""

    name: str

    def sync(
        self, batch: Tables, new_block_ids: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> None:
        """Register blocks and tokens that were appended; as `RequestTable.sync`."""

    def oldest(
        self, batch: Tables, counts: list[int], first_ids: list[int], end_ids: list[int]
    ) -> tuple[np.ndarray, list[int]]:
        """The lowest live ids of half-open ranges; as `RequestTable.oldest`.

        Args:
            counts, first_ids, end_ids: ints[E].

        Returns:
            (ids int64[K], counts ints[E]): as many as there are.
        """

    def count_below(self, batch: Tables, bounds: list[int]) -> list[int]:
        """ints[E], live ids below ints[E]; as `LiveIndex.count_below`."""

    def at_ranks(self, batch: Tables, ranks: np.ndarray, counts: list[int]) -> np.ndarray:
        """int64[K], ascending by request: the live ids with these ranks; as `LiveIndex.at`.

        Args:
            ranks: int64[K] in any order, ragged with `counts` ints[E].
        """

    def lowest_scored(
        self,
        batch: Tables,
        scored: Sequence[ScoredIds],
        first_ids: list[int],
        end_ids: list[int],
        counts: list[int],
        sign: int,
    ) -> tuple[np.ndarray, list[int]]:
        """The live ids with the lowest `sign` * score; as `Policy.lowest_scored`.

        Args:
            first_ids, end_ids: ints[E], half-open range of ids that may be named.
            counts: ints[E], how many, at most.

        Returns:
            (ids int64[K] ascending by request, counts ints[E]).
        """

    def draw(
        self, entropy: Sequence[Sequence[int]], num_candidates: list[int], counts: list[int]
    ) -> np.ndarray:
        """int64[K], ranks drawn without replacement; as `RequestView.rng().choice`.

        Args:
            entropy: three numbers for each request, what its generator is seeded with.
            num_candidates, counts: ints[E], draw counts[e] of range(num_candidates[e]).
        """

    def execute(self, batch: Tables, ids: np.ndarray, counts: list[int], num_new: int) -> Eviction:
        """Mark live ids dead and choose the blocks to keep, so that the fewest tokens move.

        As `RequestTable.evict` and `reclaim.choose_kept`. Before the eviction every block is full
        but for the tail, so those that go are among those that lost a token, and the tail: the
        cost does not grow with the row.

        Args:
            batch: packed, `sync`ed.
            ids: int[K], ascending by request, ragged with `counts` ints[E], at least one each.
            num_new: tokens about to be scheduled; blocks for them are kept.
        """

    def pack(self, batch: Tables, eviction: Eviction, num_new: list[int]) -> Packed:
        """Move what lies outside the packed prefix into the holes; one new token takes a hole.

        As `reclaim.place_packed` and what `RequestPlanner` does with it.

        Args:
            eviction: what `execute` said of the same tables, untouched since.
            num_new: ints[E], tokens scheduled in this step.
        """

"""One set of flat arrays for the tables of many requests.

Legend: N block size (tokens). Every table has a region in the arrays over logical ids and one in
the arrays over blocks; `id_at` has N entries for each of the latter, `live_in_span` one for
SPAN_TOKENS of the former. Regions are an eighth longer than was needed when they were taken; one
that a table has outgrown, or that a finished request leaves, is given out again. (A doubling would
be simpler, and take up to 18 bytes a token.) A table's counts are a row of `numbers`.

The compiled operations on many tables at once (`vtoken.kernels.tables`) work on these arrays alone and
know their order from `NUMBERS` and `ARRAYS`.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Protocol

import numpy as np

from vtoken.units import cdiv

FIRST_TOKENS, FIRST_BLOCKS, FIRST_ROWS = 256, 8, 16
SPAN_TOKENS = 64  # regions over logical ids begin and end at whole multiples of it
SPAN_BLOCKS = 8  # the same over blocks
TOKEN_ARRAYS = ("index_of", "live_in_span")
BLOCK_ARRAYS = ("block_table", "pos_of", "block_id", "live_in", "free_handle", "id_at")
ARRAYS = (*TOKEN_ARRAYS, *BLOCK_ARRAYS)
_EMPTY = {"live_in": 0, "live_in_span": 0}  # others: -1

# Columns of `Arena.numbers`; the C++ struct Numbers has the same order.
NUMBERS = (
    "token_base", "block_base", "token_room", "block_room",
    "num_computed_tokens", "num_physical_tokens", "num_live_tokens", "num_blocks",
    "num_handles", "num_free_handles", "dead_from", "dead_to",
)  # fmt: skip
COLUMN = {name: i for i, name in enumerate(NUMBERS)}


def _with_room(count: int) -> int:
    """An eighth more than is needed: growth copies each entry about eight times in all."""
    return count + count // 8


class _Regions:
    """Gives out ranges of an axis that only ever gets longer; neighbours that are free merge."""

    def __init__(self) -> None:
        self.end = 0
        self._free: list[tuple[int, int]] = []  # (start, end), ascending, with gaps between

    def take(self, size: int) -> int:
        """Start of a free range: the first that is long enough."""
        for i, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._cut(i, size)
                return start
        start = self.end
        if self._free and self._free[-1][1] == self.end:
            start = self._free.pop()[0]
        self.end = start + size
        return start

    def give(self, start: int, size: int) -> None:
        """Take a range back."""
        end, i = start + size, bisect_left(self._free, (start, 0))
        if i < len(self._free) and self._free[i][0] == end:
            end = self._free.pop(i)[1]
        if i and self._free[i - 1][1] == start:
            self._free[i - 1] = (self._free[i - 1][0], end)
        else:
            self._free.insert(i, (start, end))

    def extend(self, start: int, size: int, longer: int) -> bool:
        """Make a range longer where it is, if what follows is free; returns whether it did."""
        end, more = start + size, longer - size
        i = bisect_left(self._free, (end, 0))
        follows = self._free[i][1] - end if i < len(self._free) and self._free[i][0] == end else 0
        if follows >= more:
            self._cut(i, more)
        elif end + follows == self.end:
            del self._free[i:]
            self.end = start + longer
        else:
            return False
        return True

    def _cut(self, i: int, size: int) -> None:
        start, end = self._free[i]
        if end - start == size:
            del self._free[i]
        else:
            self._free[i] = (start + size, end)


class RegionUser(Protocol):
    """What the arena keeps in step of a table (`vtoken.core.table.RequestTable`)."""

    numbers: memoryview[int]
    number_row: int
    token_base: int
    block_base: int
    token_room: int
    block_room: int


class Arena:
    """Attributes:
    index_of, live_in_span: int32 over logical ids, and over chunks of them.
    block_table, pos_of, block_id, live_in, free_handle: int32 over blocks; id_at: int32 over slots. See
        vtoken.core.table for what they hold.
    numbers: int64[rows, len(NUMBERS)], C order.
    version: changes whenever one of the arrays is replaced by a longer one.
    """

    index_of: np.ndarray
    live_in_span: np.ndarray
    block_table: np.ndarray
    pos_of: np.ndarray
    block_id: np.ndarray
    live_in: np.ndarray
    free_handle: np.ndarray
    id_at: np.ndarray

    def __init__(self, block_size: int) -> None:
        self.block_size, self.version = block_size, 0
        self._tokens, self._blocks, self._rows = _Regions(), _Regions(), _Regions()
        self._tables: dict[int, RegionUser] = {}
        for name in ARRAYS:
            setattr(self, name, np.empty(0, np.int32))
        self.numbers = np.zeros((0, len(NUMBERS)), np.int64)

    def add(self, table: RegionUser) -> None:
        """Give a new table its regions and its row of numbers."""
        table.number_row = self._take_row()
        self._tables[id(table)] = table
        self._look_at_numbers(table)
        table.numbers[COLUMN["token_base"]] = self._take(self._tokens, TOKEN_ARRAYS, FIRST_TOKENS)
        table.numbers[COLUMN["block_base"]] = self._take(self._blocks, BLOCK_ARRAYS, FIRST_BLOCKS)
        self._look(table, FIRST_TOKENS, FIRST_BLOCKS)

    def remove(self, table: RegionUser) -> None:
        """Take a table's regions back; whoever still holds the table reads a copy."""
        del self._tables[id(table)]
        self._tokens.give(table.token_base, table.token_room)
        self._blocks.give(table.block_base, table.block_room)
        self._rows.give(table.number_row, 1)
        for name in ARRAYS:
            setattr(table, name, getattr(table, name).copy())
        table.numbers = memoryview(self.numbers[table.number_row].copy())

    def grow_tokens(self, table: RegionUser, num_tokens: int) -> None:
        """Give a table a region for at least this many logical ids."""
        old, size = table.token_room, _region_size(num_tokens, SPAN_TOKENS)
        base = self._grow(self._tokens, TOKEN_ARRAYS, table.token_base, old, size)
        table.numbers[COLUMN["token_base"]] = base
        self._look(table, size, table.block_room)

    def grow_blocks(self, table: RegionUser, num_blocks: int) -> None:
        """Give a table a region for at least this many blocks."""
        old, size = table.block_room, _region_size(num_blocks, SPAN_BLOCKS)
        base = self._grow(self._blocks, BLOCK_ARRAYS, table.block_base, old, size)
        table.numbers[COLUMN["block_base"]] = base
        self._look(table, table.token_room, size)

    def _grow(
        self, regions: _Regions, names: tuple[str, ...], base: int, old: int, size: int
    ) -> int:
        """Start of a longer region that begins with what a shorter one holds."""
        if regions.extend(base, old, size):
            self._clear(regions, names, base + old, size - old)
            return base
        new = self._take(regions, names, size)
        for name in names:
            array = getattr(self, name)
            array[self._span(name, new, old)] = array[self._span(name, base, old)]
        regions.give(base, old)
        return new

    def _span(self, name: str, start: int, size: int) -> slice:
        """The part of an array that belongs to a region."""
        if name == "id_at":
            return slice(start * self.block_size, (start + size) * self.block_size)
        if name == "live_in_span":
            return slice(start // SPAN_TOKENS, (start + size) // SPAN_TOKENS)
        return slice(start, start + size)

    def _take(self, regions: _Regions, names: tuple[str, ...], size: int) -> int:
        """Start of a region, empty."""
        base = regions.take(size)
        self._clear(regions, names, base, size)
        return base

    def _clear(self, regions: _Regions, names: tuple[str, ...], base: int, size: int) -> None:
        """Empty a range, after making the arrays as long as the axis is."""
        is_longer = False
        for name in names:
            array = getattr(self, name)
            needed = self._span(name, 0, regions.end).stop
            if needed > len(array):
                longer = np.empty(max(needed, len(array) + len(array) // 16), np.int32)
                longer[: len(array)] = array
                setattr(self, name, longer)
                is_longer = True
            getattr(self, name)[self._span(name, base, size)] = _EMPTY.get(name, -1)
        if is_longer:
            self.version += 1
            for table in self._tables.values():
                if hasattr(table, "index_of"):
                    self._look(table, table.token_room, table.block_room)

    def _take_row(self) -> int:
        """A row of `numbers`, all zero."""
        row = self._rows.take(1)
        if row >= len(self.numbers):
            longer = np.zeros((max(FIRST_ROWS, 2 * row), len(NUMBERS)), np.int64)
            longer[: len(self.numbers)] = self.numbers
            self.numbers = longer
            self.version += 1
            for table in self._tables.values():
                self._look_at_numbers(table)
        self.numbers[row] = 0
        return row

    def _look_at_numbers(self, table: RegionUser) -> None:
        # A memoryview gives and takes plain ints, in a third of the time numpy takes.
        table.numbers = memoryview(self.numbers[table.number_row])

    def _look(self, table: RegionUser, num_tokens: int, num_blocks: int) -> None:
        """Point a table's views at its regions."""
        table.numbers[COLUMN["token_room"]] = num_tokens
        table.numbers[COLUMN["block_room"]] = num_blocks
        for name in TOKEN_ARRAYS:
            span = self._span(name, table.token_base, num_tokens)
            setattr(table, name, getattr(self, name)[span])
        for name in BLOCK_ARRAYS:
            span = self._span(name, table.block_base, num_blocks)
            setattr(table, name, getattr(self, name)[span])


def _region_size(count: int, quantum: int) -> int:
    return cdiv(_with_room(count), quantum) * quantum

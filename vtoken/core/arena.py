"""One set of flat arrays for the tables of many requests.

Legend: N block size (tokens). Every table has a region in the arrays over logical ids and one in
the arrays over blocks; `id_at` has N entries for each of the latter, `live_in_chunk` one for
CHUNK_TOKENS of the former. Regions are powers of two long. One that a table has outgrown, or that
a finished request leaves, is given out again. A table's counts are a row of `numbers`.

What is done to many tables at once (`vtoken.core.batch`) works on these arrays alone, in numpy or
compiled: the compiled code knows their order from `NUMBERS` and `ARRAYS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vtoken.core.batch import BatchOps

FIRST_TOKENS, FIRST_BLOCKS, FIRST_ROWS = 256, 8, 16
CHUNK_TOKENS = 64  # regions over logical ids begin and end at whole multiples of it
TOKEN_ARRAYS = ("index_of", "live_in_chunk")
BLOCK_ARRAYS = ("row", "pos_of", "block_id", "live_in", "free_handle", "id_at")
ARRAYS = (*TOKEN_ARRAYS, *BLOCK_ARRAYS)
_EMPTY = {"live_in": 0, "live_in_chunk": 0}  # others: -1

# Columns of `Arena.numbers`; the C++ struct Numbers has the same order.
NUMBERS = (
    "token_base", "block_base", "token_room", "block_room",
    "num_computed_tokens", "num_physical_tokens", "num_live_tokens", "num_blocks",
    "num_handles", "num_free_handles", "dead_from", "dead_to",
)  # fmt: skip
COLUMN = {name: i for i, name in enumerate(NUMBERS)}


class _Regions:
    """Gives out ranges of an axis that only ever gets longer."""

    def __init__(self) -> None:
        self.end = 0
        self._free: dict[int, list[int]] = {}

    def take(self, size: int) -> int:
        """Start of a free range."""
        if self._free.get(size):
            return self._free[size].pop()
        self.end += size
        return self.end - size

    def give(self, start: int, size: int) -> None:
        self._free.setdefault(size, []).append(start)


class Arena:
    """Attributes:
    index_of, live_in_chunk: int32 over logical ids, and over chunks of them.
    row, pos_of, block_id, live_in, free_handle: int32 over blocks; id_at: int32 over slots. See
        vtoken.core.table for what they hold.
    numbers: int64[rows, len(NUMBERS)], C order.
    version: changes whenever one of the arrays is replaced by a longer one.
    ops: what is done to many tables at once; None: numpy.
    """

    def __init__(self, block_size: int, ops: BatchOps | None = None) -> None:
        self.block_size, self.version = block_size, 0
        self._ops = ops
        self._tokens, self._blocks, self._rows = _Regions(), _Regions(), _Regions()
        self._tables: dict[int, object] = {}
        for name in ARRAYS:
            setattr(self, name, np.empty(0, np.int32))
        self.numbers = np.zeros((0, len(NUMBERS)), np.int64)

    @property
    def ops(self) -> BatchOps:
        if self._ops is None:
            from vtoken.core.batch_numpy import NumpyOps  # it knows tables, which know this

            self._ops = NumpyOps()
        return self._ops

    @ops.setter
    def ops(self, ops: BatchOps) -> None:
        self._ops = ops

    def add(self, table) -> None:
        """Give a new table its regions and its row of numbers."""
        table.number_row = self._take_row()
        self._tables[id(table)] = table
        self._look_at_numbers(table)
        table.numbers[COLUMN["token_base"]] = self._take(self._tokens, TOKEN_ARRAYS, FIRST_TOKENS)
        table.numbers[COLUMN["block_base"]] = self._take(self._blocks, BLOCK_ARRAYS, FIRST_BLOCKS)
        self._look(table, FIRST_TOKENS, FIRST_BLOCKS)

    def remove(self, table) -> None:
        """Take a table's regions back; whoever still holds the table reads a copy."""
        del self._tables[id(table)]
        self._tokens.give(table.token_base, table.token_room)
        self._blocks.give(table.block_base, table.block_room)
        self._rows.give(table.number_row, 1)
        for name in ARRAYS:
            setattr(table, name, getattr(table, name).copy())
        table.numbers = memoryview(self.numbers[table.number_row].copy())

    def grow_tokens(self, table, num_tokens: int) -> None:
        """Move a table to a region for at least this many logical ids."""
        size = _region_size(num_tokens)
        base = self._take(self._tokens, TOKEN_ARRAYS, size)
        self._copy(TOKEN_ARRAYS, table, base)
        self._tokens.give(table.token_base, table.token_room)
        table.numbers[COLUMN["token_base"]] = base
        self._look(table, size, table.block_room)

    def grow_blocks(self, table, num_blocks: int) -> None:
        """Move a table to a region for at least this many blocks."""
        size = _region_size(num_blocks)
        base = self._take(self._blocks, BLOCK_ARRAYS, size)
        self._copy(BLOCK_ARRAYS, table, base)
        self._blocks.give(table.block_base, table.block_room)
        table.numbers[COLUMN["block_base"]] = base
        self._look(table, table.token_room, size)

    def _span(self, name: str, start: int, size: int) -> slice:
        """The part of an array that belongs to a region."""
        if name == "id_at":
            return slice(start * self.block_size, (start + size) * self.block_size)
        if name == "live_in_chunk":
            return slice(start // CHUNK_TOKENS, (start + size) // CHUNK_TOKENS)
        return slice(start, start + size)

    def _take(self, regions: _Regions, names: tuple[str, ...], size: int) -> int:
        """Start of a region, empty."""
        base, is_longer = regions.take(size), False
        for name in names:
            array = getattr(self, name)
            needed = self._span(name, 0, regions.end).stop
            if needed > len(array):
                longer = np.empty(max(needed, 2 * len(array)), np.int32)
                longer[: len(array)] = array
                setattr(self, name, longer)
                is_longer = True
            getattr(self, name)[self._span(name, base, size)] = _EMPTY.get(name, -1)
        if is_longer:
            self.version += 1
            for table in self._tables.values():
                if hasattr(table, "index_of"):
                    self._look(table, table.token_room, table.block_room)
        return base

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

    def _copy(self, names: tuple[str, ...], table, base: int) -> None:
        for name in names:
            start, old = self._span(name, base, 0).start, getattr(table, name)
            getattr(self, name)[start : start + len(old)] = old

    def _look_at_numbers(self, table) -> None:
        # A memoryview gives and takes plain ints, in a third of the time numpy takes.
        table.numbers = memoryview(self.numbers[table.number_row])

    def _look(self, table, num_tokens: int, num_blocks: int) -> None:
        """Point a table's views at its regions."""
        table.numbers[COLUMN["token_room"]] = num_tokens
        table.numbers[COLUMN["block_room"]] = num_blocks
        for name in TOKEN_ARRAYS:
            span = self._span(name, table.token_base, num_tokens)
            setattr(table, name, getattr(self, name)[span])
        for name in BLOCK_ARRAYS:
            span = self._span(name, table.block_base, num_blocks)
            setattr(table, name, getattr(self, name)[span])


def _region_size(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()

"""One set of flat arrays for the tables of many requests.

Legend: N block size (tokens). Every table has a region in the arrays over logical ids and one in
the arrays over blocks; `id_at` has N entries for each of the latter. Regions
are an eighth longer than was needed when they were taken; one that a table has outgrown, or that
a finished request leaves, is given out again. A doubling would be simpler and faster, and take up
to 18 bytes a token.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from vtoken.units import cdiv

FIRST_TOKENS, FIRST_BLOCKS = 256, 8
TOKEN_QUANTUM, BLOCK_QUANTUM = 64, 8  # lengths are multiples; see live_index.CHUNK_TOKENS
TOKEN_ARRAYS, BLOCK_ARRAYS = ("index_of",), ("row", "pos_of", "block_id", "live_in", "id_at")
_EMPTY = {"live_in": 0}  # others: -1


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


class Arena:
    """Attributes:
    index_of: int32 over logical ids; row, pos_of, block_id, live_in: int32 over blocks; id_at:
        int32 over slots. See vtoken.core.table for what they hold.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._tokens, self._blocks = _Regions(), _Regions()
        self._tables: dict[int, object] = {}
        for name in (*TOKEN_ARRAYS, *BLOCK_ARRAYS):
            setattr(self, name, np.empty(0, np.int32))

    def add(self, table) -> None:
        """Give a new table its regions."""
        self._tables[id(table)] = table
        table.token_base = self._take(self._tokens, TOKEN_ARRAYS, FIRST_TOKENS)
        table.block_base = self._take(self._blocks, BLOCK_ARRAYS, FIRST_BLOCKS)
        self._look(table, FIRST_TOKENS, FIRST_BLOCKS)

    def remove(self, table) -> None:
        """Take a table's regions back; whoever still holds the table reads a copy."""
        del self._tables[id(table)]
        self._tokens.give(table.token_base, len(table.index_of))
        self._blocks.give(table.block_base, len(table.row))
        for name in (*TOKEN_ARRAYS, *BLOCK_ARRAYS):
            setattr(table, name, getattr(table, name).copy())

    def grow_tokens(self, table, num_tokens: int) -> None:
        """Give a table a region for at least this many logical ids."""
        base, old = table.token_base, len(table.index_of)
        size = cdiv(_with_room(num_tokens), TOKEN_QUANTUM) * TOKEN_QUANTUM
        table.token_base = self._grow(self._tokens, TOKEN_ARRAYS, base, old, size)
        self._look(table, size, len(table.row))

    def grow_blocks(self, table, num_blocks: int) -> None:
        """Give a table a region for at least this many blocks."""
        base, old = table.block_base, len(table.row)
        size = cdiv(_with_room(num_blocks), BLOCK_QUANTUM) * BLOCK_QUANTUM
        table.block_base = self._grow(self._blocks, BLOCK_ARRAYS, base, old, size)
        self._look(table, len(table.index_of), size)

    def _grow(self, regions: _Regions, names: tuple[str, ...], base: int, old: int, size: int):
        """Start of a longer region that begins with what a shorter one holds."""
        if regions.extend(base, old, size):
            self._clear(regions, names, base + old, size - old)
            return base
        new = self._take(regions, names, size)
        for name in names:
            width, array = self._per_entry(name), getattr(self, name)
            array[new * width : (new + old) * width] = array[base * width : (base + old) * width]
        regions.give(base, old)
        return new

    def _per_entry(self, name: str) -> int:
        return self.block_size if name == "id_at" else 1

    def _take(self, regions: _Regions, names: tuple[str, ...], size: int) -> int:
        """Start of a region, empty."""
        base = regions.take(size)
        self._clear(regions, names, base, size)
        return base

    def _clear(self, regions: _Regions, names: tuple[str, ...], base: int, size: int) -> None:
        """Empty a range, after making the arrays as long as the axis is."""
        is_longer = False
        for name in names:
            width, array = self._per_entry(name), getattr(self, name)
            if regions.end * width > len(array):
                longer = np.empty(
                    max(regions.end, _with_room(len(array) // width)) * width, np.int32
                )
                longer[: len(array)] = array
                setattr(self, name, longer)
                is_longer = True
            getattr(self, name)[base * width : (base + size) * width] = _EMPTY.get(name, -1)
        if is_longer:
            for table in self._tables.values():
                if hasattr(table, "index_of"):
                    self._look(table, len(table.index_of), len(table.row))

    def _look(self, table, num_tokens: int, num_blocks: int) -> None:
        """Point a table's views at its regions."""
        start, N = table.token_base, self.block_size
        table.index_of = self.index_of[start : start + num_tokens]
        start = table.block_base
        for name in ("row", "pos_of", "block_id", "live_in"):
            setattr(table, name, getattr(self, name)[start : start + num_blocks])
        table.id_at = self.id_at[start * N : (start + num_blocks) * N]

"""One set of flat arrays for the tables of many requests.

Legend: N block size (tokens). Every table has a region in the arrays over logical ids and one in
the arrays over blocks; `id_at` has N entries for each of the latter. Regions are powers of two
long. One that a table has outgrown, or that a finished request leaves, is given out again.
"""

from __future__ import annotations

import numpy as np

FIRST_TOKENS, FIRST_BLOCKS = 256, 8
TOKEN_ARRAYS, BLOCK_ARRAYS = ("index_of",), ("row", "pos_of", "block_id", "live_in", "id_at")
_EMPTY = {"live_in": 0}  # others: -1


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
        """Move a table to a region for at least this many logical ids."""
        size = _region_size(num_tokens)
        base = self._take(self._tokens, TOKEN_ARRAYS, size)
        self._copy(TOKEN_ARRAYS, table, base)
        self._tokens.give(table.token_base, len(table.index_of))
        table.token_base = base
        self._look(table, size, len(table.row))

    def grow_blocks(self, table, num_blocks: int) -> None:
        """Move a table to a region for at least this many blocks."""
        size = _region_size(num_blocks)
        base = self._take(self._blocks, BLOCK_ARRAYS, size)
        self._copy(BLOCK_ARRAYS, table, base)
        self._blocks.give(table.block_base, len(table.row))
        table.block_base = base
        self._look(table, len(table.index_of), size)

    def _per_entry(self, name: str) -> int:
        return self.block_size if name == "id_at" else 1

    def _take(self, regions: _Regions, names: tuple[str, ...], size: int) -> int:
        """Start of a region, empty."""
        base, is_longer = regions.take(size), False
        for name in names:
            width, array = self._per_entry(name), getattr(self, name)
            if regions.end * width > len(array):
                longer = np.empty(max(regions.end, 2 * (len(array) // width)) * width, np.int32)
                longer[: len(array)] = array
                setattr(self, name, longer)
                is_longer = True
            getattr(self, name)[base * width : (base + size) * width] = _EMPTY.get(name, -1)
        if is_longer:
            for table in self._tables.values():
                if hasattr(table, "index_of"):
                    self._look(table, len(table.index_of), len(table.row))
        return base

    def _copy(self, names: tuple[str, ...], table, base: int) -> None:
        for name in names:
            start, old = base * self._per_entry(name), getattr(table, name)
            getattr(self, name)[start : start + len(old)] = old

    def _look(self, table, num_tokens: int, num_blocks: int) -> None:
        """Point a table's views at its regions."""
        start, N = table.token_base, self.block_size
        table.index_of = self.index_of[start : start + num_tokens]
        start = table.block_base
        for name in ("row", "pos_of", "block_id", "live_in"):
            setattr(table, name, getattr(self, name)[start : start + num_blocks])
        table.id_at = self.id_at[start * N : (start + num_blocks) * N]


def _region_size(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()

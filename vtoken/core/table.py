"""The token table: per request, where every token's KV lives and which tokens are live.

Shape legend: T tokens, B blocks of a request, N block size (tokens).

    logical id ----index_of----> local slot  = handle * N + offset       (-1: dead)
    local slot ----id_at-------> logical id                              (-1: hole or never used)
    block_table[i]             = handle of the i-th block of vLLM's block table
    pos_of[handle]             = i                                 (-1: not owned)
    block_id[handle]           = vLLM's block id

    physical index p of a token = pos_of[handle] * N + offset: what attention and vLLM's slot
    mapping count in. It changes when a block leaves the table; a local slot does not, so releasing
    a block costs O(B) and never O(T).

Steady growth costs nothing: tokens appended at the tail are registered lazily, when someone next
reads the table (`sync_new_tokens`). The maps take 8 bytes a token, plus 16 a block.

All tables of a `TokenTable` lie in one `Arena`: flat arrays of which each table has a region, so
that what is due in a step is done for all requests at once (`vtoken.core.ops`).

Source: paper section 3.2; its three interfaces are `RequestTable.evict_tokens`, `sync_new_tokens`
and `apply_moves`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from vtoken.core.arena import COLUMN, SPAN_TOKENS, Arena
from vtoken.units import cdiv

ONE = np.int32(1)  # ufunc.at is slow where it has to convert
NO_SLOTS = np.empty(0, np.int32)
NULL_BLOCK = 0  # vLLM's placeholder: no request owns it


class _Number(Protocol):
    """The type of a property that holds an int."""

    def __get__(self, table: RequestTable, kind: type[RequestTable]) -> int: ...

    def __set__(self, table: RequestTable, value: int) -> None: ...


def _number(name: str) -> _Number:
    """A count that lies in the table's row of `Arena.numbers`, as a plain int."""
    column = COLUMN[name]

    def get(table: RequestTable) -> int:
        return table.numbers[column]

    def put(table: RequestTable, value: int) -> None:
        table.numbers[column] = value

    return property(get, put)


class RequestTable:
    """The layout of one request.

    Attributes:
        num_computed_tokens: logical ids registered; id i < this is live or dead.
        num_live_tokens, num_physical_tokens: live ids; slots in use below the tail (live + holes).
        num_evicted_tokens: ids dropped so far, `num_computed_tokens - num_live_tokens`.
        num_blocks: blocks in the block table. Those of `naive` keep a placeholder for a released block.
        holes: int32, local slots of dead tokens in owned blocks, in no order.
        index_of, id_at, block_table, pos_of, block_id, live_in, free_handle, live_in_span: int32, views of
            the table's regions in its arena; replaced when a region grows. `live_in` has the live
            tokens per handle, `live_in_span` per SPAN_TOKENS ids; `free_handle` is a stack.
        token_base, block_base, token_room, block_room: where the regions begin, how long they are.
        numbers, number_row: the table's row of the arena's numbers, and which one it is.
    """

    __slots__ = (  # noqa: RUF023 - grouped by meaning
        "req_id", "block_size", "arena", "numbers", "number_row", "holes",
        "index_of", "live_in_span", "id_at",
        "block_table", "pos_of", "block_id", "live_in", "free_handle",
    )  # fmt: skip

    numbers: memoryview[int]
    number_row: int
    holes: np.ndarray
    index_of: np.ndarray
    live_in_span: np.ndarray
    id_at: np.ndarray
    block_table: np.ndarray
    pos_of: np.ndarray
    block_id: np.ndarray
    live_in: np.ndarray
    free_handle: np.ndarray

    num_computed_tokens = _number("num_computed_tokens")
    num_physical_tokens = _number("num_physical_tokens")
    num_live_tokens = _number("num_live_tokens")
    num_blocks = _number("num_blocks")
    token_base, block_base = _number("token_base"), _number("block_base")
    token_room, block_room = _number("token_room"), _number("block_room")
    _num_handles, _num_free = _number("num_handles"), _number("num_free_handles")
    _dead_from, _dead_to = _number("dead_from"), _number("dead_to")

    def __init__(self, req_id: str, block_size: int, arena: Arena | None = None) -> None:
        self.req_id, self.block_size = req_id, block_size
        self.holes = NO_SLOTS
        self.arena = Arena(block_size) if arena is None else arena
        self.arena.add(self)

    # ---- derived numbers -------------------------------------------------------------------

    @property
    def num_evicted_tokens(self) -> int:
        return self.num_computed_tokens - self.num_live_tokens

    @property
    def num_reclaimed_tokens(self) -> int:
        """Logical length minus physical length: what the worker subtracts from positions."""
        return self.num_computed_tokens - self.num_physical_tokens

    @property
    def num_holes(self) -> int:
        return self.num_physical_tokens - self.num_live_tokens

    @property
    def is_packed(self) -> bool:
        return self.num_physical_tokens == self.num_live_tokens

    # ---- growth ----------------------------------------------------------------------------

    def sync_new_tokens(self, new_block_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Register blocks and tokens that were appended since the last call.

        Args:
            new_block_ids: vLLM's block table from position `num_blocks` on.
            num_computed_tokens: logical length now; ids from the old one on sit at the tail.
        """
        for block_id in new_block_ids:
            self._add_block(block_id)
        grown = num_computed_tokens - self.num_computed_tokens
        if grown > 0:
            self._append(grown)

    def _add_block(self, block_id: int) -> None:
        self.make_room(self.num_blocks + 1, 0)
        handle = self.take_handle()
        self.block_table[self.num_blocks] = handle
        self.pos_of[handle] = self.num_blocks
        self.block_id[handle] = block_id
        self.live_in[handle] = 0
        self.num_blocks += 1

    def take_handle(self) -> int:
        """A handle for a new block; there is room for it after `make_room`."""
        if self._num_free:
            self._num_free -= 1
            return int(self.free_handle[self._num_free])
        self._num_handles += 1
        return self._num_handles - 1

    def give_handle(self, handle: int) -> None:
        """Let the handle of a block that is gone, its slots empty, be used again."""
        self.free_handle[self._num_free] = handle
        self._num_free += 1

    def make_room(self, num_blocks: int, num_tokens: int) -> None:
        """Let the regions hold a block table of this many blocks, and this many logical ids."""
        new_handles = num_blocks - self.num_blocks - self._num_free
        most = max(num_blocks, self._num_handles + max(0, new_handles))
        if most > self.block_room:
            self.arena.grow_blocks(self, most)
        if num_tokens > self.token_room:
            self.arena.grow_tokens(self, num_tokens)

    def _append(self, count: int) -> None:
        """Give the next `count` logical ids the next physical indices."""
        N, first_id, first = self.block_size, self.num_computed_tokens, self.num_physical_tokens
        last = first + count
        assert last <= self.num_blocks * N, (self.req_id, last, self.num_blocks, N)
        self.make_room(0, first_id + count)
        physical = np.arange(first, last, dtype=np.int32)
        local = self.block_table[physical // N] * N + physical % N
        self.index_of[first_id : first_id + count] = local
        self.id_at[local] = np.arange(first_id, first_id + count, dtype=np.int32)
        touched = self.block_table[first // N : cdiv(last, N)]
        self.live_in[touched] += np.bincount(
            physical // N - first // N, minlength=len(touched)
        ).astype(np.int32)
        self._count_live(first_id, first_id + count)
        self.num_computed_tokens += count
        self.num_physical_tokens += count
        self.num_live_tokens += count

    def _count_live(self, first_id: int, end_id: int) -> None:
        """Ids first_id .. end_id - 1 have become live."""
        first, end = first_id // SPAN_TOKENS, cdiv(end_id, SPAN_TOKENS)
        self.live_in_span[first:end] += np.int32(SPAN_TOKENS)
        self.live_in_span[first] -= first_id - first * SPAN_TOKENS
        self.live_in_span[end - 1] -= end * SPAN_TOKENS - end_id

    # ---- reading ---------------------------------------------------------------------------

    def live_ids(self) -> np.ndarray:
        """int32[T], live logical ids, ascending."""
        live = np.flatnonzero(self.index_of[: self.num_computed_tokens] >= 0)
        return live.astype(np.int32)

    def oldest(self, count: int, first_id: int = 0) -> np.ndarray:
        """int32[<= count], the lowest live ids >= first_id; O(count), however long the context.

        Dead ids never come back, so the end of the dead run that starts at `first_id` is kept
        from call to call.
        """
        if count <= 0:
            return NO_SLOTS
        start, missing, width = self.dead_run_end(first_id), count, count + 32
        if (
            start + count <= self.num_computed_tokens
            and self.index_of[start : start + count].min() >= 0
        ):
            return np.arange(start, start + count, dtype=np.int32)
        found: list[np.ndarray] = []
        while missing > 0 and start < self.num_computed_tokens:
            stop = min(start + width, self.num_computed_tokens)
            ids = np.flatnonzero(self.index_of[start:stop] >= 0)[:missing] + start
            if not found:
                self._dead_to = int(ids[0]) if len(ids) else stop
            if len(ids):
                found.append(ids)
            missing -= len(ids)
            start, width = stop, 2 * width
        return np.concatenate(found).astype(np.int32) if found else NO_SLOTS

    def dead_run_end(self, first_id: int) -> int:
        """Where the run of dead ids that starts at `first_id` ends, as far as is known."""
        if first_id != self._dead_from:
            self._dead_from = self._dead_to = first_id
        return self._dead_to

    def extend_dead_run(self, first_id: int, end_id: int) -> None:
        """Ids first_id .. end_id - 1 died together: remember it where the known run ends there."""
        if first_id == self._dead_to:
            self._dead_to = end_id

    def physical_of(self, local: np.ndarray) -> np.ndarray:
        """int32[K], physical indices of local slots."""
        return self.pos_of[local // self.block_size] * self.block_size + local % self.block_size

    def local_of(self, physical: np.ndarray) -> np.ndarray:
        """int32[K], local slots of physical indices."""
        return (
            self.block_table[physical // self.block_size] * self.block_size
            + physical % self.block_size
        )

    def slots_of(self, local: np.ndarray) -> np.ndarray:
        """int64[K], vLLM slots (block_id * block_size + offset) of local slots."""
        blocks = self.block_id[local // self.block_size].astype(np.int64)
        return blocks * self.block_size + local % self.block_size

    def ids_by_physical_index(self) -> np.ndarray:
        """int32[num_physical_tokens], the logical id at each physical index, -1 for a hole."""
        N, used = self.block_size, cdiv(self.num_physical_tokens, self.block_size)
        by_block = self.id_at.reshape(-1, N)[self.block_table[:used]]
        return by_block.reshape(-1)[: self.num_physical_tokens]

    def live_mask(self) -> np.ndarray:
        """bool[num_physical_tokens], which physical indices hold a live token."""
        return self.ids_by_physical_index() >= 0

    def live_per_block(self) -> np.ndarray:
        """int32[num_blocks], live tokens in each block of the block table."""
        return self.live_in[self.block_table[: self.num_blocks]]

    def block_ids(self) -> np.ndarray:
        """int32[num_blocks], vLLM block ids in the block table's order."""
        return self.block_id[self.block_table[: self.num_blocks]]

    # ---- writing ---------------------------------------------------------------------------

    def evict_tokens(self, ids: np.ndarray) -> np.ndarray:
        """Mark live ids dead; nothing moves.

        Returns:
            int32[K], the local slots that became holes.
        """
        local = self.index_of[ids]
        assert (local >= 0).all(), f"{self.req_id}: evicting a token that is not live"
        self.index_of[ids] = -1
        self.id_at[local] = -1
        np.subtract.at(self.live_in, local // self.block_size, ONE)
        self.num_live_tokens -= len(ids)
        np.subtract.at(self.live_in_span, ids // SPAN_TOKENS, ONE)
        self.holes = np.concatenate([self.holes, local]) if len(self.holes) else local
        return local

    def apply_moves(self, source: np.ndarray, destination: np.ndarray) -> None:
        """Relocate live tokens from local slots to dead ones, all at once.

        Every source is cleared and every destination written before anything can be read, so
        the table never shows half a relocation.
        """
        ids = self.id_at[source]
        assert (ids >= 0).all() and (self.id_at[destination] < 0).all(), self.req_id
        self.id_at[source] = -1
        self.id_at[destination] = ids
        self.index_of[ids] = destination
        N = self.block_size
        np.subtract.at(self.live_in, source // N, ONE)
        np.add.at(self.live_in, destination // N, ONE)

    def put_next(self, local: int) -> None:
        """Give the next logical id a dead slot inside the layout (slot reuse, no copy)."""
        logical = self.num_computed_tokens
        assert self.id_at[local] < 0
        self.make_room(0, logical + 1)
        self.index_of[logical] = local
        self.id_at[local] = logical
        self.live_in[local // self.block_size] += 1
        self.live_in_span[logical // SPAN_TOKENS] += 1
        self.num_computed_tokens += 1
        self.num_live_tokens += 1

    def set_block_table(self, kept: np.ndarray) -> np.ndarray:
        """Keep only these positions, in this order; forget the other blocks.

        The caller has seen to it that no live token is left in a block that goes away, or moves
        them in the same step (their ids stay in `id_at` until the handle is used again).

        Returns:
            int32, handles of the blocks that left the block table.
        """
        old = self.block_table[: self.num_blocks].copy()
        new = old[kept]
        self.pos_of[old] = -1
        self.pos_of[new] = np.arange(len(new), dtype=np.int32)
        self.block_table[: len(new)] = new
        self.num_blocks = len(new)
        return old[self.pos_of[old] < 0]

    def forget_handles(self, handles: np.ndarray) -> None:
        """Let handles of blocks that left the block table be used again; their slots must be empty."""
        if not len(handles):
            return
        assert not self.live_in[handles].any(), f"{self.req_id}: a released block has live tokens"
        self.id_at.reshape(-1, self.block_size)[handles] = -1
        first = self._num_free
        self.free_handle[first : first + len(handles)] = handles
        self._num_free = first + len(handles)


class TokenTable:
    """All requests' tables, by request id, in one arena."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.arena = Arena(block_size)
        self._tables: dict[str, RequestTable] = {}

    def __len__(self) -> int:
        return len(self._tables)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._tables

    def __iter__(self) -> Iterator[RequestTable]:
        return iter(self._tables.values())

    def get(self, req_id: str) -> RequestTable | None:
        return self._tables.get(req_id)

    def __getitem__(self, req_id: str) -> RequestTable:
        return self._tables[req_id]

    def add(self, req_id: str) -> RequestTable:
        """Start an empty table for a request, replacing an older one of that id."""
        self.forget(req_id)
        table = self._tables[req_id] = RequestTable(req_id, self.block_size, self.arena)
        return table

    def forget(self, req_id: str) -> None:
        """Drop a request's table (finish, abort, preemption); unknown ids are fine."""
        table = self._tables.pop(req_id, None)
        if table is not None:
            self.arena.remove(table)

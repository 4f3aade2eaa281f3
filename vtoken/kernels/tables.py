"""`BatchOps` compiled: what a step does to the tables of many requests, one C++ call for each.

The sources are in csrc/tables; they are built and cached like the kernels, and need no particular
processor. Arguments are copied into buffers whose addresses are known: an array's own address
costs more to ask for than a short copy takes. Where nothing can be compiled numpy stays in force,
with the same results.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from ctypes import Structure, byref, c_int64, c_void_p

import numpy as np

from vtoken.core.arena import ARRAYS, NUMBERS, Arena
from vtoken.core.batch import BatchOps, Eviction, Packed, ScoredIds, Tables
from vtoken.core.batch_numpy import NumpyOps
from vtoken.kernels import build

logger = logging.getLogger("vtoken.kernels")

NEEDS_ROOM, NEEDS_SPACE = 1, 2
ERRORS = {
    3: "its numbers describe no region of the arena",
    4: "tokens are appended where the row has no block",
    5: "evicting a token that is not live, or none",
    6: "a block or a slot that it does not own",
    7: "a row was not packed before the eviction",
    8: "holes and displaced tokens do not pair up",
    9: "a released block is in use",
    10: "a rank or an id that is out of range",
}

_library: ctypes.CDLL | None = None
_why_not: str | None = None


class _Arena(Structure):
    _fields_ = [
        ("numbers", c_void_p), *((name, c_void_p) for name in ARRAYS),
        ("num_rows", c_int64), ("num_tokens", c_int64), ("num_blocks", c_int64),
        ("block_size", c_int64),
    ]  # fmt: skip


class _Buffer:
    """An array that is used for call after call, and its address."""

    __slots__ = ("address", "array")

    def __init__(self, dtype, size: int = 1024) -> None:
        self._make(dtype, size)

    def _make(self, dtype, size: int) -> None:
        self.array = np.empty(size, dtype)
        self.address = self.array.__array_interface__["data"][0]

    def room(self, size: int) -> int:
        """Hold at least this many entries, whose values are lost; returns the address."""
        if size > len(self.array):
            self._make(self.array.dtype, 2 * size)
        return self.address

    def put(self, values: Sequence[int] | np.ndarray) -> int:
        """Hold these values; returns the address."""
        size = len(values)
        if size > len(self.array):
            self.room(size)
        self.array[:size] = values
        return self.address

    def take(self, size: int) -> np.ndarray:
        """A copy of the first entries."""
        return self.array[:size].copy()


def load_ops() -> BatchOps:
    """Operations for one arena: compiled where that works here, else in numpy.

    Compiles once and says once, in the log, why it does not.
    """
    global _library, _why_not
    if _library is None and _why_not is None:
        try:
            _library = _declare(build.load_library("tables"))
        except (build.BuildError, ImportError) as error:  # no fcntl, outside of Unix
            _why_not = str(error)
            logger.warning("The scheduler's bookkeeping runs in numpy: %s", _why_not)
    return NumpyOps() if _library is None else CompiledOps(_library)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Let integers go through as pointers and int64."""
    for name, num_args in (
        ("sync", 6), ("oldest", 7), ("lowest_scored", 12), ("count_below", 5), ("at_ranks", 6),
        ("draw", 5), ("ids_by_index", 5), ("execute", 12), ("pack", 20),
    ):  # fmt: skip
        function = getattr(library, f"vtt_{name}")
        function.restype = c_int64
        # Every argument is 8 bytes wide: a pointer or an int64.
        function.argtypes = [c_void_p if name != "draw" else c_int64] + [c_int64] * (num_args - 1)
    return library


class CompiledOps(NumpyOps):
    """See `vtoken.core.batch.BatchOps` for what each does. For one arena, one thread at a time."""

    name = "compiled"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._arena, self._seen = _Arena(), (None, -1)
        self._pointer = byref(self._arena)
        for kind, names in (
            (np.int64, ("rows", "counts", "firsts", "ends", "sizes", "ids", "ranks", "found",
                        "ids_at", "scores_at", "num_blocks", "num_keep", "last", "num_new",
                        "appended", "row_counts", "move_counts", "source", "destination",
                        "totals")),
            (np.int32, ("new_ids", "holes", "gone", "token_index", "kept")),
        ):  # fmt: skip
            for name in names:
                setattr(self, f"_{name}", _Buffer(kind))
        self._draws_alike = self._check_draws()

    # ---- calling ---------------------------------------------------------------------------

    def _look(self, arena: Arena) -> None:
        """Learn where the arena's arrays are."""
        if self._seen == (arena, arena.version):
            return
        raw = self._arena
        for name in ("numbers", *ARRAYS):
            array = getattr(arena, name)
            assert array.flags.c_contiguous
            setattr(raw, name, array.__array_interface__["data"][0])
        assert arena.numbers.shape[1] == len(NUMBERS)
        raw.num_rows, raw.block_size = len(arena.numbers), arena.block_size
        raw.num_tokens, raw.num_blocks = len(arena.index_of), len(arena.row)
        self._seen = (arena, arena.version)

    @staticmethod
    def _check(code: int, batch: Tables) -> None:
        if code:
            raise AssertionError(f"{batch.tables[code >> 8].req_id}: {ERRORS[code & 255]}")

    # ---- growth ----------------------------------------------------------------------------

    def sync(
        self, batch: Tables, new_block_ids: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> None:
        new_counts = [len(new) for new in new_block_ids]
        rows, counts = self._rows.put(batch.rows), self._counts.put(new_counts)
        new_ids = self._new_ids.put([i for new in new_block_ids for i in new])
        wanted = self._ends.put(lengths)
        while True:  # once more for each request that has outgrown its region
            self._look(batch.arena)
            code = self._library.vtt_sync(
                self._pointer, len(batch), rows, counts, new_ids, wanted
            )
            if code & 255 != NEEDS_ROOM:
                return self._check(code, batch)
            e = code >> 8
            table = batch.tables[e]
            table.make_room(table.num_blocks + new_counts[e], int(lengths[e]))

    # ---- reading ---------------------------------------------------------------------------

    def oldest(
        self, batch: Tables, counts: np.ndarray, first_ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        self._look(batch.arena)
        E = len(batch)
        out = self._ids.room(int(counts.sum(where=counts > 0)))
        code = self._library.vtt_oldest(
            self._pointer, E, self._rows.put(batch.rows), self._counts.put(counts),
            self._firsts.put(first_ids), out, self._found.room(E),
        )  # fmt: skip
        self._check(code, batch)
        found = self._found.take(E)
        return self._ids.take(int(found.sum())), found

    def lowest_scored(
        self,
        batch: Tables,
        scored: Sequence[ScoredIds],
        first_ids: np.ndarray,
        end_ids: np.ndarray,
        counts: np.ndarray,
        sign: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        self._look(batch.arena)
        E, bases = len(batch), {}
        ids_at, scores_at = [], []
        for part in scored:
            ids, scores = part.ids, part.scores
            for array, start, dtype in (
                (ids, part.ids_start, np.int32), (scores, part.scores_start, np.float32)
            ):  # fmt: skip
                assert 0 <= start and start + part.count <= len(array)
                if id(array) not in bases:
                    assert array.dtype == dtype and array.flags.c_contiguous
                    bases[id(array)] = array.__array_interface__["data"][0]
            ids_at.append(bases[id(ids)] + 4 * part.ids_start)
            scores_at.append(bases[id(scores)] + 4 * part.scores_start)
        out = self._ids.room(int(counts.sum(where=counts > 0)))
        code = self._library.vtt_lowest_scored(
            self._pointer, E, self._rows.put(batch.rows), self._ids_at.put(ids_at),
            self._scores_at.put(scores_at), self._sizes.put([part.count for part in scored]),
            self._firsts.put(first_ids), self._ends.put(end_ids), self._counts.put(counts), sign,
            out, self._found.room(E),
        )  # fmt: skip
        self._check(code, batch)
        found = self._found.take(E)
        return self._ids.take(int(found.sum())), found

    def count_below(self, batch: Tables, bounds: np.ndarray) -> np.ndarray:
        self._look(batch.arena)
        E = len(batch)
        code = self._library.vtt_count_below(
            self._pointer, E, self._rows.put(batch.rows), self._ends.put(bounds),
            self._found.room(E),
        )  # fmt: skip
        self._check(code, batch)
        return self._found.take(E)

    def at_ranks(self, batch: Tables, ranks: np.ndarray, counts: np.ndarray) -> np.ndarray:
        self._look(batch.arena)
        code = self._library.vtt_at_ranks(
            self._pointer, len(batch), self._rows.put(batch.rows), self._ranks.put(ranks),
            self._counts.put(counts), self._ids.room(len(ranks)),
        )  # fmt: skip
        self._check(code, batch)
        return self._ids.take(len(ranks))

    def draw(
        self, entropy: np.ndarray, num_candidates: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        # There numpy draws in another way.
        shuffles = (num_candidates > 10_000) & (counts > num_candidates // 50)
        if not self._draws_alike or shuffles.any():
            return super().draw(entropy, num_candidates, counts)
        return self._draw(entropy, num_candidates, counts)

    def _draw(self, entropy, num_candidates, counts) -> np.ndarray:
        total = int(counts.sum())
        code = self._library.vtt_draw(
            len(counts), self._ids_at.put(entropy.reshape(-1)), self._sizes.put(num_candidates),
            self._counts.put(counts), self._ranks.room(total),
        )  # fmt: skip
        assert code == 0, "more is drawn than there is"
        return self._ranks.take(total)

    def _check_draws(self) -> bool:
        """Whether this numpy draws what the library draws; how it does is its own business."""
        entropy = np.array([[0, 0, 1], [1, 2**32 - 1, 4096], [2**40, 7, 300], [5, 9, 20_000]])
        sizes, counts = np.array([1, 4000, 300, 20_000]), np.array([1, 16, 300, 300])
        ends = counts.cumsum()[:-1]
        ours, numpys = self._draw(entropy, sizes, counts), super().draw(entropy, sizes, counts)
        return all(
            sorted(a) == sorted(b)
            for a, b in zip(np.split(ours, ends), np.split(numpys, ends), strict=True)
        )

    def ids_by_index(self, batch: Tables) -> tuple[np.ndarray, list[int]]:
        self._look(batch.arena)
        starts = [0, *batch.number("num_physical_tokens").cumsum().tolist()]
        ids = np.empty(starts[-1], np.int32)
        code = self._library.vtt_ids_by_index(
            self._pointer, len(batch), self._rows.put(batch.rows), len(ids),
            ids.__array_interface__["data"][0],
        )  # fmt: skip
        assert code != NEEDS_SPACE
        self._check(code, batch)
        return ids, starts

    # ---- eviction --------------------------------------------------------------------------

    def execute(
        self, batch: Tables, ids: np.ndarray, counts: np.ndarray, num_new: int
    ) -> Eviction:
        self._look(batch.arena)
        E, K = len(batch), len(ids)
        assert counts.sum() == K and len(counts) == E
        rows, sizes = self._rows.put(batch.rows), self._counts.put(counts)
        victims, holes = self._ids.put(ids), self._holes.room(K)
        blocks, keep = self._num_blocks.room(E), self._num_keep.room(E)
        last = self._last.room(E)
        code = NEEDS_SPACE
        while code == NEEDS_SPACE:  # at most once more: then the blocks of all rows fit
            code = self._library.vtt_execute(
                self._pointer, E, rows, sizes, victims, num_new, len(self._gone.array),
                blocks, keep, last, holes, self._gone.address,
            )  # fmt: skip
            if code == NEEDS_SPACE:
                self._gone.room(int(batch.number("num_blocks").sum()))
        self._check(code, batch)
        num_blocks, num_keep = self._num_blocks.take(E), self._num_keep.take(E)
        return Eviction(
            num_blocks, num_keep, self._gone.take(int((num_blocks - num_keep).sum())),
            self._last.take(E), self._holes.take(K), counts,
        )  # fmt: skip

    def pack(self, batch: Tables, eviction: Eviction, num_new: np.ndarray) -> Packed:
        E = len(batch)
        num_gone = int((eviction.num_blocks - eviction.num_keep).sum())
        assert len(eviction.gone) == num_gone and len(eviction.holes) == eviction.counts.sum()
        given = (
            self._rows.put(batch.rows), self._num_new.put(num_new),
            self._num_blocks.put(eviction.num_blocks), self._num_keep.put(eviction.num_keep),
            self._last.put(eviction.last), self._gone.put(eviction.gone),
            self._holes.put(eviction.holes), self._counts.put(eviction.counts),
        )  # fmt: skip
        by_request = (
            self._token_index.room(E), self._appended.room(E), self._row_counts.room(E),
            self._move_counts.room(E),
        )  # fmt: skip
        while True:  # once more for each table that has outgrown its region, and for the buffers
            self._look(batch.arena)
            code = self._library.vtt_pack(
                self._pointer, E, *given, len(self._kept.array), len(self._source.array),
                *by_request, self._kept.address, self._source.address,
                self._destination.address, self._totals.address,
            )  # fmt: skip
            if code & 255 == NEEDS_ROOM:
                table = batch.tables[code >> 8]
                table.make_room(0, table.num_computed_tokens + 1)
            elif code == NEEDS_SPACE:
                self._make_space(batch, eviction)
            else:
                break
        self._check(code, batch)
        num_kept, num_moves, num_reused = self._totals.array[:3].tolist()
        row_counts = self._row_counts.take(E)
        return Packed(
            self._token_index.take(E), self._appended.take(E), num_reused, row_counts > 0,
            row_counts, self._kept.take(num_kept), self._source.take(num_moves),
            self._destination.take(num_moves), self._move_counts.take(E),
        )  # fmt: skip

    def _make_space(self, batch: Tables, eviction: Eviction) -> None:
        """Let the results of `pack` fit, however many there may be."""
        self._kept.room(int(eviction.num_keep.sum()))
        unused = batch.number("num_blocks") * batch.block_size - batch.number("num_physical_tokens")
        most_moves = len(eviction.holes) + int(unused.sum())
        self._source.room(most_moves)
        self._destination.room(most_moves)

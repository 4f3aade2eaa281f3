"""`BatchOps` compiled: what a step does to the tables of many requests, one C++ call for each.

The sources are in csrc/tables; they are built and cached like the kernels, and need no particular
processor. Where nothing can be compiled numpy stays in force, with the same results.

Between one step's bookkeeping and the next lies all the rest of a step, so little of it is in the
processor's caches and every library call costs several times what it does in a loop. Hence lists
and `array.array`, whose few operations the rest of the step uses too, where there is one number for
each request, and numpy only for what there is one of for each token.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import Structure, byref, c_int64, c_void_p
from itertools import chain

import numpy as np

from vtoken.core.arena import ARRAYS, CHUNK_TOKENS, NUMBERS, Arena
from vtoken.core.batch import BatchOps, Eviction, Packed, ScoredIds, Tables
from vtoken.core.batch_numpy import NumpyOps
from vtoken.core.events import BatchSteps
from vtoken.kernels import build

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
    """An array that results are written into, call after call, and its address."""

    __slots__ = ("address", "array", "view")

    def __init__(self, dtype, size: int = 1024) -> None:
        self.array = np.empty(size, dtype)
        self.address = self.array.__array_interface__["data"][0]
        self.view = memoryview(self.array)

    def room(self, size: int) -> int:
        """Hold at least this many entries, whose values are lost; returns the address."""
        if size > len(self.array):
            self.__init__(self.array.dtype, 2 * size)
        return self.address

    def put(self, values: np.ndarray) -> int:
        """Hold these values; returns the address."""
        self.room(len(values))
        self.array[: len(values)] = values
        return self.address

    def take(self, size: int) -> np.ndarray:
        """A copy of the first entries."""
        return self.array[:size].copy()

    def ints(self, size: int) -> list[int]:
        """The first entries."""
        return self.view[:size].tolist()


def _address(numbers: array) -> int:
    return numbers.buffer_info()[0]


def _columns(*parts: Sequence[int]) -> tuple[array, list[int]]:
    """Several ints[E] in one array that has to be kept alive, and the address of each."""
    flat: list[int] = []
    for part in parts:
        flat.extend(part)  # not +=, which an array would take for addition
        assert len(part) == len(parts[0])
    numbers, size = array("q", flat), 8 * len(parts[0])
    first = _address(numbers)
    return numbers, [first + size * i for i in range(len(parts))]


def _base(numbers: np.ndarray, dtype) -> int:
    assert numbers.dtype == dtype and numbers.flags.c_contiguous
    return numbers.__array_interface__["data"][0]


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
            build.say_once(_why_not, "The scheduler's bookkeeping runs in numpy")
    return NumpyOps() if _library is None else CompiledOps(_library)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Let integers go through as pointers and int64, as far as both sides know the same names."""
    functions = {
        "sync": 6, "oldest": 8, "lowest_scored": 12, "count_below": 5, "at_ranks": 6,
        "draw": 5, "execute": 13, "pack": 19,
    }  # fmt: skip
    build.check_shared(library, {
        "numbers": NUMBERS, "chunk_tokens": [str(CHUNK_TOKENS)], **build.fields_of(_Arena),
        "functions": [f"vtt_{name}/{num_args}" for name, num_args in functions.items()],
    })  # fmt: skip
    for name, num_args in functions.items():
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
        for name in ("ids", "ranks", "found", "of_rows", "gone", "appended", "source",
                     "destination"):  # fmt: skip
            setattr(self, f"_{name}", _Buffer(np.int64))
        self._holes, self._kept, self._of_requests = (_Buffer(np.int32) for _ in range(3))
        self._rewrites = _Buffer(bool)
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
        given, (counts, wanted) = _columns(list(map(len, new_block_ids)), lengths)
        new_ids = array("i", chain.from_iterable(new_block_ids))
        at = _address(batch.rows), counts, _address(new_ids), wanted
        while True:  # once more for each request that has outgrown its region
            self._look(batch.arena)
            code = self._library.vtt_sync(self._pointer, len(batch), *at)
            if code & 255 != NEEDS_ROOM:
                return self._check(code, batch)
            e = code >> 8
            table = batch.tables[e]
            table.make_room(table.num_blocks + given[e], lengths[e])

    # ---- reading ---------------------------------------------------------------------------

    def oldest(
        self, batch: Tables, counts: list[int], first_ids: list[int], end_ids: list[int]
    ) -> tuple[np.ndarray, list[int]]:
        self._look(batch.arena)
        E, most = len(batch), sum(n for n in counts if n > 0)
        _given, bounds = _columns(counts, first_ids, end_ids)
        code = self._library.vtt_oldest(
            self._pointer, E, _address(batch.rows), *bounds, self._ids.room(most),
            self._found.room(E),
        )  # fmt: skip
        self._check(code, batch)
        found = self._found.ints(E)
        return self._ids.take(sum(found)), found

    def lowest_scored(
        self,
        batch: Tables,
        scored: Sequence[ScoredIds],
        first_ids: list[int],
        end_ids: list[int],
        counts: list[int],
        sign: int,
    ) -> tuple[np.ndarray, list[int]]:
        self._look(batch.arena)
        E, most = len(batch), sum(n for n in counts if n > 0)
        bases: dict[int, int] = {}  # most requests' parts are of the same array
        ids_at, scores_at, sizes = [], [], []
        for ids, scores, start, count in scored:
            assert 0 <= start and start + count <= len(scores)
            base = bases.get(id(scores))
            if base is None:
                base = bases[id(scores)] = _base(scores, np.float32)
            scores_at.append(base + 4 * start)
            assert ids is None or len(ids) == count
            ids_at.append(0 if ids is None else _base(ids, np.int32))
            sizes.append(count)
        _given, at = _columns(ids_at, scores_at, sizes, first_ids, end_ids, counts)
        code = self._library.vtt_lowest_scored(
            self._pointer, E, _address(batch.rows), *at, sign, self._ids.room(most),
            self._found.room(E),
        )  # fmt: skip
        self._check(code, batch)
        found = self._found.ints(E)
        return self._ids.take(sum(found)), found

    def count_below(self, batch: Tables, bounds: list[int]) -> list[int]:
        self._look(batch.arena)
        E, ends = len(batch), array("q", bounds)
        code = self._library.vtt_count_below(
            self._pointer, E, _address(batch.rows), _address(ends), self._found.room(E)
        )
        self._check(code, batch)
        return self._found.ints(E)

    def at_ranks(self, batch: Tables, ranks: np.ndarray, counts: list[int]) -> np.ndarray:
        self._look(batch.arena)
        wanted = array("q", counts)
        assert len(ranks) == sum(counts)
        code = self._library.vtt_at_ranks(
            self._pointer, len(batch), _address(batch.rows), self._ranks.put(ranks),
            _address(wanted), self._ids.room(len(ranks)),
        )  # fmt: skip
        self._check(code, batch)
        return self._ids.take(len(ranks))

    def draw(
        self, entropy: Sequence[Sequence[int]], num_candidates: list[int], counts: list[int]
    ) -> np.ndarray:
        sizes = zip(num_candidates, counts, strict=True)
        # There numpy draws in another way.
        shuffles = any(size > 10_000 and count > size // 50 for size, count in sizes)
        fits = all(seed < 1 << 63 for seed, _, _ in entropy)
        if shuffles or not fits or not self._draws_alike:
            return super().draw(entropy, num_candidates, counts)
        return self._draw(entropy, num_candidates, counts)

    def _draw(self, entropy, num_candidates, counts) -> np.ndarray:
        total, seeds = sum(counts), array("q", chain.from_iterable(entropy))
        sizes, wanted = array("q", num_candidates), array("q", counts)
        code = self._library.vtt_draw(
            len(counts), _address(seeds), _address(sizes), _address(wanted),
            self._ranks.room(total),
        )  # fmt: skip
        assert code == 0, "more is drawn than there is"
        return self._ranks.take(total)

    def _check_draws(self) -> bool:
        """Whether this numpy draws what the library draws; how it does is its own business."""
        entropy = [(0, 0, 1), (1, 2**32 - 1, 4096), (2**40, 7, 300), (5, 9, 20_000)]
        sizes, counts = [1, 4000, 300, 20_000], [1, 16, 300, 300]
        ends = np.cumsum(counts)[:-1]
        ours, numpys = self._draw(entropy, sizes, counts), super().draw(entropy, sizes, counts)
        return all(
            sorted(a) == sorted(b)
            for a, b in zip(np.split(ours, ends), np.split(numpys, ends), strict=True)
        )

    # ---- eviction --------------------------------------------------------------------------

    def execute(self, batch: Tables, ids: np.ndarray, counts: list[int], num_new: int) -> Eviction:
        self._look(batch.arena)
        E, K, sizes = len(batch), len(ids), array("q", counts)
        assert sum(counts) == K and len(counts) == E
        victims, holes = self._ids.put(ids), self._holes.room(K)
        out = self._of_rows.room(4 * E)
        while True:  # at most once more: then the blocks of all rows fit
            code = self._library.vtt_execute(
                self._pointer, E, _address(batch.rows), _address(sizes), victims, num_new,
                len(self._gone.array), out, out + 8 * E, out + 16 * E, out + 24 * E, holes,
                self._gone.address,
            )  # fmt: skip
            if code != NEEDS_SPACE:
                break
            self._gone.room(sum(t.num_blocks for t in batch.tables))
        self._check(code, batch)
        found = self._of_rows.ints(4 * E)
        num_blocks, num_keep = found[:E], found[E : 2 * E]
        last, num_evicted = found[2 * E : 3 * E], found[3 * E :]
        gone, first = [], 0
        for size, keep in zip(num_blocks, num_keep, strict=True):
            gone.append(self._gone.view[first : first + size - keep].tolist())
            first += size - keep
        return Eviction(
            num_blocks, num_keep, gone, last, num_evicted, self._holes.take(K), list(counts)
        )

    def pack(self, batch: Tables, eviction: Eviction, num_new: list[int]) -> Packed:
        E = len(batch)
        assert len(eviction.holes) == sum(eviction.counts)
        _given, (new, blocks, keep, last, counts) = _columns(
            num_new, eviction.num_blocks, eviction.num_keep, eviction.last, eviction.counts
        )
        gone = array("q", chain.from_iterable(eviction.gone))
        assert len(gone) == sum(eviction.num_blocks) - sum(eviction.num_keep)
        given = (
            _address(batch.rows), new, blocks, keep, last, _address(gone),
            self._holes.put(eviction.holes), counts,
        )  # fmt: skip
        appended = self._appended.room(E + 3)
        out = self._of_requests.room(4 * E + 2), self._rewrites.room(E), appended
        while True:  # once more for each table that has outgrown its region, and for the buffers
            self._look(batch.arena)
            code = self._library.vtt_pack(
                self._pointer, E, *given, len(self._kept.array), len(self._source.array), *out,
                self._kept.address, self._source.address, self._destination.address,
                appended + 8 * E,
            )  # fmt: skip
            if code & 255 == NEEDS_ROOM:
                table = batch.tables[code >> 8]
                table.make_room(0, table.num_computed_tokens + 1)
            elif code == NEEDS_SPACE:
                self._make_space(batch, eviction)
            else:
                break
        self._check(code, batch)
        *num_appended, num_kept, num_moves, num_reused = self._appended.ints(E + 3)
        of_requests = self._of_requests.take(4 * E + 2)
        steps = BatchSteps(
            req_ids=[t.req_id for t in batch.tables],
            num_reclaimed=of_requests[:E],
            new_token_index=of_requests[E : 2 * E],
            rewrites_row=self._rewrites.take(E),
            row_start=of_requests[2 * E : 3 * E + 1],
            row_kept=self._kept.take(num_kept),
            move_start=of_requests[3 * E + 1 :],
            move_source=self._source.take(num_moves),
            move_destination=self._destination.take(num_moves),
        )
        return Packed(steps, num_appended, num_reused)

    def _make_space(self, batch: Tables, eviction: Eviction) -> None:
        """Let the results of `pack` fit, however many there may be."""
        N = batch.block_size
        unused = sum(t.num_blocks * N - t.num_physical_tokens for t in batch.tables)
        self._kept.room(sum(eviction.num_keep))
        self._source.room(len(eviction.holes) + unused)
        self._destination.room(len(eviction.holes) + unused)

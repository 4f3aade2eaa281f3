"""`TableOps` compiled: what a step does to the tables of many requests, one C++ call for each.

For tables that are packed and share no block, the steady state of a budgeted decode; every other
request is left to `ScalarOps`, with the same results. The sources are in csrc/tables; they are
built and cached like the kernels, and need no particular processor and no torch.

Between one step's bookkeeping and the next lies all the rest of a step, so little of it is in the
processor's caches and every library call costs several times what it does in a loop. Hence lists
and `array.array`, whose few operations the rest of the step uses too, where there is one number for
each request, and numpy only for what there is one of for each token.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from ctypes import Structure, byref, c_int64, c_void_p
from itertools import chain, compress

import numpy as np

from vtoken.core.arena import ARRAYS, NUMBERS, SPAN_TOKENS, Arena
from vtoken.core.messages import StepPlan, joined, plan_of_packed
from vtoken.core.ops import Change, Draw, ScoredIds, TableOps
from vtoken.core.scalar_ops import ScalarOps
from vtoken.core.table import NO_SLOTS, RequestTable
from vtoken.kernels import build

NEEDS_ROOM, NEEDS_SPACE = 1, 2
ERRORS = {
    3: "its numbers describe no region of the arena",
    4: "tokens are appended where the block table has no block",
    5: "evicting a token that is not live, or none",
    6: "a block or a slot that it does not own",
    7: "a request was not packed before the eviction",
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


def _numbers_of(tables: Sequence[RequestTable]) -> array:
    """The tables' rows of the arena's numbers; to be kept alive while its address is in use."""
    return array("q", [t.number_row for t in tables])


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


def load_ops() -> TableOps:
    """Operations for one arena: compiled where that works here, else in plain Python.

    Compiles once and says once, in the log, why it does not.
    """
    global _library, _why_not
    if _library is None and _why_not is None:
        try:
            _library = _declare(build.load_library("tables"))
        except (build.BuildError, ImportError) as error:  # no fcntl, outside of Unix
            _why_not = str(error)
            build.say_once(_why_not, "The scheduler's bookkeeping runs in plain Python")
    return ScalarOps() if _library is None else CompiledOps(_library)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Let integers go through as pointers and int64, as far as both sides know the same names."""
    functions = {
        "sync": 6, "oldest": 8, "lowest_scored": 12, "count_below": 5, "at_ranks": 6,
        "draw": 5, "execute": 13, "pack": 19,
    }  # fmt: skip
    build.check_shared(library, {
        "numbers": NUMBERS, "span_tokens": [str(SPAN_TOKENS)], **build.fields_of(_Arena),
        "functions": [f"vtt_{name}/{num_args}" for name, num_args in functions.items()],
    })  # fmt: skip
    for name, num_args in functions.items():
        function = getattr(library, f"vtt_{name}")
        function.restype = c_int64
        # Every argument is 8 bytes wide: a pointer or an int64.
        function.argtypes = [c_void_p if name != "draw" else c_int64] + [c_int64] * (num_args - 1)
    return library


class CompiledOps(ScalarOps):
    """See `vtoken.core.ops` for what each does. For one arena, one thread at a time."""

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
        raw.num_tokens, raw.num_blocks = len(arena.index_of), len(arena.block_table)
        self._seen = (arena, arena.version)

    @staticmethod
    def _check(code: int, tables: Sequence[RequestTable]) -> None:
        if code:
            raise AssertionError(f"{tables[code >> 8].req_id}: {ERRORS[code & 255]}")

    # ---- growth ----------------------------------------------------------------------------

    def sync(
        self,
        tables: Sequence[RequestTable],
        new_block_ids: Sequence[Sequence[int]],
        lengths: Sequence[int],
    ) -> None:
        rows = _numbers_of(tables)
        given, (counts, wanted) = _columns(list(map(len, new_block_ids)), lengths)
        new_ids = array("i", chain.from_iterable(new_block_ids))
        at = _address(rows), counts, _address(new_ids), wanted
        while True:  # once more for each request that has outgrown its region
            self._look(tables[0].arena)
            code = self._library.vtt_sync(self._pointer, len(tables), *at)
            if code & 255 != NEEDS_ROOM:
                return self._check(code, tables)
            e = code >> 8
            tables[e].make_room(tables[e].num_blocks + given[e], lengths[e])

    # ---- reading ---------------------------------------------------------------------------

    def oldest(
        self,
        tables: Sequence[RequestTable],
        first_ids: Sequence[int],
        end_ids: Sequence[int],
        counts: Sequence[int],
    ) -> tuple[np.ndarray, list[int]]:
        self._look(tables[0].arena)
        E, most, rows = len(tables), sum(n for n in counts if n > 0), _numbers_of(tables)
        _given, bounds = _columns(counts, first_ids, end_ids)
        code = self._library.vtt_oldest(
            self._pointer, E, _address(rows), *bounds, self._ids.room(most), self._found.room(E)
        )
        self._check(code, tables)
        found = self._found.ints(E)
        return self._ids.take(sum(found)), found

    def lowest_scored(
        self,
        tables: Sequence[RequestTable],
        scored: Sequence[ScoredIds],
        first_ids: Sequence[int],
        end_ids: Sequence[int],
        counts: Sequence[int],
        sign: int,
    ) -> tuple[np.ndarray, list[int]]:
        self._look(tables[0].arena)
        E, most, rows = len(tables), sum(n for n in counts if n > 0), _numbers_of(tables)
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
            self._pointer, E, _address(rows), *at, sign, self._ids.room(most), self._found.room(E)
        )
        self._check(code, tables)
        found = self._found.ints(E)
        return self._ids.take(sum(found)), found

    def count_below(self, tables: Sequence[RequestTable], bounds: Sequence[int]) -> list[int]:
        self._look(tables[0].arena)
        E, ends, rows = len(tables), array("q", bounds), _numbers_of(tables)
        code = self._library.vtt_count_below(
            self._pointer, E, _address(rows), _address(ends), self._found.room(E)
        )
        self._check(code, tables)
        return self._found.ints(E)

    def at_ranks(
        self, tables: Sequence[RequestTable], ranks: np.ndarray, counts: Sequence[int]
    ) -> np.ndarray:
        self._look(tables[0].arena)
        wanted, rows = array("q", counts), _numbers_of(tables)
        assert len(ranks) == sum(counts)
        code = self._library.vtt_at_ranks(
            self._pointer, len(tables), _address(rows), self._ranks.put(ranks), _address(wanted),
            self._ids.room(len(ranks)),
        )  # fmt: skip
        self._check(code, tables)
        return self._ids.take(len(ranks))

    def draw(self, draws: Sequence[Draw]) -> np.ndarray:
        # There numpy draws in another way.
        shuffles = any(n > 10_000 and count > n // 50 for _, n, count in draws)
        fits = all(entropy[0] < 1 << 63 for entropy, _, _ in draws)
        if shuffles or not fits or not self._draws_alike:
            return super().draw(draws)
        return self._draw(draws)

    def _draw(self, draws: Sequence[Draw]) -> np.ndarray:
        seeds = array("q", chain.from_iterable(d.entropy for d in draws))
        _given, (sizes, counts) = _columns(
            [d.num_candidates for d in draws], [d.num_draws for d in draws]
        )
        total = sum(d.num_draws for d in draws)
        code = self._library.vtt_draw(
            len(draws), _address(seeds), sizes, counts, self._ranks.room(total)
        )
        assert code == 0, "more is drawn than there is"
        return self._ranks.take(total)

    def _check_draws(self) -> bool:
        """Whether this numpy draws what the library draws; how it does is its own business."""
        entropy = [(0, 0, 1), (1, 2**32 - 1, 4096), (2**40, 7, 300), (5, 9, 20_000)]
        sizes, counts = [1, 4000, 300, 20_000], [1, 16, 300, 300]
        draws = [Draw(*d) for d in zip(entropy, sizes, counts, strict=True)]
        ends = np.cumsum(counts)[:-1]
        ours, numpys = self._draw(draws), super().draw(draws)
        return all(
            sorted(a) == sorted(b)
            for a, b in zip(np.split(ours, ends), np.split(numpys, ends), strict=True)
        )

    # ---- evict -----------------------------------------------------------------------------

    def evict(self, changes: Sequence[Change], ids: np.ndarray, counts: Sequence[int]) -> None:
        plain = [n > 0 and _is_plain(c) for c, n in zip(changes, counts, strict=True)]
        if all(plain):
            return self._evict_plain(changes, ids, counts)
        of_tokens = np.repeat(plain, counts)
        if any(plain):
            self._evict_plain(
                list(compress(changes, plain)), ids[of_tokens], list(compress(counts, plain))
            )
        others = [not p for p in plain]
        super().evict(
            list(compress(changes, others)), ids[~of_tokens], list(compress(counts, others))
        )

    def _evict_plain(
        self, changes: Sequence[Change], ids: np.ndarray, counts: Sequence[int]
    ) -> None:
        tables = [c.table for c in changes]
        self._look(tables[0].arena)
        E, K, sizes, rows = len(changes), len(ids), array("q", counts), _numbers_of(tables)
        assert sum(counts) == K
        victims, holes = self._ids.put(ids), self._holes.room(K)
        out = self._of_rows.room(4 * E)
        while True:  # at most once more: then the blocks of all rows fit
            code = self._library.vtt_execute(
                self._pointer, E, _address(rows), _address(sizes), victims, 1,
                len(self._gone.array), out, out + 8 * E, out + 16 * E, out + 24 * E, holes,
                self._gone.address,
            )  # fmt: skip
            if code != NEEDS_SPACE:
                break
            self._gone.room(sum(t.num_blocks for t in tables))
        self._check(code, tables)
        found, dead = self._of_rows.ints(4 * E), self._holes.take(K)
        first = first_hole = 0
        for e, (change, count) in enumerate(zip(changes, counts, strict=True)):
            num_blocks, num_keep, last = found[e], found[E + e], found[2 * E + e]
            end = first + num_blocks - num_keep
            change.released, first = self._gone.view[first:end].tolist(), end
            change.last = last if last != num_blocks - 1 else -1
            change.has_evicted = change.packs = change.is_compiled = True
            change.num_evicted = found[3 * E + e]
            change.table.holes = dead[first_hole : first_hole + count]
            first_hole += count

    # ---- place -----------------------------------------------------------------------------

    def place(
        self,
        changes: Sequence[Change],
        num_new: Sequence[int],
        block_ids_from: Callable[[int, int], Sequence[int]],
    ) -> StepPlan:
        mine = [e for e, c in enumerate(changes) if c.is_compiled]
        if len(mine) == len(changes):
            return self._place_plain(changes, num_new, block_ids_from)
        theirs = [e for e, c in enumerate(changes) if not c.is_compiled]
        other = super().place(
            [changes[e] for e in theirs], [num_new[e] for e in theirs],
            lambda e, first: block_ids_from(theirs[e], first),
        )  # fmt: skip
        if not mine:
            return other
        plain = self._place_plain(
            [changes[e] for e in mine], [num_new[e] for e in mine],
            lambda e, first: block_ids_from(mine[e], first),
        )  # fmt: skip
        return joined(plain, other)

    def _place_plain(
        self, changes: Sequence[Change], num_new: Sequence[int], block_ids_from: Callable
    ) -> StepPlan:
        tables = [c.table for c in changes]
        plan, num_appended = self._pack(changes, tables, num_new)
        for table in tables:
            table.holes = NO_SLOTS
        if any(num_appended):
            for e, (table, count) in enumerate(zip(tables, num_appended, strict=True)):
                if count:
                    block_ids = block_ids_from(e, table.num_blocks)
                    table.sync_new_tokens(block_ids, table.num_computed_tokens + count)
        return plan

    def _pack(
        self, changes: Sequence[Change], tables: list[RequestTable], num_new: Sequence[int]
    ) -> tuple[StepPlan, list[int]]:
        """Returns (plan, ints[E] new tokens that are still to be appended at the packed end)."""
        E, rows = len(changes), _numbers_of(tables)
        num_blocks = [t.num_blocks for t in tables]
        num_keep = [n - len(c.released) for n, c in zip(num_blocks, changes, strict=True)]
        last = [c.last if c.last >= 0 else n - 1 for n, c in zip(num_blocks, changes, strict=True)]
        counts = [len(t.holes) for t in tables]
        _given, (new, blocks, keep, final, sizes) = _columns(
            num_new, num_blocks, num_keep, last, counts
        )
        gone = array("q", chain.from_iterable(c.released for c in changes))
        holes = self._holes.put(_joined([t.holes for t in tables], sum(counts)))
        given = _address(rows), new, blocks, keep, final, _address(gone), holes, sizes
        appended = self._appended.room(E + 3)
        out = self._of_requests.room(4 * E + 2), self._rewrites.room(E), appended
        while True:  # once more for each table that has outgrown its region, and for the buffers
            self._look(tables[0].arena)
            code = self._library.vtt_pack(
                self._pointer, E, *given, len(self._kept.array), len(self._source.array), *out,
                self._kept.address, self._source.address, self._destination.address,
                appended + 8 * E,
            )  # fmt: skip
            if code & 255 == NEEDS_ROOM:
                table = tables[code >> 8]
                table.make_room(0, table.num_computed_tokens + 1)
            elif code == NEEDS_SPACE:
                self._make_space(tables, sum(num_keep), sum(counts))
            else:
                break
        self._check(code, tables)
        *num_appended, num_kept, num_moves, _num_reused = self._appended.ints(E + 3)
        of_requests = self._of_requests.take(4 * E + 2)
        plan = plan_of_packed(
            req_ids=[t.req_id for t in tables],
            num_reclaimed=of_requests[:E],
            new_token_index=of_requests[E : 2 * E],
            rewrites_block_table=self._rewrites.take(E),
            kept_start=of_requests[2 * E : 3 * E + 1],
            kept_positions=self._kept.take(num_kept),
            move_start=of_requests[3 * E + 1 :],
            move_source=self._source.take(num_moves),
            move_destination=self._destination.take(num_moves),
        )
        return plan, num_appended

    def _make_space(self, tables: Sequence[RequestTable], num_keep: int, num_holes: int) -> None:
        """Let the results of `_pack` fit, however many there may be."""
        N = tables[0].block_size
        unused = sum(t.num_blocks * N - t.num_physical_tokens for t in tables)
        self._kept.room(num_keep)
        self._source.room(num_holes + unused)
        self._destination.room(num_holes + unused)


def _joined(parts: list[np.ndarray], size: int) -> np.ndarray:
    """All parts one after another; `evict` cut them out of one array in this order, mostly just these."""
    whole = parts[0].base
    if whole is not None and len(whole) == size and all(p.base is whole for p in parts):
        return whole
    return np.concatenate(parts)


def _is_plain(change: Change) -> bool:
    """Whether the compiled `evict` takes a change: one new token, packed, and no block is shared."""
    rules = change.rules
    return (
        change.num_new_tokens == 1
        and rules.moves
        and rules.fragmentation_threshold == 0.0
        and change.pinned is None
        and change.leaves is None
        and not len(change.table.holes)
    )

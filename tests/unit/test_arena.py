"""Regions of many tables in one arena: they grow, move and are used again, and never mix."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from vtoken.core.arena import BLOCK_ARRAYS, TOKEN_ARRAYS, _Regions
from vtoken.core.invariants import check_table
from vtoken.core.table import TokenTable

N = 4


def add(tables: TokenTable, req_id: str, num_tokens: int):
    first = 1 + 1000 * len(tables)
    table = tables.add(req_id)
    table.sync_new_tokens(list(range(first, first + -(-num_tokens // N))), num_tokens)
    return table


def regions(table) -> list[tuple[int, int]]:
    """(first byte, end) of every array of a table."""
    arrays = [getattr(table, name) for name in (*TOKEN_ARRAYS, *BLOCK_ARRAYS)]
    starts = [a.__array_interface__["data"][0] for a in arrays]
    return [(s, s + a.nbytes) for s, a in zip(starts, arrays, strict=True)]


def test_tables_look_at_the_arena_and_at_nobody_elses_part_of_it():
    tables = TokenTable(N)
    sizes = [3, 40, 700, 5, 2000, 90, 300]
    made = [add(tables, f"r{i}", n) for i, n in enumerate(sizes)]
    spans = sorted(span for t in made for span in regions(t))
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    for table, n in zip(made, sizes, strict=True):
        assert check_table(table) == [] and table.live_ids().tolist() == list(range(n))
        for name in (*TOKEN_ARRAYS, *BLOCK_ARRAYS):
            assert np.shares_memory(getattr(table, name), getattr(tables.arena, name))


def test_a_table_that_outgrows_its_region_takes_everything_along():
    tables = TokenTable(N)
    a, b = add(tables, "a", 100), add(tables, "b", 30)
    gone = np.array([3, 50, 51])
    a.evict_tokens(gone)
    a.apply_moves(a.index_of[99:100], a.holes[:1])
    before = a.ids_by_physical_index().tolist()
    a.sync_new_tokens(list(range(5000, 5500)), 1500)
    assert a.ids_by_physical_index()[:100].tolist() == before
    assert a.num_live_tokens == 1497 and a.live_ids().tolist() == sorted({*range(1500)} - {*gone})
    assert check_table(b) == []


def test_regions_are_used_again_and_start_empty():
    tables = TokenTable(N)
    for i in range(4):
        add(tables, f"r{i}", 200)
    sizes = [len(getattr(tables.arena, name)) for name in (*TOKEN_ARRAYS, *BLOCK_ARRAYS)]
    for i in range(40):
        held = tables[f"r{i % 4}"]
        ids = held.live_ids().tolist()
        tables.forget(f"r{i % 4}")
        new = add(tables, f"r{i % 4}", 150 + i)
        assert held.live_ids().tolist() == ids  # whoever kept it reads a copy
        assert check_table(new) == [] and new.num_live_tokens == 150 + i
    assert sizes == [len(getattr(tables.arena, n)) for n in (*TOKEN_ARRAYS, *BLOCK_ARRAYS)]


def test_free_neighbours_merge_and_ranges_never_overlap():
    rng = np.random.default_rng(0)
    regions, held = _Regions(), {}
    for _ in range(3000):
        if held and rng.random() < 0.5:
            start = list(held)[rng.integers(len(held))]
            if rng.random() < 0.4:
                longer = held[start] + int(rng.integers(1, 40))
                if regions.extend(start, held[start], longer):
                    held[start] = longer
            else:
                regions.give(start, held.pop(start))
        else:
            size = int(rng.integers(1, 100))
            start = regions.take(size)
            held[start] = size
        spans = sorted([*((s, s + n) for s, n in held.items()), *regions._free])
        assert sum(b - a for a, b in spans) == regions.end
        assert all(a[1] == b[0] for a, b in pairwise(spans))
        assert all(a[1] < b[0] for a, b in pairwise(regions._free))
    for start, size in held.items():
        regions.give(start, size)
    assert regions._free == [(0, regions.end)]


def test_tables_take_at_most_sixteen_bytes_a_token():
    """Alone and among others, at lengths just past where a region was outgrown."""
    block_size = 16
    for others in (0, 6):
        tables = TokenTable(block_size)
        grown = [tables.add(f"r{i}") for i in range(others + 1)]
        for length in range(1024, 20_000, 997):
            for table in grown:
                new = -(-length // block_size) - table.num_blocks
                table.sync_new_tokens(list(range(1, 1 + new)), length)
            arrays = [getattr(tables.arena, n) for n in (*TOKEN_ARRAYS, *BLOCK_ARRAYS)]
            taken = sum(a.nbytes for a in arrays) / (length * len(grown))
            assert taken <= 16, (others, length, taken)

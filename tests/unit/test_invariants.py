"""Every invariant function finds what it is there to find, and is silent about what is right."""

from __future__ import annotations

import numpy as np
import pytest
from test_table import evict, table_of

from vtoken.core.invariants import (
    check_block_table,
    check_conservation,
    check_packed,
    check_pool,
    check_release,
    check_step_plan,
    check_table,
    check_unique_mapping,
)
from vtoken.core.messages import Layout, plan_of_layouts


def holed_table():
    table = table_of(10, [3, 4, 5])
    evict(table, 1, 6)
    return table


def test_a_good_table_passes():
    assert check_table(holed_table()) == []
    assert check_block_table(holed_table(), [3, 4, 5, 9]) == []  # blocks may have been added since


def _two_ids_in_one_slot(t):
    t.index_of[2] = t.index_of[3]


def _maps_disagree(t):
    t.id_at[t.index_of[4]] = 5


def _a_live_bit_flipped(t):
    t.index_of[1] = 1


def _count_off(t):
    t.num_live_tokens -= 1


def _block_not_owned(t):
    t.block_table[1] = t.block_table[0]


def _beyond_the_end(t):
    t.num_physical_tokens = 9


def _dead_id_in_the_row(t):
    t.id_at[t.holes[0]] = 1


@pytest.mark.parametrize(
    "damage",
    [
        _two_ids_in_one_slot, _maps_disagree, _a_live_bit_flipped, _count_off,
        _block_not_owned, _beyond_the_end, _dead_id_in_the_row,
    ],
)  # fmt: skip
def test_unique_mapping_finds(damage):
    table = holed_table()
    damage(table)
    assert check_unique_mapping(table)


def test_conservation_finds_a_lost_hole_and_a_wrong_count():
    table = holed_table()
    table.holes = table.holes[:1]
    assert check_conservation(table)
    table = holed_table()
    table.live_in[0] += 1
    assert check_conservation(table)


def test_conservation_leaves_placeholders_out():
    table = table_of(12, [3, 4, 5])
    evict(table, 4, 5, 6, 7)
    table.block_id[1], table.holes = 0, table.holes[:0]
    assert check_conservation(table) == []
    table.block_id[2] = 0
    assert check_conservation(table)


def test_packed_means_no_holes():
    table = holed_table()
    assert check_packed(table) == []  # nobody says it is packed
    table.num_live_tokens = table.num_physical_tokens
    assert check_packed(table)


def test_more_slots_than_blocks():
    table = table_of(10, [3, 4, 5])
    table.num_physical_tokens = 13
    assert check_table(table)


def test_row_must_be_the_head_of_the_pools():
    assert check_block_table(holed_table(), [3, 5, 4])
    assert check_block_table(holed_table(), [3, 4])


def test_pool_counts_shared_blocks_once():
    assert check_pool(10, 5, [[1, 2, 3], [1, 4], [0]]) == []
    assert check_pool(10, 5, [[1, 2, 3], [1]])  # one leaked
    assert check_pool(10, 6, [[1, 2, 3], [1, 4]])  # one freed that is still held


def test_a_plan_that_moves_must_release():
    assert check_release(5, 4, 3) == [] and check_release(5, 5, 0) == []
    assert check_release(5, 5, 1) and check_release(5, 6, 1)


def plan_of(*moves):
    """A StepPlan of (request id, sources, destinations) in vLLM slots."""
    steps = [
        Layout(r, 0, move_source=np.array(s, np.int64), move_destination=np.array(d, np.int64))
        for r, s, d in moves
    ]
    return plan_of_layouts(steps)


GOOD = ("a", [20, 21], [8, 9])


@pytest.mark.parametrize(
    ("moves", "shared", "found"),
    [
        ([GOOD], set(), None),
        ([GOOD, ("b", [30], [12])], {7}, None),
        ([("a", [20, 8], [8, 9])], set(), None),  # a chain inside one request is read first
        ([GOOD, ("a", [30], [12])], set(), "same request"),
        ([GOOD, ("b", [30], [9])], set(), "write one slot"),
        ([("a", [20, 20], [8, 9])], set(), "read one slot"),
        ([GOOD, ("b", [20], [12])], set(), None),  # two sharers copy out of one block
        ([GOOD, ("b", [8], [12])], set(), "source of one request"),
        ([("a", [20], [3])], set(), "null block"),
        ([("a", [2], [20])], set(), "null block"),
        ([("a", [20], [40])], set(), "leaves the pool"),
        ([GOOD], {2}, "shared blocks"),
    ],
)
def test_step_plan(moves, shared, found):
    wrong = check_step_plan(plan_of(*moves), 40, shared, 4)
    assert (wrong == []) if found is None else any(found in w for w in wrong)


def test_a_plan_without_moves_passes():
    plan = plan_of_layouts([Layout("a", 2)])
    assert check_step_plan(plan, 40, {1}, 4) == []

"""The token table: both maps, lazy growth, row rewriting, holes."""

from __future__ import annotations

import numpy as np
import pytest

from vtoken.core.invariants import check_table
from vtoken.core.table import RequestTable, TokenTable

N = 4


def table_of(num_tokens: int, block_ids=None, block_size: int = N) -> RequestTable:
    """A request that has only grown."""
    table = RequestTable("r", block_size)
    if block_ids is None:
        block_ids = range(10, 10 + -(-num_tokens // block_size))
    table.sync_new_tokens(list(block_ids), num_tokens)
    return table


def evict(table: RequestTable, *ids: int) -> None:
    table.evict_tokens(np.array(ids, np.int32))


class TestGrowth:
    def test_ids_are_given_out_in_order(self):
        table = table_of(6, [7, 9])
        assert table.num_live_tokens == table.num_physical_tokens == table.num_computed_tokens == 6
        assert table.ids_by_physical_index().tolist() == [0, 1, 2, 3, 4, 5]
        slots = table.slots_of(table.index_of[table.live_ids()])
        assert slots.tolist() == [28, 29, 30, 31, 36, 37]

    def test_lazy_growth_equals_growth_token_by_token(self):
        blocks = [3, 8, 1, 6, 2]
        eager, lazy = RequestTable("r", N), RequestTable("r", N)
        for length in range(1, 19):
            held = blocks[: -(-length // N)]
            eager.sync_new_tokens(held[eager.num_blocks :], length)
        lazy.sync_new_tokens(blocks, 18)
        for name in ("index_of", "id_at", "block_table", "pos_of", "block_id"):
            a, b = getattr(eager, name), getattr(lazy, name)
            width = min(len(a), len(b))
            assert np.array_equal(a[:width], b[:width]), name
        assert eager.live_per_block().tolist() == lazy.live_per_block().tolist() == [4, 4, 4, 4, 2]

    def test_a_row_may_be_longer_than_the_tokens_need(self):
        table = table_of(2, [5, 6, 7])
        assert table.num_blocks == 3
        table.sync_new_tokens([], 11)
        assert table.slots_of(table.index_of[np.array([10])]).tolist() == [7 * N + 2]

    def test_growth_beyond_the_row_is_a_bug_of_ours(self):
        with pytest.raises(AssertionError):
            table_of(9, [1, 2])

    def test_maps_grow_past_their_first_size(self):
        table = table_of(1000, range(1, 251))
        assert not check_table(table)
        assert table.live_ids().tolist() == list(range(1000))
        assert table.block_ids().tolist() == list(range(1, 251))


class TestEviction:
    def test_holes_keep_their_place_and_are_counted(self):
        table = table_of(8)
        slots = table.evict_tokens(np.array([1, 6], np.int32))
        assert table.ids_by_physical_index().tolist() == [0, -1, 2, 3, 4, 5, -1, 7]
        assert table.live_mask().tolist() == [True, False, True, True, True, True, False, True]
        assert sorted(slots.tolist()) == sorted(table.holes.tolist())
        assert (table.num_live_tokens, table.num_holes, table.num_evicted_tokens) == (6, 2, 2)
        assert table.num_physical_tokens == table.num_computed_tokens == 8
        assert table.live_per_block().tolist() == [3, 3]
        assert not table.is_packed and not check_table(table)

    def test_growth_goes_on_at_the_tail_and_not_in_holes(self):
        table = table_of(6)
        evict(table, 0, 1)
        table.sync_new_tokens([12], 9)
        assert table.ids_by_physical_index().tolist() == [-1, -1, 2, 3, 4, 5, 6, 7, 8]

    def test_a_token_dies_once(self):
        table = table_of(6)
        evict(table, 2)
        with pytest.raises(AssertionError, match="not live"):
            evict(table, 2)

    @pytest.mark.parametrize("first_id", [0, 4, 30])
    def test_oldest_equals_a_search_through_all(self, first_id):
        rng = np.random.default_rng(first_id)
        table = table_of(200, range(1, 51))
        for _ in range(40):
            live = table.live_ids()
            wanted = live[live >= first_id]
            for count in (0, 1, 7, 64, 500):
                assert table.oldest(count, first_id).tolist() == wanted[:count].tolist()
            # Mostly the old ones, as streaming does, so that a dead run forms at the front.
            gone = rng.choice(live[: max(4, len(live) // 3)], min(4, len(live)), replace=False)
            evict(table, *sorted(gone))
        live = table.live_ids()
        assert table.oldest(1, 150).tolist() == live[live >= 150][:1].tolist()


class TestMoves:
    def test_a_move_is_atomic_even_in_a_chain(self):
        """b goes where a was while a goes elsewhere: both are read before either is written."""
        table = table_of(8)
        evict(table, 7)
        a, b, hole = (int(table.index_of[i]) for i in (0, 1, 2))
        evict(table, 2)
        table.apply_moves(np.array([b], np.int32), np.array([hole], np.int32))
        assert table.index_of[1] == hole and table.id_at[hole] == 1 and table.id_at[b] == -1
        assert table.index_of[0] == a
        assert table.live_per_block().tolist() == [3, 3]

    def test_live_counts_follow_a_move_between_blocks(self):
        table = table_of(8)
        evict(table, 0)
        table.apply_moves(table.index_of[np.array([7])], np.array([0], np.int32))
        assert table.live_per_block().tolist() == [4, 3]
        assert table.ids_by_physical_index().tolist() == [7, 1, 2, 3, 4, 5, 6, -1]

    def test_a_destination_must_be_dead_and_a_source_alive(self):
        table = table_of(4)
        with pytest.raises(AssertionError):
            table.apply_moves(table.index_of[np.array([0])], table.index_of[np.array([1])])
        evict(table, 0)
        with pytest.raises(AssertionError):
            table.apply_moves(np.array([0], np.int32), np.array([0], np.int32))

    def test_the_next_token_takes_a_dead_slot(self):
        table = table_of(8)
        evict(table, 5)
        local = int(table.holes[0])
        table.put_next(local)
        assert table.ids_by_physical_index().tolist() == [0, 1, 2, 3, 4, 8, 6, 7]
        assert (table.num_computed_tokens, table.num_physical_tokens) == (9, 8)
        assert table.num_reclaimed_tokens == 1
        with pytest.raises(AssertionError):
            table.put_next(local)


class TestRows:
    def test_dropping_and_reordering_blocks_moves_physical_indices_only(self):
        table = table_of(12, [4, 5, 6])
        evict(table, 4, 5, 6, 7)
        before = {
            i: int(table.slots_of(table.index_of[np.array([i])])[0]) for i in table.live_ids()
        }
        gone = table.set_block_table(np.array([2, 0]))
        table.holes, table.num_physical_tokens = table.holes[:0], 8
        table.forget_handles(gone)
        assert table.block_ids().tolist() == [6, 4]
        assert table.ids_by_physical_index().tolist() == [8, 9, 10, 11, 0, 1, 2, 3]
        after = {i: int(table.slots_of(table.index_of[np.array([i])])[0]) for i in table.live_ids()}
        assert after == before  # slots stay where they are
        assert table.num_reclaimed_tokens == 4 and not check_table(table)

    def test_a_handle_is_used_again_with_another_block(self):
        table = table_of(12, [4, 5, 6])
        evict(table, 4, 5, 6, 7)
        table.forget_handles(table.set_block_table(np.array([0, 2])))
        table.holes, table.num_physical_tokens = table.holes[:0], 8
        table.sync_new_tokens([9], 14)
        assert table.block_ids().tolist() == [4, 6, 9]
        assert table.live_ids().tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 12, 13]
        assert table.slots_of(table.index_of[np.array([12, 13])]).tolist() == [36, 37]
        assert len(table.id_at) // N >= 3 and not check_table(table)

    def test_a_block_with_live_tokens_cannot_be_forgotten(self):
        table = table_of(8)
        gone = table.set_block_table(np.array([0]))
        with pytest.raises(AssertionError, match="live tokens"):
            table.forget_handles(gone)


class TestTokenTable:
    def test_tables_of_several_requests_are_apart(self):
        tables = TokenTable(N)
        a, b = tables.add("a"), tables.add("b")
        a.sync_new_tokens([3, 4], 7)
        b.sync_new_tokens([5], 2)
        a.evict_tokens(np.array([1, 2, 3], np.int32))
        assert a.live_ids().tolist() == [0, 4, 5, 6]
        source = a.index_of[np.array([6])].copy()
        a.apply_moves(source, np.array([1], np.int32))
        assert a.ids_by_physical_index().tolist() == [0, 6, -1, -1, 4, 5, -1]
        assert b.live_ids().tolist() == [0, 1]
        assert len(tables) == 2 and "a" in tables and "c" not in tables

    def test_forgetting_and_adding_again_starts_empty(self):
        tables = TokenTable(N)
        tables.add("a").sync_new_tokens([3], 4)
        tables.forget("a")
        tables.forget("a")
        assert len(tables) == 0 and tables.get("a") is None
        assert tables.add("a").num_computed_tokens == 0

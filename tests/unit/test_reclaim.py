"""Which blocks are kept and where tokens go, against brute force."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from test_table import N, evict, table_of

from vtoken.core.reclaim import blocks_needed, choose_kept, place_packed
from vtoken.core.table import RequestTable


def random_table(seed: int, num_tokens: int | None = None, spare_blocks: int = 0) -> RequestTable:
    rng = np.random.default_rng(seed)
    if num_tokens is None:
        num_tokens = int(rng.integers(2, 40))
    num_blocks = -(-num_tokens // N) + spare_blocks
    table = table_of(num_tokens, rng.permutation(np.arange(1, 60))[:num_blocks].tolist())
    gone = rng.random(num_tokens) < rng.random()
    gone[int(rng.integers(num_tokens))] = False
    evict(table, *np.flatnonzero(gone))
    return table


class TestChooseKept:
    @pytest.mark.parametrize("seed", range(40))
    def test_keeps_the_fullest_blocks(self, seed):
        rng = np.random.default_rng(seed)
        live = rng.integers(0, N + 1, int(rng.integers(1, 9)))
        num_keep = int(rng.integers(1, len(live) + 1))  # a live token needs one
        kept = choose_kept(live, num_keep, None)
        assert len(set(kept.tolist())) == num_keep
        best = max((sum(c) for c in combinations(live, num_keep)), default=0)
        assert live[kept].sum() == best

    def test_ascending_with_the_emptiest_last(self):
        assert choose_kept(np.array([4, 1, 3, 4]), 3, None).tolist() == [0, 3, 2]
        assert choose_kept(np.array([2, 4, 3, 4]), 4, None).tolist() == [1, 2, 3, 0]

    def test_an_even_row_keeps_its_order(self):
        assert choose_kept(np.array([3, 3, 3]), 3, None).tolist() == [0, 1, 2]
        assert choose_kept(np.array([4, 4, 4, 0]), 4, None).tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize("seed", range(40))
    def test_pinned_blocks_are_kept_and_come_first(self, seed):
        rng = np.random.default_rng(seed)
        live = rng.integers(0, N + 1, int(rng.integers(2, 9)))
        pinned = rng.random(len(live)) < 0.4
        num_keep = int(rng.integers(max(1, pinned.sum()), len(live) + 1))
        kept = choose_kept(live, num_keep, pinned)
        assert len(set(kept.tolist())) == num_keep and set(np.flatnonzero(pinned)) <= set(kept)
        # Nothing may be placed in a pinned block: if there are others, one of those is last.
        flags = pinned[kept]
        assert flags.tolist() == sorted(flags.tolist(), reverse=True)
        free = num_keep - int(pinned.sum())
        best = max((sum(c) for c in combinations(live[~pinned], free)), default=0)
        assert live[kept][~flags].sum() == best


class TestPlacePacked:
    @pytest.mark.parametrize("num_new", [0, 1, 2, 5])
    @pytest.mark.parametrize("seed", range(60))
    def test_every_hole_below_the_end_is_filled_and_nothing_else_moves(self, seed, num_new):
        table = random_table(seed, spare_blocks=seed % 3)
        needed = -(-(table.num_live_tokens + num_new) // N)
        kept = choose_kept(table.live_per_block(), min(table.num_blocks, needed), None)
        order = [int(table.block_table[k]) for k in kept]
        index_in = {h * N + o: p * N + o for p, h in enumerate(order) for o in range(N)}
        end = table.num_live_tokens + (num_new == 1)
        placement = place_packed(table, kept, num_new)

        sources, targets = placement.source.tolist(), placement.destination.tolist()
        live = {
            int(s): int(i)
            for i, s in enumerate(table.index_of[: table.num_computed_tokens])
            if s >= 0
        }
        stays = {s for s in live if index_in.get(s, 10**9) < end}
        assert set(sources) == set(live) - stays  # the fewest that can move with these blocks
        assert len(set(targets)) == len(targets) and not set(targets) & set(live)
        taken = {index_in[s] for s in stays} | {index_in[t] for t in targets}
        if placement.reused >= 0:
            taken.add(index_in[placement.reused])
            assert placement.reused not in live and placement.num_physical_tokens == end
        else:
            assert placement.num_physical_tokens == table.num_live_tokens
        full = table.num_live_tokens + (placement.reused >= 0)
        assert taken == set(range(full))

    def test_one_token_takes_a_hole_and_costs_no_copy(self):
        table = table_of(8)
        evict(table, 2)
        placement = place_packed(table, np.array([0, 1], np.int32), 1)
        assert len(placement.source) == 0 and placement.reused == table.holes[0]

    def test_a_chunk_goes_behind_all_live_tokens(self):
        """Causal order inside the chunk: token j must not see token j + 1."""
        table = table_of(8, [1, 2])
        evict(table, 2)
        placement = place_packed(table, np.array([0, 1], np.int32), 3)
        assert placement.reused == -1
        assert placement.source.tolist() == [7] and placement.destination.tolist() == [2]
        assert placement.num_physical_tokens == 7

    def test_the_last_hole_is_reused_the_others_take_tail_tokens(self):
        table = table_of(12)
        evict(table, 0, 5, 9)
        placement = place_packed(table, np.array([0, 1, 2], np.int32), 1)
        assert placement.reused == 9
        assert sorted(placement.destination.tolist()) == [0, 5]
        assert sorted(placement.source.tolist()) == [10, 11]

    def test_a_new_token_beyond_the_kept_blocks_waits_for_its_block(self):
        table = table_of(8)
        evict(table, 0)
        table.put_next(0)  # packed and full: 8 live in 2 blocks
        table.holes = table.holes[:0]
        placement = place_packed(table, np.array([0, 1], np.int32), 1)
        assert placement.reused == -1 and len(placement.source) == 0


class TestBlocksNeeded:
    @pytest.mark.parametrize("num_new", [1, 2, 7])
    def test_packing_counts_live_tokens_holes_count_otherwise(self, num_new):
        table = table_of(12)
        evict(table, 1, 2, 3, 5)
        assert blocks_needed(table, num_new, packs=True) == -(-(8 + num_new) // N)
        without = 3 if num_new == 1 else -(-(12 + num_new) // N)  # one token takes a hole
        assert blocks_needed(table, num_new, packs=False) == without

    def test_a_packed_request_has_no_holes_to_count(self):
        table = table_of(12)
        assert blocks_needed(table, 1, packs=False) == 4

"""Budgets by brute force; evict and place on one request with KV that shows misplacement."""

from __future__ import annotations

import math

import numpy as np
import pytest
from policy_references import reference_victims
from solo_request import SoloRequest

from vtoken.core.budget import NEVER, Budget, peak_tokens
from vtoken.core.messages import MASK_GIVEN, MASK_KEPT, MASK_PACKED
from vtoken.core.ops import LayoutRules
from vtoken.policies.registry import make_policy


def budget(policy="random", *, ratio=None, tokens=None, interval=4, block_size=4, **parameters):
    return Budget(
        policy=make_policy(policy, block_size=block_size, **parameters),
        eviction_ratio=ratio,
        kv_budget_tokens=tokens,
        interval_tokens=interval,
    )


class TestBudget:
    @pytest.mark.parametrize("interval", [1, 4, 7])
    @pytest.mark.parametrize(
        "how", [{"ratio": 0.1}, {"ratio": 0.5}, {"ratio": 0.87}, {"tokens": 12}]
    )
    def test_next_eviction_is_the_first_length_that_is_due(self, how, interval):
        b = budget(interval=interval, **how)
        for evicted in (0, 3, 20):
            for protected in (0, 5, 16):
                for now in (1, 10, 47):
                    if now < evicted + protected:
                        continue
                    found = b.next_eviction_len(evicted, protected, now)
                    length = now
                    while length - evicted - protected < b.tokens(length - protected) + interval:
                        length += 1
                    assert found == length, (evicted, protected, now)

    def test_ratio_zero_never_evicts(self):
        assert budget(ratio=0.0).next_eviction_len(0, 0, 1000) == NEVER

    @pytest.mark.parametrize("ratio", [0.1, 0.3, 0.5, 0.7, 0.9])
    def test_ratio_keeps_the_ceiling(self, ratio):
        b = budget("streaming-llm", ratio=ratio)
        for length in range(1, 200):
            exact = math.ceil(round((1 - ratio) * length, 9))
            assert b.tokens(length) == max(5, exact)
        lengths = np.arange(1, 200)
        assert b.tokens(lengths).tolist() == [b.tokens(int(i)) for i in lengths]

    @pytest.mark.parametrize(
        ("policy", "floor"),
        [
            ("random", 4 + 16 + 1), ("tova", 4 + 16 + 1), ("snapkv", 4 + 16 + 1),
            # A window that follows the budget does not enter: sinks + 1.
            ("streaming-llm", 5), ("h2o", 5), ("sliding-window", 1),
        ],
    )  # fmt: skip
    def test_below_the_floor_nothing_is_evicted(self, policy, floor):
        b = budget(policy, ratio=0.99, block_size=16)
        assert b.policy.floor_tokens == floor
        assert b.tokens(10) == floor
        assert b.next_eviction_len(0, 0, 1) >= floor + b.interval_tokens

    def test_an_explicit_window_enters_the_floor(self):
        assert budget("streaming-llm", ratio=0.5, recent_tokens=9).policy.floor_tokens == 4 + 9 + 1
        assert budget("h2o", ratio=0.5, recent_tokens=0).policy.floor_tokens == 5

    @pytest.mark.parametrize("how", [{"ratio": 0.5}, {"tokens": 12}])
    def test_a_decode_never_holds_more_than_its_peak(self, how):
        solo = SoloRequest(budget(interval=3, **how))
        solo.step(5)
        for _ in range(60):
            solo.step(1)
            assert len(solo.live) <= peak_tokens(solo.budget, solo.length)


class TestVictims:
    def test_victims_are_live_sorted_and_as_many_as_asked(self):
        solo = SoloRequest(budget(tokens=12))
        solo.step(20)
        solo.sync()
        victims = solo.named(8)
        assert len(victims) == 8 and (np.diff(victims) > 0).all()
        assert solo.table.num_evicted_tokens == 0  # nothing has changed yet

    @pytest.mark.parametrize("policy", ["random", "streaming-llm", "sliding-window"])
    @pytest.mark.parametrize("protected", [range(8), range(4, 12), (0, 1, 9)])
    def test_protected_ids_are_never_named(self, policy, protected):
        solo = SoloRequest(budget(policy, tokens=12))
        solo.step(30)
        solo.sync()
        protected = np.array(sorted(protected), np.int32)
        solo.num_protected = len(protected)
        victims = solo.named(9, protected)
        assert not set(victims) & set(protected.tolist())
        free = sorted(set(range(30)) - set(protected.tolist()))
        expected = reference_victims(
            policy, live=free, L=30, prompt_len=8, budget=12, num_evict=9, prompt_hash=77, block=4
        )
        assert set(victims.tolist()) == expected

    def test_protected_tokens_count_neither_in_live_nor_in_the_length(self):
        solo = SoloRequest(budget(ratio=0.5, interval=1))
        solo.step(30)
        solo.num_protected = 10
        assert solo.num_above_budget() == 20 - 10

    def test_scores_are_handed_over_by_live_id(self):
        solo = SoloRequest(budget("tova", tokens=9, sink_tokens=0, recent_tokens=2))
        solo.step(12)
        solo.step(1, victims=[3])
        solo.sync()
        scores = np.arange(100, 113, dtype=np.float32)
        scores[[2, 5]] = 0.0, np.nan
        victims = solo.named(3, scores=scores)
        # The lowest three: 2 by its score, then 0 and 1; 3 is dead, 5 has no score.
        assert victims.tolist() == [0, 1, 2]


class TestEvictAndPlace:
    def test_a_decode_takes_the_hole_and_copies_nothing(self):
        solo = SoloRequest(budget(tokens=100))
        solo.step(9)
        solo.step(1, victims=[5])
        assert not len(solo.last.move_source) and solo.last.new_token_index == 5
        assert solo.counters.reused_slots == 1 and solo.counters.moved_tokens == 0
        assert solo.last.mask_kind == MASK_PACKED and solo.last.num_reclaimed == 1

    def test_the_packed_end_needs_no_index(self):
        solo = SoloRequest(budget(tokens=100))
        solo.step(9)
        solo.step(1, victims=[8])  # the newest token's slot is the end
        assert solo.last.new_token_index == -1 and solo.counters.reused_slots == 0

    def test_a_whole_dead_block_goes_without_a_copy(self):
        solo = SoloRequest(budget(tokens=100))
        solo.step(14)
        row = list(solo.block_table)
        solo.step(1, victims=[4, 5, 6, 7])
        assert solo.block_table == [row[0], row[2], row[3]]
        assert solo.counters.moved_tokens == 0 and solo.counters.released_blocks == 0
        assert solo.counters.dropped_blocks == 1 and solo.last.kept.tolist() == [0, 2, 3]

    def test_moves_fill_holes_and_empty_the_emptiest_block(self):
        solo = SoloRequest(budget(tokens=100))
        solo.step(16)
        solo.step(1, victims=[0, 1, 2, 4, 8, 12])  # 1 + 3 + 3 + 3 live, one block too many
        assert len(solo.block_table) == 3 and solo.counters.dropped_blocks == 1
        # Its one survivor, and the token beyond the packed end; the new token takes the last hole.
        assert solo.counters.moved_tokens == 2 and solo.counters.reused_slots == 1
        assert solo.counters.relocation_events == 1

    def test_a_chunk_appends_behind_everything(self):
        solo = SoloRequest(budget(tokens=100))
        solo.step(16)
        solo.step(6, victims=[3, 9, 10])
        tail = solo.table.ids_by_physical_index()[-6:]
        assert tail.tolist() == list(range(16, 22)) and solo.last.new_token_index == -1

    def test_planned_but_passed_over(self):
        """A request that got no token after its blocks were released is packed all the same."""
        solo = SoloRequest(budget(tokens=100))
        solo.step(16)
        solo.step(0, victims=[0, 1, 2, 3, 4, 5])
        assert solo.table.is_packed and solo.last.mask_kind == MASK_PACKED
        solo.step(1)
        assert len(solo.live) == 11

    def test_nothing_to_say_about_plain_growth(self):
        solo = SoloRequest(budget(tokens=40))
        solo.step(9)
        solo.step(1)
        assert solo.last is None

    @pytest.mark.parametrize("victims", [[0, 1, 2], [5, 6], [0, 4, 8], [9]])
    def test_pinned_blocks_are_not_written_and_not_released(self, victims):
        solo = SoloRequest(budget(tokens=100))
        solo.step(18)
        shared = [solo.block_table[1], solo.block_table[3]]
        before = {b: solo.worker.kv[b * 4 : b * 4 + 4].copy() for b in shared}
        pinned = np.array([False, True, False, True, False])
        victims = [v for v in victims if not 4 <= v < 8]
        solo.step(1, victims=[*victims, 10, 11], pinned=pinned)
        assert set(shared) <= set(solo.block_table)
        assert not {int(d) // 4 for d in solo.last.move_destination} & set(shared)
        for b in shared:
            assert np.array_equal(solo.worker.kv[b * 4 : b * 4 + 4], before[b])

    def test_everything_pinned_but_the_tail(self):
        solo = SoloRequest(budget(tokens=100))
        solo.step(18)
        pinned = np.array([True, True, True, True, False])
        solo.step(1, victims=[16], pinned=pinned)
        assert len(solo.block_table) == 5 and solo.length == 19


class TestThreshold:
    """Holes stay until they are many enough; attention gets a mask meanwhile."""

    def solo(self, threshold=0.5):
        return SoloRequest(budget(tokens=100), fragmentation_threshold=threshold)

    def test_below_it_a_mask_is_given_and_the_hole_is_used_by_and_by(self):
        solo = self.solo()
        solo.step(16)
        solo.step(1, victims=[1, 6, 9])
        assert solo.last.mask_kind == MASK_GIVEN and solo.counters.moved_tokens == 0
        assert solo.table.num_holes == 2
        for left in (1, 0):
            solo.step(1)
            assert solo.table.num_holes == left
            assert solo.last.mask_kind == (MASK_KEPT if left else MASK_PACKED)
        solo.step(1)
        assert solo.last is None and solo.table.num_physical_tokens == 17

    def test_above_it_everything_is_packed(self):
        solo = self.solo()
        solo.step(16)
        solo.step(1, victims=[0, 1, 4, 5, 8, 9, 12, 13])
        assert solo.table.is_packed and solo.last.mask_kind == MASK_PACKED
        assert solo.counters.moved_tokens and len(solo.block_table) == 3

    def test_pressure_packs_below_it(self):
        solo = self.solo()
        solo.step(16)
        solo.step(1, victims=[0, 4, 8, 9, 12, 13, 14])
        assert not solo.table.is_packed and len(solo.block_table) == 4
        solo.step(1, victims=[], under_pressure=True)
        assert solo.table.is_packed and len(solo.block_table) == 3

    def test_a_plan_that_frees_nothing_is_not_made(self):
        solo = self.solo(threshold=0.1)
        solo.step(16)
        solo.step(1, victims=[0, 4])  # 14 + 1 tokens need all four blocks
        assert not solo.table.is_packed and solo.counters.moved_tokens == 0

    def test_dead_blocks_go_whatever_the_threshold(self):
        solo = self.solo(threshold=0.9)
        solo.step(16)
        solo.step(1, victims=[0, 4, 5, 6, 7])
        assert len(solo.block_table) == 3 and solo.counters.dropped_blocks == 1
        assert solo.counters.moved_tokens == 0

    def test_a_chunk_leaves_holes_alone(self):
        solo = self.solo()
        solo.step(16)
        solo.step(3, victims=[1, 6])
        assert solo.table.num_holes == 2 and solo.last.new_token_index == -1
        solo.step(1)
        assert solo.table.num_holes == 1


class TestNaive:
    def test_holes_stay_and_only_dead_blocks_go(self):
        solo = SoloRequest(budget(tokens=12), moves=False)
        solo.step(16)
        solo.step(1, victims=[0, 4, 5, 6, 7])
        assert (
            solo.block_table[1] == 0 and len(solo.block_table) == 5
        )  # a placeholder; indices stay logical
        assert solo.last.num_reclaimed == 0 and solo.counters.reused_slots == 0
        assert solo.table.num_physical_tokens == 17
        solo.step(1)
        assert solo.last is None  # growth; the mask stays

    def test_a_partly_filled_block_is_kept(self):
        solo = SoloRequest(budget(tokens=12), moves=False)
        solo.step(14)
        solo.step(1, victims=[12, 13])
        assert 0 not in solo.block_table


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("policy", ["random", "streaming-llm", "sliding-window"])
@pytest.mark.parametrize("moves", [True, False])
def test_long_lives_hold_together(policy, moves, threshold):
    """Prompts in chunks, decodes, skipped steps; every step is checked by SoloRequest."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        how = {"ratio": float(rng.choice([0.3, 0.5, 0.8]))} if seed % 2 else {"tokens": 14}
        own = {} if policy == "sliding-window" else {"sink_tokens": int(rng.integers(0, 5))}
        solo = SoloRequest(
            budget(policy, interval=int(rng.integers(1, 9)), **how, **own),
            moves=moves, fragmentation_threshold=threshold, num_blocks=60,
        )  # fmt: skip
        for _ in range(3):
            solo.step(int(rng.integers(1, 20)))
        for _ in range(50):
            solo.step(int(rng.choice([1, 1, 1, 1, 1, 0, 2, 5])))
        b = solo.budget
        assert len(solo.live) < b.tokens(solo.length) + b.interval_tokens + 6
        assert solo.counters.evicted_tokens == solo.length - len(solo.live)


def test_settings_are_immutable():
    with pytest.raises(AttributeError):
        LayoutRules().moves = False

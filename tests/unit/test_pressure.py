"""Who gives how much under pressure, against one block at a time; gains of copying; estimates."""

from __future__ import annotations

import numpy as np
import pytest

from vtoken.scheduling.output_lengths import OutputLengths
from vtoken.scheduling.prefix import copy_gain_blocks
from vtoken.scheduling.shortfall import PoolView, share_shortfall, tokens_to_give


def one_at_a_time(spare: np.ndarray, count: int) -> np.ndarray:
    """The rule itself: whoever is furthest above gives the next block."""
    spare = np.maximum(spare, 0)
    given = np.zeros_like(spare)
    for _ in range(min(count, int(spare.sum()))):
        given[int(np.argmax(spare - given))] += 1
    return given


@pytest.mark.parametrize("seed", range(200))
def test_shares_level_the_highest_first(seed):
    rng = np.random.default_rng(seed)
    spare = rng.integers(-2, 9, rng.integers(1, 9))
    shortfall = int(rng.integers(0, 30))
    given = share_shortfall(spare, shortfall)
    expected = one_at_a_time(spare, shortfall)
    assert given.sum() == expected.sum()
    held = np.maximum(spare, 0)
    assert sorted(held - given) == sorted(held - expected)
    assert ((given >= 0) & (given <= held)).all()


def test_only_as_many_tokens_as_the_blocks_need():
    lose = tokens_to_give(
        give_blocks=np.array([1, 0, 2]),
        demand_blocks=np.array([4, 4, 4]),
        num_live=np.array([60, 64, 50]),
        num_new=np.array([1, 1, 1]),
        num_above_budget=np.array([30, 30, 10]),
        block_size=16,
    )
    # 61 tokens in 3 blocks: 13 too many; nothing is asked of the second; the third is capped.
    assert lose.tolist() == [13, 0, 10]


@pytest.mark.parametrize(
    ("free", "needed", "expected"), [(20, 5, 0), (15, 5, 0), (14, 5, 11), (3, 5, 22)]
)
def test_reclaims_to_the_high_mark_once_below_the_low_one(free, needed, expected):
    assert PoolView(free, needed, low=10, high=20).shortfall == expected


def test_copying_pays_by_degree_and_ratio():
    full, N = np.full(8, 1), 16
    for degree, survivors, pays in [(1, 8, True), (2, 8, False), (2, 5, True), (4, 5, False)]:
        gain = copy_gain_blocks(full * degree, np.full(8, survivors), N)
        assert (gain > 0) == pays, (degree, survivors, gain)


def test_output_lengths_are_estimated_from_finished_requests():
    lengths = OutputLengths()
    assert lengths.estimate(300, is_limited=True) == 300
    assert lengths.estimate(30000, is_limited=False) == OutputLengths.UNKNOWN_TOKENS
    for n in (100, 110, 90, 100) * 20:
        lengths.add(n)
    assert 100 <= lengths.estimate(30000, is_limited=False) <= 115
    assert lengths.estimate(40, is_limited=True) == 40

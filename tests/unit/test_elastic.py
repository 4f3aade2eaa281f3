"""The elastic experiment: both sides get the same memory, and pairs their interval."""

from __future__ import annotations

import pytest

from vtoken.experiments.bench.suites.elastic import (
    STOCK_BLOCK_TOKENS,
    VTOKEN_BLOCK_TOKENS,
    ElasticSettings,
    median_with_interval,
)


@pytest.mark.parametrize("concurrency", [1, 4, 6, 12])
def test_native_holds_the_concurrency_but_not_twice_that(concurrency):
    sides = [
        ElasticSettings(concurrency=concurrency, block_size=n)
        for n in (STOCK_BLOCK_TOKENS, VTOKEN_BLOCK_TOKENS)
    ]
    slots = {s.num_kv_blocks * s.block_size for s in sides}
    assert len(slots) == 1, "one side has more memory than the other"
    peak = sides[0].prompt_len + sides[0].output_len
    assert concurrency * peak <= slots.pop() < 2 * concurrency * peak


def test_the_interval_is_that_of_the_median():
    assert median_with_interval([1.02] * 5) == (1.02, 1.02, 1.02)
    ratios = [0.97, 0.99, 1.0, 1.01, 1.4]
    median, low, high = median_with_interval(ratios)
    assert (median, median_with_interval(ratios)) == (1.0, (median, low, high))
    assert 0.97 <= low < 1.0 < high <= 1.4
    narrow = median_with_interval(ratios * 20)
    assert narrow[2] - narrow[1] < high - low, "more pairs say more"

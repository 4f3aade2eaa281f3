"""`max_moves_per_step`: how many tokens an eviction moves, and which evictions wait."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from solo_request import SoloRequest

from vtoken.core.reclaim import most_moves
from vtoken.scheduling.move_limit import MoveLimit


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.4]))
def test_an_eviction_moves_no_more_than_said_and_nothing_is_changed(seed, threshold):
    rng = np.random.default_rng(seed)
    r = SoloRequest(None, num_blocks=60, fragmentation_threshold=threshold)
    r.step(int(rng.integers(2, 60)))
    for _ in range(8):
        live = r.table.live_ids()
        victims = np.sort(rng.choice(live, int(rng.integers(0, len(live))), replace=False))
        n = int(rng.choice([1, 1, 1, 5]))
        r.sync()
        before = r.table.index_of.copy()
        most = most_moves(r.table, victims, n, fragmentation_threshold=threshold)
        assert np.array_equal(before, r.table.index_of)
        moved = r.counters.moved_tokens
        r.step(n, victims=victims)
        moved = r.counters.moved_tokens - moved
        assert moved <= most
        if n == 1 and threshold == 0.0 and len(victims):
            assert most - moved < r.block_size  # only the last block's tokens are uncertain


def test_what_fits_goes_and_what_moves_nothing_never_waits():
    limit = MoveLimit(10)
    limit.begin_step()
    assert [limit.take(n) for n in (6, 5, 4, 1, 0)] == [True, False, True, False, True]
    limit.begin_step()
    assert [limit.take(n) for n in (25, 1, 0)] == [True, False, True]  # too large: alone
    assert limit.take(7, is_needed=True)


def test_a_limit_of_zero_moves_only_in_need():
    limit = MoveLimit(0)
    assert [limit.take(n) for n in (1, 0)] == [False, True]
    assert limit.take(3, is_needed=True)


vllm = pytest.importorskip("vllm")

from types import SimpleNamespace

from vtoken.config import VTokenConfig
from vtoken.engine.dry import DrySettings
from vtoken.testing.engines import CheckedDryEngine

N = 4


def moves_per_step(num_blocks: int, **config) -> tuple[list[int], SimpleNamespace]:
    """Run eight requests whose evictions are all due in the same steps."""
    pool = DrySettings(
        num_kv_blocks=num_blocks, block_size=N, max_model_len=256, max_num_seqs=8,
        max_num_batched_tokens=256, num_kv_heads=1, head_size=8,
    )  # fmt: skip
    config = {"policy": "random", "kv_budget_tokens": 24, "recent_tokens": 2, **config}
    e = CheckedDryEngine(pool, VTokenConfig.from_mapping(config))
    for i in range(8):
        e.add(f"r{i}", [5 + i, *range(20, 50)], 60)
    found, most_live = [], 0
    while e.has_unfinished():
        before = e.counters.moved_tokens
        e.step()
        found.append(e.counters.moved_tokens - before)
        for state in e.hooks.requests.by_id.values():
            most_live = max(most_live, state.table.num_live_tokens)
    return found, SimpleNamespace(counters=e.counters, most_live=most_live)


@pytest.mark.parametrize("policy", ["random", "h2o"])
def test_evictions_beyond_the_limit_come_in_later_steps(policy):
    free, _ = moves_per_step(400, policy=policy)
    held, run = moves_per_step(400, policy=policy, max_moves_per_step=9)
    assert max(free) > 20 and 0 < max(held) <= 9
    # All that were due at once have had their turn before the next interval is over.
    assert run.counters.eviction_events > 8 * 4 and run.most_live < 24 + 8 * N
    assert run.counters.preemptions == 0


def test_a_short_pool_lifts_the_limit():
    held, run = moves_per_step(8 * 9, max_moves_per_step=0)
    assert run.counters.preemptions == 0 and run.counters.moved_tokens > 0
    roomy, _ = moves_per_step(400, max_moves_per_step=0)
    assert sum(roomy) == 0 < sum(held)

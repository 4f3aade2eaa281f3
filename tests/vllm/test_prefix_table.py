"""The paper's Table 1, scaled, on the dry engine: what is retained beside shared prefixes."""

from __future__ import annotations

import pytest

from vtoken.config import VTokenConfig
from vtoken.experiments.bench.suites.sharing import (
    SharingCase,
    dry_engines,
    measure_sharing,
    prefix_table,
    show_prefix_table,
)

pytestmark = pytest.mark.vllm

PREFIX, SUFFIX, OUTPUT = 1024, 1024, 40
CASE = SharingCase(
    degree=1, prefix_tokens=PREFIX, suffix_tokens=SUFFIX, output_tokens=OUTPUT, vocab_size=32000
)
PREFIX_BLOCKS = PREFIX // 16


def table(policy: str, ratio: float, degrees) -> dict[tuple, dict]:
    limits = {
        "num_kv_blocks": 1200, "max_model_len": PREFIX + SUFFIX + OUTPUT,
        "max_num_batched_tokens": PREFIX + max(degrees) * (SUFFIX + OUTPUT),
    }  # fmt: skip
    config = VTokenConfig(policy=policy, eviction_ratio=ratio)
    rows = prefix_table(dry_engines(**limits), config, CASE, degrees)
    assert all(r["inconsistencies"] == 0 and r["prefix_hit_frac"] == 1.0 for r in rows)
    assert all(r["vtoken_preemptions"] == 0 for r in rows)
    return {(r["sharing_degree"], r["mode"], r["shared_prefix"]): r for r in rows}


@pytest.mark.parametrize("policy", ["random", "h2o"])
def test_blocks_retained_beside_a_shared_prefix(policy):
    """28 to 45 % below naive at degrees 2, 4 and 8; nothing shared is evicted or moved."""
    rows = table(policy, 0.5, (1, 2, 4, 8))
    for degree in (2, 4, 8):
        naive, ours = rows[degree, "naive", "protect"], rows[degree, "vtoken", "protect"]
        # naive keeps everything but whole dead blocks; a half of the suffixes' tokens are gone.
        assert 0.28 <= ours["retained_reduction_frac"] <= 0.45, degree
        ideal = PREFIX_BLOCKS + degree * (SUFFIX // 2 + OUTPUT) / 16
        assert abs(ours["retained_blocks"] - ideal) <= 2 * degree
        for row in (naive, ours):
            assert row["least_protected_tokens"] == PREFIX and row["shared_tokens_skipped"] > 0
            assert row["cached_prefix_blocks"] == PREFIX_BLOCKS
            assert row["dropped_blocks"] == row["vtoken_released_blocks"]  # private ones alone
        assert ours["vtoken_evicted_tokens"] == naive["vtoken_evicted_tokens"]
    lone = rows[1, "vtoken", "protect"]
    assert lone["least_protected_tokens"] == lone["shared_tokens_skipped"] == 0
    assert lone["cached_prefix_blocks"] < PREFIX_BLOCKS  # it rewrote some


def test_copy_keeps_the_cache_and_says_when_it_declines():
    rows = table("random", 0.5, (1, 2))
    protect, copy = rows[1, "vtoken", "protect"], rows[1, "vtoken", "copy"]
    assert copy["retained_blocks"] == protect["retained_blocks"]
    assert copy["cached_prefix_blocks"] == PREFIX_BLOCKS and copy["copies"] > 0
    # Two sharers at half retention: break-even, so it is left alone.
    protect, copy = rows[2, "vtoken", "protect"], rows[2, "vtoken", "copy"]
    assert abs(copy["retained_blocks"] - protect["retained_blocks"]) <= 2
    assert copy["copies_declined"] > 0 and copy["cached_prefix_blocks"] == PREFIX_BLOCKS


def test_copy_is_better_where_it_pays():
    rows = table("random", 0.7, (2,))
    protect, copy = rows[2, "vtoken", "protect"], rows[2, "vtoken", "copy"]
    assert copy["retained_blocks"] < 0.85 * protect["retained_blocks"]
    assert copy["cached_prefix_blocks"] == PREFIX_BLOCKS and copy["copies"] >= 2
    # References to the prefix are given up by both; its blocks come back once, from the second.
    assert copy["dropped_blocks"] - copy["vtoken_released_blocks"] == PREFIX_BLOCKS


def test_without_hits_nothing_is_shared():
    """The row tells the difference."""
    limits = {"num_kv_blocks": 400, "max_model_len": 512, "max_num_batched_tokens": 1024}
    engine = dry_engines(**limits)(VTokenConfig(policy="random"))
    case = SharingCase(
        degree=2, prefix_tokens=128, suffix_tokens=128, output_tokens=20, vocab_size=500
    )
    shared, manager = measure_sharing(engine, case), engine.scheduler.kv_cache_manager
    manager.prefix_cache_lookup_enabled = lambda request: False
    alone = measure_sharing(engine, case)
    assert shared["prefix_hit_frac"] == 1.0 and alone["prefix_hit_frac"] == 0.0
    assert shared["least_protected_tokens"] == 128 and alone["least_protected_tokens"] == 0
    assert "128 shared" in show_prefix_table([{**alone, "retained_reduction_frac": 0.1}]).title

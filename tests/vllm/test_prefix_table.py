"""The paper's Table 1, scaled, on the dry engine: what is retained beside shared prefixes."""

from __future__ import annotations

import pytest

from vtoken.config import VTokenConfig
from vtoken.engine import EngineSettings
from vtoken.engine.dry import DryEngine, DrySettings
from vtoken.experiments.bench.bench_options import BenchSettings
from vtoken.experiments.bench.run import run_bench
from vtoken.experiments.bench.suites.sharing import SharingCase, measure_sharing

pytestmark = pytest.mark.vllm

PREFIX, SUFFIX, OUTPUT = 1024, 1024, 40
PREFIX_BLOCKS = PREFIX // 16


def table(policy: str, ratio: float, degrees) -> dict[tuple, dict]:
    settings = BenchSettings(
        suites=("sharing",), dry_run=True, policies=(policy,), degrees=tuple(degrees),
        config=VTokenConfig(eviction_ratio=ratio), engine=EngineSettings(model="tiny-llama"),
        prefix_len=PREFIX, suffix_len=SUFFIX, output_len=OUTPUT,
    )  # fmt: skip
    rows = run_bench(settings).suites["sharing"].rows
    assert all(r["modelled"] and r["policy"] == policy for r in rows)
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
    settings = DrySettings(
        num_kv_blocks=400, max_model_len=512, max_num_batched_tokens=1024,
        enable_prefix_caching=True,
    )  # fmt: skip
    engine = DryEngine(settings, VTokenConfig(policy="random"))
    case = SharingCase(
        degree=2, prefix_tokens=128, suffix_tokens=128, output_tokens=20, vocab_size=500
    )
    shared, manager = measure_sharing(engine, case), engine.scheduler.kv_cache_manager
    manager.prefix_cache_lookup_enabled = lambda request: False
    alone = measure_sharing(engine, case)
    assert shared["prefix_hit_frac"] == 1.0 and alone["prefix_hit_frac"] == 0.0
    assert shared["least_protected_tokens"] == 128 and alone["least_protected_tokens"] == 0

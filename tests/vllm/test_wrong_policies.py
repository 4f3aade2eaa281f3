"""A policy that breaks its contract costs its own request some tokens, and nothing else."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest

pytest.importorskip("vllm")

from vtoken.config import VTokenConfig
from vtoken.engine.dry import DrySettings
from vtoken.scheduling.naming import answer_fault
from vtoken.testing.engines import CheckedDryEngine
from vtoken.testing.random_work import finish_all

PREFIX = [20 + i % 5 for i in range(24)]


def _raises(policy, view):
    raise KeyError("mine")


ANSWERS = {
    "shared": lambda p, v: np.arange(p.sink_tokens, p.sink_tokens + v.num_evict),
    "twice": lambda p, v: np.full(v.num_evict, v.live_ids[-1]),
    "dead": lambda p, v: np.arange(v.num_computed_tokens)[: v.num_evict],
    "too many": lambda p, v: v.live_ids[p.sink_tokens :],
    "beyond": lambda p, v: np.array([v.num_computed_tokens]),
    "negative": lambda p, v: np.array([-1]),
    "no array": lambda p, v: ["a"],
    "raises": _raises,
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("caching", [True, False])
def test_others_are_not_touched_and_the_engine_goes_on(answer, caching, monkeypatch, caplog):
    """Every step is checked against KV that shows a misplaced or rewritten token."""
    monkeypatch.setattr(import_module("vtoken.policies.random").Random, "evict", ANSWERS[answer])
    settings = DrySettings(
        num_kv_blocks=60, block_size=4, max_model_len=256, max_num_seqs=8,
        max_num_batched_tokens=64, num_kv_heads=1, head_size=8, enable_prefix_caching=caching,
    )  # fmt: skip
    config = VTokenConfig(policy="random", kv_budget_tokens=16, recent_tokens=2)
    engine = CheckedDryEngine(settings, config)
    for i in range(3):
        engine.add(f"r{i}", [*PREFIX, i], 40)
    finish_all(engine)
    told = [r for r in caplog.records if "the oldest tokens go instead" in r.getMessage()]
    assert engine.counters.wrong_victims > 0 and len(told) == 1
    assert engine.counters.evicted_tokens > 0


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([5, 6, 7], None), ([], None), ([5, 6, 7, 8], "4 ids where 3"), ([5, 5], "twice"),
        ([-1], "does not have"), ([30], "does not have"), ([9], "not live"), ([2], "share"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(ids, found):
    from vtoken.core.table import RequestTable

    table = RequestTable("r", 4)
    table.sync_new_tokens(list(range(1, 9)), 30)
    table.evict_tokens(np.array([9], np.int32))
    protected = np.arange(4, dtype=np.int32)
    fault = answer_fault(np.array(ids, np.int32), 3, table, protected)
    assert (fault is None) if found is None else found in fault

"""Fixed random runs of every mode, and the same runs with something broken: they must fail."""

from __future__ import annotations

import numpy as np
import pytest
from policy_references import reference_victims

pytest.importorskip("vllm", reason="vLLM is not installed")

from vtoken.config import VTokenConfig
from vtoken.core import scalar_ops
from vtoken.core.scalar_ops import ScalarOps
from vtoken.core.table import RequestTable
from vtoken.engine.dry import DrySettings
from vtoken.errors import InvariantViolation
from vtoken.scheduling.requests import BudgetedRequest
from vtoken.testing.engines import CheckedDryEngine
from vtoken.testing.random_work import Workload, drive
from vtoken.verify.catalogue import PLAN_FAULTS

# name -> (VTokenConfig settings, prefix caching, asynchronous)
RUNS = {
    "native": (None, True, False),
    "native-async": (None, True, True),
    "indirection": ({"mode": "indirection"}, True, True),
    "random": ({"policy": "random", "kv_budget_tokens": 14}, True, False),
    "random-async": ({"policy": "random", "kv_budget_tokens": 14}, True, True),
    "streaming": ({"policy": "streaming-llm", "kv_budget_tokens": 14}, True, False),
    "window": ({"policy": "sliding-window", "eviction_ratio": 0.5}, False, True),
    "every-step": ({"policy": "random", "eviction_interval_tokens": 1}, True, True),
    "threshold-0.3": (
        {"policy": "random", "fragmentation_threshold": 0.3, "eviction_interval_tokens": 3},
        True, False,
    ),
    "threshold-0.6": ({"policy": "random", "fragmentation_threshold": 0.6}, True, True),
    "naive": ({"mode": "naive", "policy": "random", "kv_budget_tokens": 14}, True, False),
    "naive-async": ({"mode": "naive", "policy": "streaming-llm"}, False, True),
    "h2o": ({"policy": "h2o", "kv_budget_tokens": 14}, True, True),
    "tova": ({"policy": "tova", "eviction_ratio": 0.5}, True, False),
    "pressure": ({"policy": "random", "kv_budget_tokens": 14, "evict_when": "pressure"}, True, False),
    "pressure-async": (
        {"policy": "streaming-llm", "kv_budget_tokens": 14, "evict_when": "pressure"}, True, True,
    ),
    "pressure-h2o-async": (
        {"policy": "h2o", "kv_budget_tokens": 14, "evict_when": "pressure"}, True, True,
    ),
    "copy": ({"policy": "random", "kv_budget_tokens": 14, "shared_prefix": "copy"}, True, False),
}  # fmt: skip


def engine(name: str, fault=None, num_kv_blocks: int = 40) -> CheckedDryEngine:
    settings, caching, asynchronous = RUNS[name]
    dry = DrySettings(
        num_kv_blocks=num_kv_blocks, block_size=4, max_model_len=160, max_num_seqs=8,
        max_num_batched_tokens=16, num_kv_heads=1, head_size=8,
        enable_prefix_caching=caching, async_scheduling=asynchronous,
    )  # fmt: skip
    config = None if settings is None else VTokenConfig.from_mapping(settings)
    # Under pressure it is the pool that decides, and copies protect nobody: not recomputed here.
    trusts = config is not None and (
        config.evict_when == "pressure" or config.shared_prefix == "copy"
    )
    victims = None if trusts else reference_victims
    return CheckedDryEngine(dry, config, victims=victims, fault=fault)


@pytest.mark.parametrize("name", RUNS)
def test_random_work(name):
    e = engine(name)
    drive(e, seed=1, num_actions=40)
    config = e.config
    assert (e.oracle.num_evicted > 50) == (config is not None and config.evicts)
    assert (e.num_hits > 0) == RUNS[name][1]


@pytest.mark.parametrize("name", ["random", "threshold-0.6", "h2o", "pressure"])
def test_tiny_pools_end(name):
    """Hardly room for one request: preemptions and put-off chunks, but always an end."""
    e = engine(name, num_kv_blocks=9)
    drive(e, seed=2, num_actions=25, workload=Workload(max_prompt_tokens=40, max_output_tokens=30))


def must_fail(names, fault=None) -> None:
    """One of these runs finds what is broken; a fault is named as the catalogue says."""
    applied = 0
    for name in names:
        for seed in range(4):
            e = engine(name, fault)
            try:
                drive(e, seed, num_actions=40)
            except InvariantViolation as violation:
                assert fault is None or violation.invariant in fault.check.split(" or ")
                return
            except AssertionError:  # vLLM's own, or ours of a table
                assert fault is None
                return
            applied += e.num_faults
    raise RuntimeError(f"nothing was found; {applied} plans were damaged")


@pytest.mark.parametrize("fault", PLAN_FAULTS)
def test_damaged_plans_are_found(fault):
    must_fail(("random", "threshold-0.6", "naive"), PLAN_FAULTS[fault])


def _blocks_keep_their_hash(monkeypatch):
    from vllm.v1.core.block_pool import BlockPool

    monkeypatch.setattr(BlockPool, "evict_blocks", lambda self, block_ids: None)


def _evicted_requests_are_cached(monkeypatch):
    from vtoken.scheduling.requests import RunningRequests

    monkeypatch.setattr(RunningRequests, "has_evicted", lambda self, req_id: False)


def _shared_blocks_are_written(monkeypatch):
    """Whether a block is shared is not looked at: its tokens die, and its holes are used again."""
    from vtoken.scheduling.prefix import PrefixBlocks

    def protect(self, state):
        state.num_protected = 0

    monkeypatch.setattr(PrefixBlocks, "protect", protect)
    monkeypatch.setattr(PrefixBlocks, "shared", lambda self, blocks: None)


def _in_plain_python(monkeypatch):
    """What is broken below is broken there."""
    monkeypatch.setattr("vtoken.vllm_plugin.scheduler.load_ops", ScalarOps)


def _a_reused_slot_is_the_neighbour(monkeypatch):
    _in_plain_python(monkeypatch)
    stock = scalar_ops._reuse_hole

    def reuse(table, local, layout):
        stock(table, local, layout)
        if layout.new_token_index > 0:
            layout.new_token_index -= 1

    monkeypatch.setattr(scalar_ops, "_reuse_hole", reuse)


def _layouts_are(monkeypatch, change) -> None:
    """Let `change` damage every layout that is placed."""
    _in_plain_python(monkeypatch)
    stock = scalar_ops._place

    def place(*args):
        layout = stock(*args)
        change(layout)
        return layout

    monkeypatch.setattr(scalar_ops, "_place", place)


def _moves_are_not_sent(monkeypatch):
    def change(layout):
        layout.move_source = layout.move_destination = np.empty(0, np.int64)

    _layouts_are(monkeypatch, change)


def _tables_forget_a_move(monkeypatch):
    _in_plain_python(monkeypatch)
    stock = RequestTable.apply_moves
    monkeypatch.setattr(RequestTable, "apply_moves", lambda t, s, d: stock(t, s[:-1], d[:-1]))


def _rows_keep_their_order(monkeypatch):
    def change(layout):
        if layout.kept is not None:
            layout.kept = np.sort(layout.kept)

    _layouts_are(monkeypatch, change)


def _evicts_one_too_many(monkeypatch):
    stock = BudgetedRequest.num_above_budget
    monkeypatch.setattr(BudgetedRequest, "num_above_budget", lambda s, n: stock(s, n) + 1)


def _tables_are_left(monkeypatch):
    from vtoken.core.table import TokenTable

    monkeypatch.setattr(TokenTable, "forget", lambda self, req_id: None)


BROKEN = [
    _blocks_keep_their_hash, _evicted_requests_are_cached, _shared_blocks_are_written,
    _a_reused_slot_is_the_neighbour, _moves_are_not_sent, _tables_forget_a_move,
    _rows_keep_their_order, _evicts_one_too_many, _tables_are_left,
]  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_code_is_found(broken, monkeypatch):
    broken(monkeypatch)
    must_fail(("random", "random-async", "threshold-0.3"))

"""Fixed random runs of every mode, and the same runs with something broken: they must fail."""

from __future__ import annotations

import pytest
from broken_code import BROKEN, break_code
from policy_references import reference_victims

pytest.importorskip("vllm", reason="vLLM is not installed")

from vtoken.config import VTokenConfig
from vtoken.engine.dry import DrySettings
from vtoken.errors import InvariantViolation
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
    # Under pressure it is the pool that decides, and copies protect no block: not recomputed here.
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
    """Hardly room for one request: preemptions and deferred chunks, but always an end."""
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


@pytest.mark.parametrize("name", BROKEN)
def test_broken_code_is_found(name, monkeypatch):
    break_code(monkeypatch, name)
    must_fail(("random", "random-async", "threshold-0.3"))

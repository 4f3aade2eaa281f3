"""Stretches taken at once give what plain steps give: same peaks, preemptions, evictions, order."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from vtoken.config import VTokenConfig
from vtoken.engine.dry import DryEngine, DrySettings
from vtoken.engine.run import run_requests
from vtoken.workloads.request import WorkloadRequest

pytestmark = pytest.mark.vllm

CONFIGS = {
    "native": None,
    "indirection": VTokenConfig(mode="indirection", policy="random"),
    "naive": VTokenConfig(mode="naive", policy="random"),
    "vtoken": VTokenConfig(mode="vtoken", policy="random"),
    "streaming": VTokenConfig(mode="vtoken", policy="streaming-llm", kv_budget_tokens=90),
    "interval": VTokenConfig(mode="vtoken", policy="random", eviction_interval_tokens=5),
}


def requests(num: int, seed: int, shared: int = 0) -> list[WorkloadRequest]:
    """Prompts of 20 to 120 tokens of their own behind `shared` common ones."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(num):
        own = int(rng.integers(20, 120))
        ids = [1] * shared + [(i * 131 + k) % 999 + 2 for k in range(own)]
        made.append(
            WorkloadRequest(
                request_id=f"r{i}", prompt_len=len(ids), prompt_token_ids=ids,
                output_len=int(rng.integers(30, 220)),
            )
        )  # fmt: skip
    return made


class Run:
    """One run, and everything that must not depend on how its steps were taken."""

    def __init__(
        self, config, fast: bool, *, blocks, num, seed, caching=False, shared=0, at_once=6
    ):
        settings = DrySettings(
            num_kv_blocks=blocks, max_num_batched_tokens=128, max_model_len=2048,
            enable_prefix_caching=caching, fast_forward=fast, max_num_seqs=16,
        )  # fmt: skip
        engine = DryEngine(settings, config)
        engine_steps = []

        def on_step(num_finished, _):
            engine_steps.append(num_finished)

        if fast:
            assert engine._fast is not None
        run = run_requests(
            engine, requests(num, seed, shared), max_concurrency=at_once, on_step=on_step,
            check_every=1,
        )  # fmt: skip
        order = list(run.finished)
        finish = [(r, len(run.finished[r].output_token_ids)) for r in order]
        assert engine.check_idle() == []
        self.calls = len(engine_steps)
        self.stats = run.stats
        counters = run.counters.as_dict()
        self.outcome = {
            "finish": finish,
            **{f.name: getattr(run.stats, f.name) for f in fields(run.stats)},
            **{k: v for k, v in counters.items() if not k.endswith("_s") and k != "hook_calls"},
        }


def assert_same(one: Run, other: Run) -> None:
    for key, value in one.outcome.items():
        if isinstance(value, float):  # summed in another order
            assert other.outcome[key] == pytest.approx(value, rel=1e-9), key
        else:
            assert other.outcome[key] == value, key


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("blocks", [200, 44], ids=["roomy", "tight"])
def test_outcome_is_that_of_plain_steps(name, blocks):
    options = {"blocks": blocks, "num": 14, "seed": 3}
    plain, fast = Run(CONFIGS[name], False, **options), Run(CONFIGS[name], True, **options)
    assert_same(plain, fast)
    assert fast.calls < 0.8 * plain.calls, "nothing was taken at once"
    if blocks == 44 and name == "native":
        assert plain.stats.preemptions > 0, "a tight pool that nobody was preempted in"


@pytest.mark.parametrize("name", ["native", "naive", "vtoken", "streaming"])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("blocks", [120, 50])
def test_with_a_prefix_cache_and_a_shared_prefix(name, seed, blocks):
    options = {"blocks": blocks, "num": 16, "seed": seed, "caching": True, "shared": 48}
    plain, fast = Run(CONFIGS[name], False, **options), Run(CONFIGS[name], True, **options)
    assert_same(plain, fast)
    assert fast.calls < plain.calls


@pytest.mark.parametrize("name", ["native", "naive", "vtoken"])
def test_requests_that_wait_get_in_at_the_same_step(name):
    options = {"blocks": 40, "num": 12, "seed": 5, "at_once": 12}
    plain, fast = Run(CONFIGS[name], False, **options), Run(CONFIGS[name], True, **options)
    assert_same(plain, fast)


def test_limit_is_kept_and_listeners_see_every_step():
    settings = DrySettings(num_kv_blocks=100, fast_forward=True)
    engine = DryEngine(settings, None)
    seen = []
    engine.bulk_listeners.append(seen.append)
    engine.add("a", [1] * 20, 100)
    engine.step()
    new, _ = engine.step(max_steps=7)
    assert new == {"a": 7} and seen[0].num_steps == 7
    assert list(seen[0].live_tokens) == list(range(21, 28))
    assert list(seen[0].used_blocks) == [2] * 7
    new, finished = engine.step(max_steps=1)
    assert new == {"a": 1} and not finished
    done = []
    while engine.has_unfinished():
        done += engine.step()[1]
    assert len(done[0].output_token_ids) == 100


def test_settings_that_need_plain_steps_take_them():
    for config in (
        VTokenConfig(policy="random", fragmentation_threshold=0.3),
        VTokenConfig(policy="random", trace=True),
        VTokenConfig(policy="random", evict_when="pressure"),
    ):
        assert DryEngine(DrySettings(num_kv_blocks=50, fast_forward=True), config)._fast is None
    assert DryEngine(DrySettings(num_kv_blocks=50), None)._fast is None

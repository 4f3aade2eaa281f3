"""Every generated token against a masked Hugging Face model that replays the recorded live sets."""

from __future__ import annotations

import numpy as np
import pytest
from one_engine import engine_for, prompts, run
from replay import CLOSE, against_reference, assert_equals_reference, assert_live_sets

from vtoken.config import VTokenConfig

pytestmark = pytest.mark.vllm

POLICIES = ["random", "streaming-llm", "sliding-window"]
CHUNKED, WHOLE = 48, 512  # tokens that a step may compute
CASES = [("tiny-llama", 3, 64), ("smollm2-135m", 2, 24)]


def engine_of(config: VTokenConfig, batch: int = CHUNKED, model: str = "tiny-llama"):
    """One engine for both batch sizes: the scheduler's own limit cuts prompts into chunks."""
    engine = engine_for(config, model=model, max_num_batched_tokens=WHOLE)
    engine.scheduler.max_num_scheduled_tokens = batch
    return engine


def config_of(policy: str, **changes) -> VTokenConfig:
    how = {"eviction_ratio": 0.5} if policy == "sliding-window" else {"kv_budget_tokens": 48}
    return VTokenConfig(policy=policy, eviction_interval_tokens=7, trace=True, **how, **changes)


@pytest.mark.parametrize(
    "changes",
    [{"mode": "naive"}, {"fragmentation_threshold": 0.6}],
    ids=["naive", "threshold"],
)
def test_layouts_with_holes_equal_it_too(changes, hf_model):
    engine = engine_of(config_of("random", **changes))
    done = run(engine, prompts(3, length=70), 48)
    assert_equals_reference(engine, hf_model("tiny-llama"), done)


def test_preempted_requests_equal_it_too(hf_model):
    """Everybody loses all blocks in mid-generation and is computed again."""
    config = config_of("random")
    engine = engine_of(config)
    for name, prompt in prompts(3, length=60).items():
        engine.add(name, prompt, 48, logprobs=True)
    done, steps = [], 0
    while engine.has_unfinished():
        steps += 1
        if steps in (20, 33):
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        done += engine.step()[1]
        assert not engine.check_invariants()
    assert engine.counters.preemptions == 6 and engine.check_idle() == []
    assert assert_live_sets(engine, config, done) > 10
    assert_equals_reference(engine, hf_model("tiny-llama"), done)


def _swapped(source, destination):
    destination = destination.copy()
    if len(destination) > 1:
        destination[[0, -1]] = destination[[-1, 0]]
    return source, destination


def _skipped(source, destination):
    return source[:-1], destination[:-1]


@pytest.mark.parametrize("damage", [_swapped, _skipped])
def test_a_damaged_mover_is_seen(damage, hf_model, monkeypatch):
    """Control: the comparison must be able to fail."""
    config = config_of("random")
    engine = engine_of(config)
    mover = engine.runner.vtoken_attention
    stock, events = mover.move, []

    def move(source, destination):
        events.append(len(source))
        stock(*damage(np.asarray(source), np.asarray(destination)))

    monkeypatch.setattr(mover, "move", move)
    done = run(engine, prompts(3, length=70), 64)
    assert max(events) > 1
    result = against_reference(engine, hf_model("tiny-llama"), done)
    assert result.mismatches and result.max_abs_logprob_diff > 10 * CLOSE


@pytest.mark.parametrize(("model", "count", "max_tokens"), CASES, ids=[c[0] for c in CASES])
@pytest.mark.parametrize("batch", [CHUNKED, WHOLE], ids=["chunked", "whole"])
def test_generations_equal_the_masked_reference(model, count, max_tokens, batch, hf_model):
    """Three policies on one engine; live sets equal the policies written anew."""
    for policy in POLICIES:
        config = config_of(policy)
        engine = engine_of(config, batch, model)
        done = run(engine, prompts(count, length=70), max_tokens)
        evictions = assert_live_sets(engine, config, done)
        assert evictions >= 2 * count
        assert_equals_reference(engine, hf_model(model), done)
        assert engine.counters.relocation_events > 0

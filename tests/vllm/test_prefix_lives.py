"""What becomes of cached blocks: sharers that leave, preempted requests, resets, KV events.

On the real scheduler with a worker whose KV carries its origin: every step, `CheckedDryEngine`
compares what attention reads, and what every cached block holds, with what should be there.
"""

from __future__ import annotations

import numpy as np
import pytest
from policy_references import reference_victims

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

from vtoken.config import VTokenConfig
from vtoken.engine.dry import DrySettings
from vtoken.testing.engines import CheckedDryEngine
from vtoken.testing.random_work import Workload, drive, finish_all

pytestmark = pytest.mark.vllm

N = 4  # block size
PREFIX = list(range(20, 44))  # six blocks
MODES = {
    "vtoken": {},
    "naive": {"mode": "naive"},
    "copy": {"shared_prefix": "copy"},
    "naive-copy": {"mode": "naive", "shared_prefix": "copy"},
    "holes": {"fragmentation_threshold": 0.5},
    "h2o": {"policy": "h2o"},
}


def engine_of(name: str, num_kv_blocks: int = 60, **changes) -> CheckedDryEngine:
    fields = {"policy": "random", "kv_budget_tokens": 14, "eviction_interval_tokens": 2}
    config = VTokenConfig.from_mapping({**fields, **MODES[name], **changes})
    settings = DrySettings(
        num_kv_blocks=num_kv_blocks, block_size=N, max_model_len=200, max_num_seqs=8,
        max_num_batched_tokens=64, num_kv_heads=1, head_size=8, enable_prefix_caching=True,
    )  # fmt: skip
    victims = None if config.shared_prefix == "copy" else reference_victims
    return CheckedDryEngine(settings, config, victims=victims)


class Starts:
    """Tokens that each request found in the cache, each time it was started."""

    def __init__(self, engine: CheckedDryEngine) -> None:
        self.hits: dict[str, list[int]] = {}
        engine.step_listeners.append(self)

    def __call__(self, output) -> None:
        cached = output.scheduled_cached_reqs
        for new in output.scheduled_new_reqs:
            self.hits.setdefault(new.req_id, []).append(new.num_computed_tokens)
        for req_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if req_id in cached.resumed_req_ids:
                self.hits.setdefault(req_id, []).append(computed)


def run_until(engine: CheckedDryEngine, condition, max_steps: int = 300) -> None:
    for _ in range(max_steps):
        if condition():
            return
        engine.step()
    raise AssertionError("it never came to that")


@pytest.mark.parametrize("name", MODES)
def test_one_of_two_sharers_evicts_and_finishes_and_a_third_hits(name):
    engine = engine_of(name)
    starts = Starts(engine)
    engine.add("warm", [*PREFIX, 50], 1)
    finish_all(engine)
    engine.add("a", [*PREFIX, 60, 61], 30)
    engine.add("b", [*PREFIX, 70, 71], 60)
    run_until(engine, lambda: "a" not in engine.scheduler.requests)
    assert starts.hits["a"] == starts.hits["b"] == [len(PREFIX)]
    assert engine.counters.evicted_tokens > 0 and "b" in engine.scheduler.requests
    engine.add("c", [*PREFIX, 80, 81], 30)
    finish_all(engine)
    if "copy" in name:  # blocks that lost tokens were left, not written: their entries stay
        assert starts.hits["c"] == [len(PREFIX)]
    # Else `b`, alone since, may have rewritten some. What is left is whole: the engine looks.
    assert 0 < starts.hits["c"][0] <= len(PREFIX)


def alone(name: str, prompt: list[int], max_tokens: int) -> CheckedDryEngine:
    engine = engine_of(name)
    engine.add("first", prompt, max_tokens)
    finish_all(engine)
    assert engine.counters.evicted_tokens > 0
    return engine


@pytest.mark.parametrize(("name", "all_stay"), [("vtoken", False), ("copy", True)])
def test_a_lone_owner_leaves_entries_of_what_it_did_not_rewrite(name, all_stay):
    prompt = [*PREFIX, *range(60, 80)]
    engine = alone(name, prompt, 30)
    starts = Starts(engine)
    engine.add("second", prompt, 5)
    finish_all(engine)
    full = (len(prompt) - 1) // N * N  # the last token is always computed
    assert starts.hits["second"] == [full] if all_stay else starts.hits["second"][0] < full


@pytest.mark.parametrize("name", ["vtoken", "copy", "naive", "h2o"])
def test_a_preempted_request_hits_its_own_old_prefix(name):
    """Blocks that it filled before it evicted; nothing that it computed after."""
    engine = engine_of(name, kv_budget_tokens=40)
    starts = Starts(engine)
    prompt = [*PREFIX, *range(60, 76)]
    engine.add("a", prompt, 60)
    request = engine.scheduler.requests["a"]
    run_until(engine, lambda: request.num_computed_tokens >= len(prompt))
    preempt(engine, request)
    run_until(engine, lambda: len(starts.hits["a"]) == 2)
    assert starts.hits["a"][1] >= len(prompt) // N * N - N  # whole: nothing was evicted yet
    evicted = engine.counters.evicted_tokens
    run_until(engine, lambda: engine.counters.evicted_tokens > evicted + 8)
    length = request.num_computed_tokens
    preempt(engine, request)
    run_until(engine, lambda: len(starts.hits["a"]) == 3)
    assert 0 < starts.hits["a"][2] < length // N * N
    assert name != "copy" or starts.hits["a"][2] >= len(PREFIX)
    finish_all(engine)


def preempt(engine: CheckedDryEngine, request) -> None:
    """As vLLM does when no block is left; between steps, as its reset of a busy cache does."""
    assert engine.scheduler.running == [request]
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0, drop_stale_output=True)
    engine.scheduler.prev_step_scheduled_req_ids.clear()


@pytest.mark.parametrize("name", ["vtoken", "copy", "naive"])
def test_a_small_pool_preempts_and_resumes_on_old_prefixes(name):
    """Requests that keep 100 tokens each in a pool for less: vLLM preempts, and they come back."""
    changes = {"kv_budget_tokens": 90} if name == "naive" else {"eviction_ratio": 0.1}
    fields = {k: v for k, v in {"kv_budget_tokens": None, **changes}.items()}
    engine = engine_of(name, num_kv_blocks=52, **fields)
    starts = Starts(engine)
    # Admission by projected peaks would let nobody in beside the first.
    engine.hooks.admission.admits = lambda request, hit_blocks: True
    for i in range(4):
        engine.add(f"r{i}", [*PREFIX, *range(60 + 10 * i, 68 + 10 * i)], 60)
    finish_all(engine)
    again = [hits[1:] for hits in starts.hits.values() if len(hits) > 1]
    assert again and any(n > 0 for hits in again for n in hits)


class Mirror:
    """The set of cached block hashes, from KV events alone."""

    def __init__(self, engine: CheckedDryEngine) -> None:
        self.engine, self.hashes = engine, set()
        self.counts = dict.fromkeys(("stored", "removed", "cleared"), 0)
        engine.block_pool.enable_kv_cache_events = True
        self._take = engine.block_pool.take_events
        engine.block_pool.take_events = self.take

    def take(self):
        events = self._take()
        for event in events:
            if isinstance(event, BlockStored):
                self.hashes |= set(event.block_hashes)
                self.counts["stored"] += len(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.counts["removed"] += len(event.block_hashes)
                self._remove(event.block_hashes)
            else:
                assert isinstance(event, AllBlocksCleared)
                self.counts["cleared"] += 1
                self.hashes.clear()
        return events

    def _remove(self, hashes) -> None:
        """One copy of a block is gone; another block may hold the same."""
        self.hashes -= set(hashes) - self.cached()

    def cached(self) -> set:
        found = (b.block_hash for b in self.engine.block_pool.blocks)
        return {maybe_convert_block_hash(get_block_hash(h)) for h in found if h is not None}


@pytest.mark.parametrize("name", MODES)
def test_kv_events_tell_what_the_cache_holds(name):
    """At every step, over random arrivals, evictions, aborts and resets."""
    engine = engine_of(name)
    mirror, step = Mirror(engine), engine.step

    def checked_step(max_steps=None):
        out = step(max_steps)
        mirror.take()
        assert mirror.hashes == mirror.cached()
        return out

    engine.step = checked_step
    drive(engine, seed=3, num_actions=30, workload=Workload(max_output_tokens=40))
    assert mirror.counts["stored"] > 20 and engine.num_hits > 0
    assert mirror.counts["cleared"] > 0 and engine.counters.evicted_tokens > 50
    if name in ("vtoken", "h2o"):  # own blocks leave the cache before they are rewritten
        assert mirror.counts["removed"] > 0


@pytest.mark.parametrize("name", ["vtoken", "copy", "naive"])
def test_a_reset_leaves_nothing_to_hit(name):
    engine = engine_of(name)
    prompt = [*PREFIX, 60, 61, 62]
    for i, preempts in enumerate((False, True)):
        engine.add(f"a{i}", prompt, 30)
        for _ in range(12):
            engine.step()
        assert engine.counters.evicted_tokens > 0
        # While somebody holds blocks it is refused, unless they may be taken away.
        did = engine.scheduler.reset_prefix_cache(reset_running_requests=preempts)
        assert did == preempts
        cached = [b for b in engine.block_pool.blocks if b.block_hash is not None]
        assert bool(cached) != preempts
        starts = Starts(engine)
        finish_all(engine)
        assert not preempts or starts.hits[f"a{i}"] == [0], "computed again from nothing"
    assert engine.scheduler.reset_prefix_cache()
    starts = Starts(engine)
    engine.add("last", prompt, 2)
    finish_all(engine)
    assert starts.hits["last"] == [0]


def test_the_mirror_finds_a_lost_event(monkeypatch):
    """A check that cannot fail shows nothing."""
    engine = engine_of("vtoken")
    mirror = Mirror(engine)
    monkeypatch.setattr(engine.block_pool, "_emit_block_removed_events", lambda hashes: None)
    engine.add("a", [*PREFIX, *np.arange(60, 80).tolist()], 30)
    finish_all(engine)
    mirror.take()
    assert mirror.hashes != mirror.cached()

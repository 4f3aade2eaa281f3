"""The picture of the pool, from vLLM's real scheduler with no model behind it."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from vtoken.config import VTokenConfig
from vtoken.server import snapshot as module
from vtoken.server.snapshot import PoolView, describe, snapshot
from vtoken.server.stats import StatsSource, live_and_dead_tokens

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm
N = 16


def open_engine(mode: str = "vtoken", num_blocks: int = 60, caching: bool = False, **settings):
    from vtoken.engine.dry import DryEngine, DrySettings

    config = None
    if mode != "native":
        given = {"policy": "random", "kv_budget_tokens": 48, **settings}
        config = VTokenConfig(mode=mode, **given)
    return DryEngine(
        DrySettings(num_kv_blocks=num_blocks, block_size=N, enable_prefix_caching=caching), config
    )


def run(
    engine, num_requests: int = 4, steps: int = 60, prompt: int = 37, output: int = 150
) -> None:
    for i in range(num_requests):
        engine.add(f"r{i}", range(100 * i, 100 * i + prompt + i), output)
    for _ in range(steps):
        engine.step()


def sums(state: dict) -> dict[str, int]:
    return {k: sum(c[i] for c in state["cells"]) for i, k in enumerate(module_kinds)}


module_kinds = ("live", "dead", "tail", "cached")


@pytest.mark.parametrize("mode", ["native", "indirection", "naive", "vtoken"])
def test_every_slot_is_counted_once(mode):
    engine = open_engine(mode)
    run(engine)
    state = snapshot(engine.scheduler)
    found, blocks = sums(state), state["blocks"]
    assert state["num_running"] == 4
    assert blocks["usable"] == 60
    assert blocks["owned"] == engine.num_used_blocks() == 60 - blocks["free"]
    assert found["live"] + found["dead"] + found["tail"] == blocks["owned"] * N
    assert found["live"] == state["tokens"]["live"] == sum(r["live"] for r in state["requests"])
    assert found["dead"] == state["tokens"]["dead"]
    assert (found["dead"] > 0) == (mode == "naive")
    assert (sum(r["evicted"] for r in state["requests"]) > 0) == (mode in ("naive", "vtoken"))
    assert json.loads(json.dumps(state)) == state


def test_moves_are_told_by_request():
    engine = open_engine()
    run(engine)
    state = snapshot(engine.scheduler)
    assert sum(r["moved"] for r in state["requests"]) == state["counters"]["moved_tokens"] > 0


def test_gauges_agree_with_the_picture():
    engine = open_engine("naive")
    run(engine)
    state = snapshot(engine.scheduler)
    live, dead = live_and_dead_tokens(engine.hooks, engine.scheduler.running)
    assert (live, dead) == (state["tokens"]["live"], state["tokens"]["dead"])


def test_looking_changes_nothing():
    looked, left = open_engine(), open_engine()
    for engine in (looked, left):
        for i in range(3):
            engine.add(f"r{i}", range(50 * i, 50 * i + 40), 120)
    for _ in range(80):
        looked.step()
        left.step()
        snapshot(looked.scheduler)
    assert looked.hooks.counters.evicted_tokens == left.hooks.counters.evicted_tokens > 0
    assert snapshot(looked.scheduler)["cells"] == snapshot(left.scheduler)["cells"]
    assert looked.check_invariants() == []


@pytest.mark.parametrize("mode", ["native", "vtoken"])
def test_blocks_of_an_aborted_request_are_free_before_the_next_step(mode):
    engine = open_engine(mode)
    run(engine)
    before = snapshot(engine.scheduler)
    gone = before["requests"][1]
    engine.abort([gone["id"]])
    after = snapshot(engine.scheduler)
    assert after["blocks"]["free"] == before["blocks"]["free"] + gone["blocks"]
    assert gone["id"] not in [r["id"] for r in after["requests"]]


def test_free_blocks_that_hold_a_prefix():
    engine = open_engine(caching=True)
    run(engine, num_requests=2, steps=1, prompt=40, output=2)
    while engine.has_unfinished():
        engine.step()
    state = snapshot(engine.scheduler)
    assert state["blocks"]["owned"] == 0
    assert sums(state)["cached"] == state["blocks"]["cached"] * N > 0


def test_a_look_asks_a_few_blocks_and_all_of_them_in_turn():
    engine = open_engine(caching=True)
    run(engine, num_requests=2, steps=1, prompt=40, output=2)
    while engine.has_unfinished():
        engine.step()
    view = PoolView(engine.scheduler)
    seen = [describe(view.copy(scan_blocks=3))["blocks"]["cached"] for _ in range(21)]
    assert seen == sorted(seen)
    assert seen[-1] == snapshot(engine.scheduler)["blocks"]["cached"] > seen[0]
    # What is used again is no reusable block, whether it was asked since or not.
    engine.add("new", range(5000, 5900), 5)
    engine.step()
    state = describe(view.copy(scan_blocks=1))
    found = sums(state)
    assert found["live"] + found["dead"] + found["tail"] == state["blocks"]["owned"] * N
    assert state["blocks"]["cached"] <= state["blocks"]["free"]


@pytest.mark.parametrize("mode", ["native", "naive", "vtoken"])
def test_looking_again_and_again_shows_what_one_look_shows(mode):
    engine = open_engine(mode, num_blocks=26)
    view, preempted = PoolView(engine.scheduler), 0
    for i in range(4):
        engine.add(f"r{i}", range(100 * i, 100 * i + 40), 110)
    while engine.has_unfinished():
        engine.step()
        again, once = describe(view.copy()), snapshot(engine.scheduler)
        preempted += sum(r["preemptions"] for r in again["requests"])
        assert again | {"time_s": 0} == once | {"time_s": 0}
    assert preempted or mode != "native"


def test_what_is_copied_travels_between_processes():
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    engine = open_engine("naive")
    run(engine)
    copied = PoolView(engine.scheduler).copy()
    arrived = MsgpackDecoder().decode(MsgpackEncoder().encode(copied))
    assert describe(arrived) == describe(copied)


def test_ids_are_shortened():
    engine = open_engine()
    for i in range(2):
        engine.add(f"cmpl-{i}{'f' * 31}-0-{i}2345678", range(30), 5)
    engine.step()
    shown = [r["id"] for r in snapshot(engine.scheduler)["requests"]]
    assert shown == ["cmpl-0fffffff…5678", "cmpl-1fffffff…5678"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["native", "vtoken"])
def test_a_look_takes_less_than_a_millisecond_of_the_scheduler(mode):
    engine = open_engine(mode, num_blocks=50_000, kv_budget_tokens=None, policy="streaming-llm",
                         eviction_ratio=0.5)  # fmt: skip
    for i in range(200):
        engine.add(f"r{i}", [1 + i % 50] * 1500, 400)
    view, looks = PoolView(engine.scheduler), []
    for _ in range(60):
        engine.step()
        start = time.process_time()
        view.copy()
        looks.append(time.process_time() - start)
    assert len(engine.scheduler.running) > 100
    assert min(looks) < 1e-3, looks


def test_shared_blocks_count_once():
    engine = open_engine(caching=True, kv_budget_tokens=200)
    engine.add("a", range(64), 60)
    for _ in range(3):
        engine.step()
    engine.add("b", range(64), 60)
    for _ in range(3):
        engine.step()
    state = snapshot(engine.scheduler)
    assert sum(r["blocks"] for r in state["requests"]) > state["blocks"]["owned"]
    found = sums(state)
    assert found["live"] + found["dead"] + found["tail"] == state["blocks"]["owned"] * N


def test_large_pools_are_merged_into_fewer_cells(monkeypatch):
    engine = open_engine()
    run(engine)
    fine = snapshot(engine.scheduler)
    monkeypatch.setattr(module, "MAX_CELLS", 13)
    coarse = snapshot(engine.scheduler)
    assert coarse["blocks_per_cell"] == 5
    assert len(coarse["cells"]) == 12
    assert sums(coarse) == sums(fine)


def test_a_request_with_a_budget_of_its_own():
    engine = open_engine(num_blocks=80)
    for name, options in (
        ("server's", {}), ("tight", {"vtoken_kv_budget_tokens": 32}),
        ("all", {"vtoken_enabled": False}), ("bad", {"vtoken_policy": "h2o"}),
    ):  # fmt: skip
        seed = np.random.default_rng(len(name)).integers(0, 99, 40)
        engine.add(name, seed, 100)
        engine.scheduler.requests[name].sampling_params.extra_args = options
    for _ in range(90):
        engine.step()
    live = {r["id"]: r["live"] for r in snapshot(engine.scheduler)["requests"]}
    assert live["all"] > 48 + N >= live["server's"] > 32 + N >= live["tight"]
    # The front end refuses it; one that got past must not end the engine for everybody.
    assert live["bad"] <= 48 + N
    assert engine.check_invariants() == []


def test_the_sampled_check_is_quiet_on_a_sound_engine(monkeypatch):
    monkeypatch.setattr("vtoken.server.stats.CHECK_EVERY_STEPS", 3)
    engine = open_engine("naive")
    source = StatsSource(engine.hooks)
    engine.add("a", range(40), 120)
    for _ in range(100):
        engine.step()
        source.take()
    assert source._next_check_step > 90
    assert source.num_violations == 0
    engine.hooks.requests.by_id["a"].table.num_live_tokens += 1
    for _ in range(6):
        engine.hooks.clock.seq += 1
        source.take()
    assert source.num_violations > 0

"""Figures from a scheduler to /metrics: nothing lost, nothing counted twice."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from vtoken.core.counters import Counters
from vtoken.scheduling.clock import StepClock
from vtoken.server import stats
from vtoken.server.stats import KEY_PREFIX, StatsSource, split


class FakePool:
    num_gpu_blocks = 11

    def get_num_free_blocks(self) -> int:
        return 10


def make_source(running=()) -> StatsSource:
    step = SimpleNamespace(
        counters=Counters(),
        clock=StepClock(),
        requests=SimpleNamespace(by_id={}),
        pool=FakePool(),
        scheduler=SimpleNamespace(running=list(running)),
        manager=SimpleNamespace(req_to_blocks={}),
    )
    return StatsSource(step)


def test_split_leaves_vllms_own_keys():
    both = {"waiting_to_start": 2, KEY_PREFIX + "moved_tokens": 5}
    assert split(both) == {"moved_tokens": 5}
    assert both == {"waiting_to_start": 2}


def test_growth_adds_up_over_front_ends():
    """Two front ends that get the messages in turn know together what one would know."""
    source, seen = make_source(), (Counter(), Counter())
    for step in range(1, 20):
        source.step.counters.evicted_tokens += step
        source.step.counters.released_blocks += step % 3
        seen[step % 2].update(split(source.take()))
    both = seen[0] + seen[1]
    assert both["evicted_tokens"] == source.step.counters.evicted_tokens == 190
    assert both["released_blocks"] == source.step.counters.released_blocks


def test_everything_that_travels_is_a_whole_number():
    source = make_source()
    source.step.counters.plan_s, source.relocation_ns = 0.0012, 800
    figures = source.take()
    assert all(type(v) is int for v in figures.values())
    assert figures[KEY_PREFIX + "plan_ns"] == pytest.approx(1_200_000, abs=1)
    assert figures[KEY_PREFIX + "relocation_ns"] == 800
    assert KEY_PREFIX + "plan_ns" not in source.take()
    assert source.relocation_ns == 0


def test_the_last_message_of_a_busy_time_is_exact(monkeypatch):
    """Gauges are thinned out while requests run, and never once none does."""
    now = [100.0]
    monkeypatch.setattr(stats.time, "monotonic", lambda: now[0])
    request = SimpleNamespace(request_id="a", num_computed_tokens=7)
    table = SimpleNamespace(num_evicted_tokens=3, holes=[1, 2])
    source = make_source([request])
    source.step.requests.by_id["a"] = SimpleNamespace(table=table)
    first = split(source.take())
    assert (first["live_tokens"], first["dead_tokens"], first["running_requests"]) == (4, 2, 1)
    request.num_computed_tokens = 9
    assert "live_tokens" not in source.take()
    source.step.scheduler.running.clear()
    assert split(source.take())["live_tokens"] == 0


def test_sampled_check_counts_what_it_finds():
    source = make_source()
    source.step.manager.req_to_blocks = {"gone": [SimpleNamespace(block_id=4)]}
    source.step.clock.seq = stats.CHECK_EVERY_STEPS - 1
    assert "invariant_violations" not in split(source.take())
    source.step.clock.seq += 1
    assert split(source.take())["invariant_violations"] == 1  # 10 free + 1 owned + 1 null of 11

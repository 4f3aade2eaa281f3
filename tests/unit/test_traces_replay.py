"""Traces on the real scheduler in modelled time."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("vllm")

from vtoken.config import VTokenConfig
from vtoken.errors import ConfigError
from vtoken.experiments.planning.cost_model import CostProfile
from vtoken.experiments.planning.devices import get_device, plan_memory
from vtoken.experiments.planning.model_shapes import get_model_shape
from vtoken.experiments.planning.modelled_clock import StepCost
from vtoken.experiments.planning.replicas import Replica
from vtoken.experiments.planning.series import Series
from vtoken.experiments.planning.trace_replay import Slo, TraceSetup, replay_trace, trace_sentence
from vtoken.workloads.request import WorkloadRequest

NATIVE, NAIVE, VTOKEN = (
    Series("native", ""), Series("naive", "random"), Series("vtoken", "random"),
)  # fmt: skip


def setup(num_kv_blocks=60, **changes):
    model, device = get_model_shape("Llama-3.1-8B"), get_device("h100-80g")
    return TraceSetup(
        plan=plan_memory(device, model, num_kv_blocks=num_kv_blocks),
        cost=StepCost(profile=CostProfile.from_device(device), model=model),
        config=VTokenConfig(policy="random", eviction_ratio=0.5),
        **changes,
    )


def trace(num=12, every_s=0.05, prompt=100, output=120, **fields):
    return [
        WorkloadRequest(
            request_id=f"t{i}", prompt_len=prompt + i % 5, output_len=output + 7 * (i % 3),
            arrival_s=every_s * i, dataset="made-up", **fields,
        )
        for i in range(num)
    ]  # fmt: skip


@pytest.mark.parametrize("line", [NATIVE, NAIVE, VTOKEN], ids=str)
def test_stretches_do_not_change_a_replay(line, monkeypatch):
    requests = trace()
    fast = replay_trace(setup(), line, requests).row()
    made = Replica.__post_init__

    def plain(self):
        self.settings = replace(self.settings, fast_forward=False)
        made(self)

    monkeypatch.setattr(Replica, "__post_init__", plain)
    slow = replay_trace(setup(), line, requests).row()
    assert slow.pop("num_steps") == fast.pop("num_steps")
    for key, value in slow.items():
        assert fast[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value)


def test_reclaiming_ends_preemptions_and_the_trace_is_done_earlier():
    # All at once. vLLM lets in whose prompt fits, and has to preempt as they grow.
    rows = [replay_trace(setup(), line, trace(every_s=0.0)).row() for line in (NATIVE, VTOKEN)]
    native, vtoken = rows
    assert native["vtoken_preemptions"] > 0 == vtoken["vtoken_preemptions"]
    assert native["vtoken_evicted_tokens"] == 0 < vtoken["vtoken_evicted_tokens"]
    assert vtoken["duration"] < native["duration"]
    assert native["completed"] == vtoken["completed"] == 12
    assert all(row["modelled"] and row["vtoken_peak_blocks"] <= 60 for row in rows)
    said = trace_sentence(rows, setup().plan)
    assert "times are modelled" in said
    assert said.count("tokens dropped") == 1, "native drops none, so nothing is said of it"
    assert f"{vtoken['vtoken_evicted_tokens']:,} tokens dropped" in said


def test_times_are_in_order_and_idle_time_is_not_skipped():
    replay = replay_trace(setup(), NATIVE, trace(num=3, every_s=50.0))
    for outcome in replay.outcomes:
        assert outcome.arrival_s <= outcome.admitted_s < outcome.first_token_s < outcome.finished_s
        assert outcome.queue_s == 0.0 and outcome.e2el_s < 5.0
    assert replay.row()["duration"] > 100.0
    assert replay.row()["peak_residents"] == 1


def test_equal_prefix_hashes_hit_and_unequal_ones_do_not():
    shared = trace(num=3, every_s=10.0, prefix_hash_ids=(5, 6), prefix_block_tokens=64)
    replay = replay_trace(setup(), NATIVE, shared)
    hits = [outcome.cached_tokens for outcome in replay.outcomes]
    assert hits[0] == 0 and hits[1] >= 96 and hits[2] >= 96
    own = [replace(r, prefix_hash_ids=(2 * i, 2 * i + 1)) for i, r in enumerate(shared)]
    assert replay_trace(setup(), NATIVE, own).row()["prefix_hit_frac"] == 0.0
    half = [replace(r, prefix_hash_ids=(5, 10 + i)) for i, r in enumerate(shared)]
    assert [o.cached_tokens for o in replay_trace(setup(), NATIVE, half).outcomes] == [0, 64, 64]


def test_a_request_that_never_fits_is_rejected_by_its_mode_alone():
    requests = trace(num=2, output=1000)  # 70 blocks in full, about 36 packed
    assert replay_trace(setup(), NATIVE, requests).row()["rejected"] == 2
    row = replay_trace(setup(), VTOKEN, requests).row()
    assert row["rejected"] == 0 and row["completed"] == 2


def test_unsorted_and_negative_arrivals_are_refused():
    requests = trace(num=3)
    with pytest.raises(ConfigError, match="sorted"):
        replay_trace(setup(), NATIVE, requests[::-1])
    with pytest.raises(ConfigError, match="from 0"):
        replay_trace(setup(), NATIVE, [replace(requests[0], arrival_s=-1.0)])
    with pytest.raises(ConfigError, match="at least one"):
        replay_trace(setup(), NATIVE, [])


def test_an_slo_counts_rejected_requests_as_failed():
    replay = replay_trace(setup(), NATIVE, [*trace(num=3), *trace(num=1, output=5000)[:1]][:3])
    assert replay.met_share(Slo(ttft_s=5.0, tpot_s=1.0)) == 1.0
    assert replay.met_share(Slo(ttft_s=1e-6, tpot_s=None)) == 0.0
    rejected = replay_trace(setup(), NATIVE, trace(num=2, output=1000))
    assert rejected.met_share(Slo()) == 0.0
    with pytest.raises(ConfigError):
        Slo(share=1.5)

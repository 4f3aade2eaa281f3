"""Fleets: routers, the smallest fleet for an SLO, and the approximate model."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from test_traces_replay import NAIVE, NATIVE, VTOKEN, setup, trace

from vtoken.errors import ConfigError
from vtoken.experiments.planning.fleet import (
    PrefixAware,
    calibrate,
    fleet_sentence,
    make_router,
    replay_fleet,
    size_fleet,
)
from vtoken.experiments.planning.trace_replay import Slo


def submitted(replay):
    return [list(replica.outcomes) for replica in replay.replicas]


def test_round_robin_takes_turns():
    replay = replay_fleet(setup(), NATIVE, trace(num=6), replicas=3)
    assert submitted(replay) == [["t0", "t3"], ["t1", "t4"], ["t2", "t5"]]
    assert replay.row()["completed"] == 6


def test_least_loaded_avoids_the_busy_one():
    requests = trace(num=4, every_s=0.01)
    long = trace(num=1, output=700)[0]
    replay = replay_fleet(setup(), NATIVE, [long, *requests[1:]], replicas=2, router="least-loaded")
    assert submitted(replay)[0] == ["t0"], "the long one alone outweighs the others"


def test_prefix_router_follows_the_cache_until_it_is_overloaded():
    shared = trace(num=4, every_s=20.0, prefix_hash_ids=(1, 2), prefix_block_tokens=64)
    replay = replay_fleet(setup(), NATIVE, shared, replicas=3, router="prefix")
    assert sorted(map(len, submitted(replay))) == [0, 0, 4]
    spread = replay_fleet(setup(), NATIVE, shared, replicas=3)
    assert replay.row()["prefix_hit_frac"] > spread.row()["prefix_hit_frac"]

    class Loaded:
        def __init__(self, tokens):
            self.load = (tokens, 1)

    router = PrefixAware()
    fleet = [Loaded(0), Loaded(0)]
    assert router.choose(shared[0], 0, fleet) == 0
    fleet[0].load = (10**6, 9)
    assert router.choose(shared[1], 1, fleet) == 1


def test_vtoken_needs_fewer_gpus_for_the_same_slo():
    # 27 blocks in full, 16 at a packed peak: 2 or 3 of them fit 60 blocks without a preemption.
    # A step takes 6.9 ms; whoever is preempted is above 8 ms a token.
    requests = trace(num=12, every_s=0.0, prompt=20, output=390)
    slo = Slo(ttft_s=0.5, tpot_s=0.0076, share=1.0)
    needs = [size_fleet(setup(), line, requests, slo) for line in (NATIVE, VTOKEN)]
    native, vtoken = needs
    assert (native.replicas, vtoken.replicas) == (6, 4)
    assert vtoken.met_share == native.met_share == 1.0 and native.gpus == 6
    fewer = replay_fleet(setup(), NATIVE, requests, replicas=native.replicas - 1)
    assert fewer.met_share(slo) < 1.0, "one less was enough"
    assert "native 6" in fleet_sentence(needs, slo, setup())


def test_an_slo_out_of_reach_says_so():
    need = size_fleet(setup(), NATIVE, trace(num=3), Slo(ttft_s=1e-6), max_replicas=2)
    assert need.replicas is None and need.gpus is None and need.tried == 2


@pytest.mark.parametrize("line", [NATIVE, NAIVE, VTOKEN], ids=str)
@pytest.mark.parametrize("every_s", [0.05, 0.3])
def test_approximation_is_within_3_percent_of_the_real_scheduler(line, every_s):
    requests = trace(num=60, every_s=every_s)
    roomy = setup(num_kv_blocks=150)
    calibration = calibrate(roomy, line, requests[:30])
    real = replay_fleet(roomy, line, requests, replicas=2).row()
    model = replay_fleet(roomy, line, requests, replicas=2, calibration=calibration).row()
    assert model["approximate"] and "approximate" not in real
    for key in ("output_throughput", "mean_e2el_ms", "mean_tpot_ms"):
        assert model[key] == pytest.approx(real[key], rel=0.03), key


def test_what_cannot_be_done_is_refused():
    with pytest.raises(ConfigError, match="least-loaded"):
        make_router("least-load")
    with pytest.raises(ConfigError, match="--replicas"):
        replay_fleet(setup(), NATIVE, trace(num=2), replicas=0)
    with pytest.raises(ConfigError, match="prefix"):
        calibrate(setup(), NATIVE, trace(num=2, prefix_hash_ids=(1, 2), prefix_block_tokens=64))

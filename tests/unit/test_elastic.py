"""The elastic suite: both sides get the same memory, pairs their interval, rows what was compared."""

from __future__ import annotations

import pytest

from vtoken.experiments.bench.bench_options import BenchSettings
from vtoken.experiments.bench.measure import Record
from vtoken.experiments.bench.named_workloads import Workload
from vtoken.experiments.bench.pairing import Comparison
from vtoken.experiments.bench.suites import elastic


def comparison(concurrency: int, max_tokens: int = 512) -> Comparison:
    workload = Workload(name="text", make=lambda num, repeat: [], max_tokens=max_tokens)
    return Comparison(
        suite="elastic", workload=workload, pool=elastic.stock_pool(concurrency, max_tokens),
        cases=elastic._cases("h2o"), num_requests=concurrency,
    )  # fmt: skip


@pytest.mark.parametrize("concurrency", [1, 4, 6, 12])
def test_native_holds_the_concurrency_but_not_twice_that(concurrency):
    run = comparison(concurrency)
    pools = [run.pool_of(case) for case in run.cases]
    assert [pool.block_size for pool in pools] == [32, 16]
    slots = {pool.num_kv_blocks * pool.block_size for pool in pools}
    assert len(slots) == 1, "one side has more memory than the other"
    assert concurrency * 512 <= slots.pop() < 2 * concurrency * 512


def test_the_concurrency_given_is_the_one_that_native_holds():
    assert elastic.concurrencies(BenchSettings()) == (6, 12)
    assert elastic.concurrencies(BenchSettings(concurrency="4")) == (4, 8)


def record(throughput: float, tokens: list[int] | None) -> Record:
    values = {"output_throughput": throughput, "vtoken_evicted_tokens": 3}
    return Record(values=values, outputs={} if tokens is None else {"r": tokens})


def test_rows_have_the_ratio_of_pairs_and_how_many_had_the_same_tokens():
    native = [record(10, [1]), record(20, [2]), record(10, None)]
    vtoken = [record(11, [1]), record(24, [3]), record(12, [4])]
    stock, ours = elastic._rows(comparison(6), native, vtoken)
    assert (stock["mode"], ours["mode"], ours["evict_when"]) == ("native", "vtoken", "pressure")
    assert ours["throughput_over_native"] == pytest.approx(1.2)
    assert 1.1 <= ours["ci95_low"] <= 1.2 == pytest.approx(ours["ci95_high"])
    assert (ours["pairs"], ours["identical_pairs"]) == (2, 1)
    (sentence,) = elastic.sentences([stock, ours])
    assert "6 requests at once: 1.200 of native's" in sentence and "1 of 2 pairs" in sentence
    assert elastic._rows(comparison(6), native, [])[0]["mode"] == "native"

"""Ctrl-C at any run, and `--resume`: what was measured is not measured again, on made-up engines."""

from __future__ import annotations

import json
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from vtoken.engine import EngineSettings
from vtoken.errors import ConfigError
from vtoken.experiments.bench import pairing
from vtoken.experiments.bench.bench_options import BenchSettings
from vtoken.experiments.bench.context import Context
from vtoken.experiments.bench.journal import FILE_NAME, Journal
from vtoken.experiments.bench.measure import Record
from vtoken.experiments.bench.named_workloads import Workload
from vtoken.experiments.bench.open_engines import Pool
from vtoken.experiments.bench.pairing import Comparison
from vtoken.experiments.bench.run import BenchResult, run_bench
from vtoken.experiments.bench.suites import peers, quality
from vtoken.workloads import WorkloadRequest

SETTINGS = {
    "sla": {
        "workloads": ("random:32+8",), "concurrency": "1,2,4", "ref_concurrency": 2,
        "pool_fracs": (1.0,), "repeats": 2,
    },
    "sensitivity": {
        "workloads": ("random:32+8",), "block_sizes": (16, 32), "ratios": (0.3,),
        "thresholds": (0.0, 0.5), "repeats": 2,
    },
    "quality": {"workloads": ("needle",), "num_requests": 2, "ratios": (0.3, 0.7)},
}  # fmt: skip
NUM_RUNS = {
    "sla": 13,  # the demand, naive's two for the limit, eight more of the grid, two confirmations
    "sensitivity": 8,  # the default and three others, twice
    "quality": 3,  # full KV and two budgets
}


class FakeEngine:
    """Has blocks and a config, and cannot run anything."""

    def __init__(self, settings, config) -> None:
        self.block_size, self.config = settings.block_size, config

    def reconfigure(self, config) -> None:
        self.config = config

    def reset_prefix_cache(self) -> None:
        pass

    def close(self) -> None:
        pass


class FakeRuns:
    """Stands in for `measure`: numbers that follow from the case, the load and the prompts.

    Attributes:
        num: runs so far; stop_at: the run that Ctrl-C ends, from 1.
    """

    def __init__(self) -> None:
        self.num, self.stop_at = 0, 0

    def measure(self, engine, requests, *, max_concurrency=None, **_) -> Record:
        self.num += 1
        if self.num == self.stop_at:
            raise KeyboardInterrupt
        config = engine.config
        ratio = config.effective_ratio if config.evicts else 0.0
        at_once = max_concurrency or len(requests)
        speed = {"native": 1.0, "naive": 0.8, "vtoken": 1.2}[config.mode]
        speed += 0.1 * ratio + 0.001 * engine.block_size + 0.01 * config.fragmentation_threshold
        speed += 1e-7 * sum(sum(r.prompt_token_ids) for r in requests) / at_once
        values = {
            "output_throughput": 100 * speed * at_once / (at_once + 1),
            "p95_e2el_ms": 1000 * (at_once + 1) / speed,
            "vtoken_retained_blocks_per_request": 3 / speed,
            "vtoken_peak_blocks": 4 * at_once,
            "vtoken_preemptions": 0,
        }
        outputs = {r.request_id: [100 + int(10 * ratio)] * 3 for r in requests}
        return Record(values=values, outputs=outputs)


@lru_cache
def tokenizer(path: str):
    """A model's tokenizer, read once: that takes longer than all else here."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


@pytest.fixture
def runs(monkeypatch) -> FakeRuns:
    fake = FakeRuns()
    monkeypatch.setattr(Context, "tokenizer", lambda context: tokenizer(context.model_path))
    monkeypatch.setattr(pairing, "measure", fake.measure)
    monkeypatch.setattr(quality, "measure", fake.measure)
    monkeypatch.setattr(pairing.PairRunner, "_warm_up", lambda *args: None)
    return fake


def settings(suite: str, **changes) -> BenchSettings:
    if suite == "quality":
        pytest.importorskip("rouge_score", reason="rouge-score is not installed")
    engine = EngineSettings(model="tiny-llama", block_size=16)
    fields = {"suites": (suite,), "engine": engine, "policies": ("random",)}
    return BenchSettings(**{**fields, **SETTINGS[suite], **changes})


def bench(runs: FakeRuns, given: BenchSettings, folder=None, resume=None, stop_at=0):
    """(result, number of runs that were measured)."""
    runs.num, runs.stop_at = 0, stop_at
    make_context = partial(Context, open_real=FakeEngine)
    result = run_bench(given, folder=folder, resume=resume, make_context=make_context)
    return result, runs.num


def rows(result: BenchResult, suite: str) -> list[dict]:
    return result.suites[suite].rows


def kept(folder: Path) -> list[str]:
    """Keys in a folder's journal."""
    lines = (folder / FILE_NAME).read_text().splitlines()
    return [json.loads(line)["key"] for line in lines[1:]]


@pytest.mark.parametrize("suite", SETTINGS)
def test_wherever_it_was_interrupted_the_rest_is_run_and_no_more(suite, runs, tmp_path) -> None:
    given = settings(suite)
    whole, total = bench(runs, given, tmp_path / "whole")
    assert total == NUM_RUNS[suite] == len(kept(tmp_path / "whole")) and not whole.interrupted
    for stop_at in range(1, total + 1):
        first, second = tmp_path / f"first{stop_at}", tmp_path / f"second{stop_at}"
        cut, _ = bench(runs, given, first, stop_at=stop_at)
        assert cut.interrupted and kept(first) == kept(tmp_path / "whole")[: stop_at - 1]
        result, num = bench(runs, given, second, resume=first)
        assert (result.num_resumed, num) == (stop_at - 1, total - (stop_at - 1))
        assert not result.interrupted and kept(second) == kept(tmp_path / "whole")
        assert rows(result, suite) == rows(whole, suite)
        assert result.suites[suite].notes == whole.suites[suite].notes


@pytest.mark.parametrize("suite", SETTINGS)
def test_a_resumption_can_itself_be_interrupted_in_the_same_folder(suite, runs, tmp_path) -> None:
    given = settings(suite)
    bench(runs, given, tmp_path, stop_at=2)
    bench(runs, given, tmp_path, resume=tmp_path, stop_at=2)
    result, num = bench(runs, given, tmp_path, resume=tmp_path)
    assert (result.num_resumed, num) == (2, NUM_RUNS[suite] - 2)
    assert rows(result, suite) == rows(bench(runs, given)[0], suite)


def test_points_that_were_measured_are_rows_after_ctrl_c(runs) -> None:
    sla = rows(bench(runs, settings("sla"), stop_at=6)[0], "sla")
    # The demand, naive at 2 twice, native and naive at 1; vtoken at 1 was interrupted.
    assert {(r["mode"], r["concurrency"]): r["repeats"] for r in sla} == {
        ("native", 1): 1, ("naive", 1): 1, ("naive", 2): 2,
    }  # fmt: skip
    sensitivity = rows(bench(runs, settings("sensitivity"), stop_at=6)[0], "sensitivity")
    by_value = {(r["factor"], r["value"]): r["repeats"] for r in sensitivity}
    assert by_value == {
        ("block_size", 16): 2, ("block_size", 32): 1, ("eviction_ratio", 0.3): 1,
        ("eviction_ratio", 0.5): 2, ("fragmentation_threshold", 0.0): 2,
        ("fragmentation_threshold", 0.5): 1,
    }  # fmt: skip


def test_answers_given_before_ctrl_c_are_judged(runs) -> None:
    cut = bench(runs, settings("quality"), stop_at=3)[0]
    full, most = rows(cut, "quality")
    assert (full["mode"], full["budget_frac"], most["budget_frac"]) == ("native", 1.0, 0.7)
    # Nobody answers here, and within 2 points of that is every budget.
    assert most["safe_budget_frac"] == 0.7
    alone = bench(runs, settings("quality"), stop_at=2)[0]
    assert len(rows(alone, "quality")) == 1


@pytest.mark.parametrize(
    ("suite", "changes", "says"),
    [
        ("sla", {"sla_factor": 1.2}, "sla_factor was 1.05, is 1.2"),
        ("sla", {"concurrency": "1,2"}, "concurrency was '1,2,4', is '1,2'"),
        ("sensitivity", {"thresholds": (0.0, 0.3)}, r"thresholds was \[0.0, 0.5\]"),
        ("sensitivity", {"policies": ("h2o",)}, r"policies was \['random'\], is \['h2o'\]"),
        ("quality", {"num_requests": 3}, "num_requests was 2, is 3"),
        ("quality", {"workloads": ("lines",)}, r"workloads was \['needle'\], is \['lines'\]"),
    ],
)
def test_other_settings_are_refused_before_anything_runs(
    suite, changes, says, runs, tmp_path
) -> None:
    bench(runs, settings(suite), tmp_path / "first", stop_at=3)
    before = (tmp_path / "first" / FILE_NAME).read_text()
    with pytest.raises(ConfigError, match=says):
        bench(runs, settings(suite, **changes), tmp_path / "second", resume=tmp_path / "first")
    assert runs.num == 0 and not (tmp_path / "second").exists()
    assert (tmp_path / "first" / FILE_NAME).read_text() == before


@pytest.mark.parametrize("suite", SETTINGS)
def test_more_repeats_add_to_those_there_are(suite, runs, tmp_path) -> None:
    bench(runs, settings(suite), tmp_path / "first")
    more = settings(suite, repeats=3)
    result, num = bench(runs, more, tmp_path / "second", resume=tmp_path / "first")
    first, second = kept(tmp_path / "first"), kept(tmp_path / "second")
    assert second[: len(first)] == first and num == len(second) - len(first)
    assert len(set(second)) == len(second)
    assert (num > 0) == (suite != "quality")  # which asks every question once
    assert rows(result, suite) == rows(bench(runs, more)[0], suite)


def test_a_suite_that_was_not_run_starts_anew(runs, tmp_path) -> None:
    pytest.importorskip("rouge_score", reason="rouge-score is not installed")
    bench(runs, settings("sensitivity"), tmp_path / "first")
    both = settings("sensitivity", suites=("sensitivity", "quality"))
    result, num = bench(runs, both, tmp_path / "second", resume=tmp_path / "first")
    assert result.num_resumed == NUM_RUNS["sensitivity"]
    new = kept(tmp_path / "second")[result.num_resumed :]
    assert num == len(new) > 0 and {key.split("|")[0] for key in new} == {"quality"}
    assert len(rows(result, "quality")) == num


# ---- peers ---------------------------------------------------------------------------------


class FakePeer:
    """Counts its runs."""

    def __init__(self, version: str) -> None:
        self.about, self.num = {"version": version}, 0

    def run(self, requests, concurrency: int) -> dict:
        self.num += 1
        return {"values": {"concurrency": concurrency}}


def test_a_peer_of_another_version_or_with_other_settings_is_measured_anew(monkeypatch) -> None:
    monkeypatch.setattr(peers, "_metrics", lambda *args: {})
    request = WorkloadRequest(
        request_id="a", prompt_len=4, output_len=5, prompt_token_ids=[1, 2, 3, 4]
    )
    turn = Comparison(
        suite="peers", workload=Workload(name="w", make=lambda n, r: [request] * n, max_tokens=9),
        pool=Pool(num_kv_blocks=9, block_size=16), cases=[], num_requests=1, repeats=1,
    )  # fmt: skip
    runner = SimpleNamespace(note_done=lambda num, text: None)
    journal = Journal({})

    def ask(peer: FakePeer, **args) -> Record:
        given = SimpleNamespace(goodput_ms={}, peer_args={"openvino": args})
        context = SimpleNamespace(journal=journal, settings=given)
        return peers._peer_run(context, runner, turn, "openvino", peer)

    old, again, new = FakePeer("1.0"), FakePeer("1.0"), FakePeer("2.0")
    record = ask(old)
    assert ask(again) is record and (old.num, again.num) == (1, 0)
    ask(new)
    ask(again, threads=2)
    assert (new.num, again.num) == (1, 1)

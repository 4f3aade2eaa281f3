"""Recorded decisions and scores through vLLM's real scheduler, with made-up scores."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from one_engine import live_sets, traces

from vtoken.config import VTokenConfig
from vtoken.core.messages import plan_of_layouts
from vtoken.engine.dry import DryEngine, DrySettings
from vtoken.errors import ConfigError
from vtoken.policies.base import ScoreKind
from vtoken.policies.registry import BUILT_IN
from vtoken.recording.run_log import RunLog
from vtoken.recording.score_files import ScoreTrace

pytestmark = pytest.mark.vllm


def made_up(req_id, step_seq, ids):
    """Scores that depend on the id and on how long the request is."""
    mixed = (ids.astype(np.int64) * 7919 + int(ids.max()) * 31) % 1009
    return np.where(ids >= 0, mixed, 0).astype(np.float32)


def dry(config, *, chunk=64, score_source=made_up, worker=None, **settings):
    return DryEngine(
        DrySettings(**{
            "num_kv_blocks": 300, "max_model_len": 512, "max_num_seqs": 8,
            "max_num_batched_tokens": chunk, **settings,
        }),
        config, score_source=score_source, worker=worker,
    )  # fmt: skip


def prompts(count=4, length=100):
    return {f"r{i}": list(range(20 + i, 20 + i + length + 13 * i)) for i in range(count)}


def run(engine, requests, output=50):
    for name, prompt in requests.items():
        engine.add(name, prompt, output)
    while engine.has_unfinished():
        engine.step()
    assert engine.check_idle() == []
    if engine.hooks.log is not None:
        assert len(engine.hooks.log.keys) == 0
    return {name: live_sets(entries) for name, entries in traces(engine).items()}


def entries_of(path):
    """Decision lines of a file, header left out, in an order that does not matter."""
    return sorted(line for line in Path(path).read_text().splitlines() if '"ids"' in line)


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "decisions.jsonl")


@pytest.mark.parametrize("threshold", [0.0, 0.3])
@pytest.mark.parametrize("policy", list(BUILT_IN))
def test_replay_holds_the_same_ids_at_every_length(policy, threshold, path):
    """Recorded in naive with long chunks, replayed in vtoken with short ones."""
    common = {"policy": policy, "eviction_ratio": 0.5, "trace": True}
    recorded = run(
        dry(VTokenConfig(mode="naive", record_decisions=path, **common), chunk=96), prompts()
    )
    again = VTokenConfig(replay_decisions=path, fragmentation_threshold=threshold, **common)
    engine = dry(again, chunk=40)
    assert run(engine, prompts()) == recorded
    assert engine.counters.evicted_tokens > 200 and engine.counters.moved_tokens > 0


def test_without_replay_other_chunks_lead_to_other_decisions(path):
    """What the test above would not see if replay did nothing."""
    common = {"policy": "h2o", "eviction_ratio": 0.5, "trace": True}
    first = run(dry(VTokenConfig(mode="naive", **common), chunk=96), prompts())
    assert run(dry(VTokenConfig(**common), chunk=40), prompts()) != first


def test_equal_prompts_are_told_apart_by_their_order(path):
    requests = {f"r{i}": list(range(50, 150)) for i in range(3)}
    common = {"policy": "random", "eviction_ratio": 0.5, "trace": True}
    config = VTokenConfig(record_decisions=path, **common)
    recorded = run(dry(config), requests)
    nth = {json.loads(x)["nth"] for x in entries_of(path)}
    assert nth == {0, 1, 2}
    assert run(dry(VTokenConfig(replay_decisions=path, **common), chunk=24), requests) == recorded


def test_a_preempted_request_is_replayed_from_its_start(path):
    """Recorded with room for all, replayed where requests are preempted and computed anew."""
    common = {"policy": "h2o", "eviction_ratio": 0.2, "trace": True}
    config = VTokenConfig(mode="naive", record_decisions=path, **common)
    recorded = run(dry(config), prompts())
    engine = dry(VTokenConfig(mode="naive", replay_decisions=path, **common), num_kv_blocks=24)
    run(engine, prompts())
    assert engine.counters.preemptions > 0
    for name, entries in traces(engine).items():
        for life in {e.num_preemptions for e in entries}:
            part = live_sets([e for e in entries if e.num_preemptions == life])
            assert part == {t: recorded[name][t] for t in part}


def test_preemptions_while_recording_are_written_down(path):
    common = {"policy": "h2o", "eviction_ratio": 0.2, "trace": True}
    config = VTokenConfig(mode="naive", record_decisions=path, **common)
    engine = dry(config, num_kv_blocks=24)
    run(engine, prompts())
    ends = [json.loads(x) for x in Path(path).read_text().splitlines() if '"end"' in x]
    preempted = [x for x in ends if x["end"] == "preempted"]
    assert len(preempted) == engine.counters.preemptions > 0
    assert sum(x["end"] == "finished" for x in ends) == 4
    with pytest.raises(ConfigError, match="record with a pool that holds all requests"):
        run(dry(VTokenConfig(replay_decisions=path, **common)), prompts())


def test_past_the_recorded_end_the_policy_goes_on(path):
    common = {"policy": "h2o", "kv_budget_tokens": 60, "trace": True}
    run(dry(VTokenConfig(record_decisions=path, **common)), prompts(1), output=20)
    engine = dry(VTokenConfig(replay_decisions=path, **common))
    sets = run(engine, prompts(1), output=150)["r0"]
    assert max(len(sets[t]) for t in range(140, 248)) <= 60 + 16 + 2


def test_an_unknown_request_is_refused_on_arrival(path):
    common = {"policy": "random", "eviction_ratio": 0.5}
    run(dry(VTokenConfig(record_decisions=path, **common)), prompts(1))
    engine = dry(VTokenConfig(replay_decisions=path, **common))
    with pytest.raises(ConfigError, match="no such request was recorded"):
        engine.add("x", [1, 2, 3], 5)


def test_a_prefix_hit_over_a_recorded_length_does_not_fit(path):
    """Ids died at 48 when recorded; a hit of 96 tokens comes too late for that."""
    common = {"policy": "streaming-llm", "kv_budget_tokens": 30}
    run(dry(VTokenConfig(record_decisions=path, **common), chunk=48), prompts(1))
    engine = dry(VTokenConfig(replay_decisions=path, **common), chunk=48)
    log, prompt = engine.hooks.log, prompts(1)["r0"]
    request = SimpleNamespace(
        request_id="r0", prompt_token_ids=prompt, num_preemptions=0, num_computed_tokens=48
    )
    log.arrive(request)
    log.start(request)
    request.num_computed_tokens = 96
    with pytest.raises(ConfigError, match="gives 96 tokens, ids died at 48; turn prefix caching"):
        log.start(request)


def test_recorded_ids_in_a_shared_block_do_not_fit(path):
    """Recorded alone; in the replay another request holds the same prompt's blocks."""
    prompt = list(range(20, 120))
    common = {"policy": "streaming-llm", "kv_budget_tokens": 40}
    run(dry(VTokenConfig(record_decisions=path, **common), chunk=512), {"r0": prompt, "r1": prompt})
    config = VTokenConfig(replay_decisions=path, **common)
    engine = dry(config, chunk=512, enable_prefix_caching=True)
    engine.add("r0", prompt, 50)
    engine.add("r1", prompt, 50)
    engine.step()
    with pytest.raises(ConfigError, match="died at length 100, and is dead or shared in this run"):
        engine.step()


@pytest.mark.parametrize("policy", list(BUILT_IN))
@pytest.mark.parametrize("mode", ["naive", "vtoken"])
def test_sync_and_async_decide_alike(policy, mode, tmp_path):
    """With the same chunks and without preemption, decision for decision."""
    files = []
    for is_async in (False, True):
        files.append(str(tmp_path / f"{is_async}.jsonl"))
        config = VTokenConfig(
            mode=mode, policy=policy, eviction_ratio=0.5, record_decisions=files[-1]
        )
        run(dry(config, async_scheduling=is_async), prompts())
    assert entries_of(files[0]) == entries_of(files[1])
    assert len(entries_of(files[0])) >= 10


def test_a_decision_uses_the_report_of_two_steps_ago(path):
    """Scores that say in which step they were made: sync and async see the same step."""
    for is_async in (False, True):
        used: list[tuple[int, float]] = []
        engine = dry(
            VTokenConfig(policy="h2o", eviction_ratio=0.5),
            score_source=lambda req_id, step, ids: np.full(len(ids), step, np.float32),
            async_scheduling=is_async,
        )
        look_up = engine.hooks.reports.scored_ids

        def spy(req_id, step_seq, look_up=look_up, engine=engine, used=used):
            part = look_up(req_id, step_seq)
            if part is not None:
                made = part.scores[part.start : part.start + part.num_ids]
                assert made.min() == made.max()
                used.append((engine.hooks.clock.seq, float(made[0])))
            return part

        engine.hooks.reports.scored_ids = spy
        run(engine, prompts())
        assert len(used) >= 10
        assert all(made == step - 2 for step, made in used), used


def test_a_dry_run_takes_recorded_scores(tmp_path):
    """A run with scores from a trace decides as the one that recorded them."""
    scores, files = str(tmp_path / "scores.jsonl"), [str(tmp_path / f"{i}.jsonl") for i in (0, 1)]
    common = {"policy": "tova", "eviction_ratio": 0.5}
    run(dry(VTokenConfig(record_scores=scores, record_decisions=files[0], **common)), prompts())
    trace = ScoreTrace(scores, ScoreKind.LAST)
    config = VTokenConfig(record_decisions=files[1], **common)
    run(dry(config, score_source=trace), prompts())
    assert entries_of(files[0]) == entries_of(files[1]) != []
    assert trace.header["prompt_queries"] == 1


def test_a_chunk_is_cut_by_the_smallest_limit():
    engine = dry(VTokenConfig(policy="random", eviction_ratio=0.5, trace=True))
    engine.hooks.chunk_limits += [lambda r, at, n: 20, lambda r, at, n: 7 if at < 14 else n]
    run(engine, prompts(1), output=2)
    assert [e.num_new_tokens for e in engine.trace] == [7, 7, 20, 20, 20, 20, 6, 1]


def test_files_are_for_one_scheduler(tmp_path):
    config = VTokenConfig(record_decisions=str(tmp_path / "x"), policy="random")
    budget, of = config.make_budget(16), {"model": "m", "block_size": 16}
    with pytest.raises(ConfigError, match="--data-parallel-size 2"):
        RunLog.open(config, budget, num_engines=2, **of)
    assert RunLog.open(config, budget, **of) is not None
    assert RunLog.open(VTokenConfig(policy="random"), budget, num_engines=2, **of) is None
    assert RunLog.open(config, None, num_engines=2, **of) is None


class FreshBlocks:
    """Blocks whose scores the scheduler said start again, step by step, beside the hits."""

    def __init__(self) -> None:
        self.fresh: list[int] = []
        self.hits: dict[str, int] = {}

    def __call__(self, scheduler_output) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            self.hits[new.req_id] = new.num_computed_tokens
        plan = getattr(scheduler_output, "vtoken", None)
        self.fresh = [] if plan is None else plan.fresh_blocks.tolist()


def test_scores_of_prefix_hits_start_again_unless_somebody_else_holds_them():
    worker = FreshBlocks()
    config = VTokenConfig(policy="h2o", kv_budget_tokens=200)
    engine = dry(config, worker=worker, enable_prefix_caching=True, max_num_batched_tokens=256)
    prompt = list(range(30, 110))
    rows = engine.hooks.manager.req_to_blocks

    engine.add("a", prompt, 30)
    engine.step()
    assert worker.fresh == [] and worker.hits["a"] == 0
    engine.add("b", prompt, 2)
    engine.step()
    assert worker.hits["b"] == 64 and worker.fresh == [], "a is still running"
    while engine.has_unfinished():
        engine.step()
    engine.add("c", prompt, 2)
    engine.add("d", prompt, 2)
    engine.step()
    shared = [b.block_id for b in rows["c"][:4]]
    assert worker.hits["c"] == worker.hits["d"] == 64
    assert sorted(set(worker.fresh)) == sorted(shared), "both are new: nobody's scores are lost"
    while engine.has_unfinished():
        engine.step()
    assert engine.check_idle() == []


def test_a_plan_of_fresh_blocks_alone_is_sent():
    plan = plan_of_layouts(())
    assert not plan.says_something
    plan.fresh_blocks = np.array([4, 5], np.int32)
    assert plan.says_something

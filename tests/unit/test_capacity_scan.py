"""The logic of capacity scans on an engine made of a few numbers: no vLLM here."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager

import pytest
from capacity_fakes import HOST, SHAPE, FakeWorld, make_requests

from vtoken.config import VTokenConfig
from vtoken.engine import EngineSettings
from vtoken.errors import ConfigError, InvariantViolation
from vtoken.experiments.capacity.prompts import PromptSource
from vtoken.experiments.capacity.scan import CapacityScan
from vtoken.experiments.capacity.scan_options import ScanSettings
from vtoken.experiments.planning.series import Series
from vtoken.experiments.report.listener import Bar, Listener
from vtoken.modes import MODES


@pytest.fixture
def world(monkeypatch):
    world = FakeWorld()
    monkeypatch.setattr("vtoken.engine.run.time", world.clock)
    return world


P, O = 64, 192  # tokens: 8 blocks, of which vtoken's 53 % are 5


def requests_of(num: int, repeat: int):
    return make_requests(num, repeat, P, O)


def make_scan(world, *, engine=None, max_requests=1000, listener=None, **settings) -> CapacityScan:
    return CapacityScan(
        ScanSettings(engine=EngineSettings(**(engine or {})), **settings),
        open_engine=world.open_engine,
        open_dry_engine=world.open_dry_engine,
        host=HOST,
        shape=SHAPE,
        prompts=PromptSource(requests_of, max_tokens=P + O, max_requests=max_requests),
        listener=listener,
        clock=world.clock,
    )


def frontier(half) -> dict[str, int]:
    return {row["mode"]: row["max_concurrency"] for row in half.frontier}


def points(half, mode: str) -> list[int]:
    return [run.point.concurrency for run in half.runs if run.point.mode == mode]


SMALL = {"num_kv_blocks": 52, "block_size": 32}


# ---- what is found -------------------------------------------------------------------------


def test_each_mode_is_measured_at_its_frontier_and_one_above(world):
    result = make_scan(world, engine=SMALL).run()
    assert frontier(result.main) == {"native": 6, "naive": 6, "vtoken": 10}
    for mode, found in frontier(result.main).items():
        assert points(result.main, mode) == [found, found + 1]
    assert all(row["next_infeasible"] == row["max_concurrency"] + 1 for row in result.main.frontier)
    assert result.modelled is None and result.is_feasible and not result.notes


def test_a_scan_corrects_a_dry_run_that_is_wrong_and_says_so(world):
    def on_step(engine):
        if engine in world.real and engine.config.mode == "vtoken":
            engine.scheduler.keeps_frac = 0.8

    world.on_step = on_step
    result = make_scan(world, engine=SMALL).run()
    assert frontier(result.main) == {"native": 6, "naive": 6, "vtoken": 7}
    assert {7, 8} <= set(points(result.main, "vtoken"))
    assert result.notes == ["vtoken: measured 7, where the dry run of the same pool expected 10"]


def test_a_point_ends_at_its_first_preemption(world):
    result = make_scan(world, engine=SMALL, modes=("native",), concurrency="7").run()
    (run,) = result.main.runs
    assert not run.point.feasible and run.point.vtoken_preemptions == 1
    # Seven times 224 tokens are 49 blocks; with the next token each needs one more.
    assert run.num_steps == 162 and run.point.reason == "preempted at step 162 with 7 resident"
    assert run.point.output_throughput is None
    assert not result.is_feasible


def test_a_point_ends_when_its_requests_can_no_longer_all_be_resident(world):
    world.max_resident = 4
    result = make_scan(world, engine=SMALL, modes=("native",), concurrency="5").run()
    (run,) = result.main.runs
    assert run.point.reason == "at most 4 of 5 were resident at once"
    assert run.num_steps == O and run.point.vtoken_preemptions == 0


def test_rows_have_the_keys_that_scripts_rely_on(world):
    sections = make_scan(world, engine=SMALL).run().sections()
    assert sections["pool"] == {"usable_blocks": 52, "block_size": 32}
    assert {"mode", "policy", "max_concurrency"} <= set(sections["frontier"][0])
    for point in (p.row() for p in sections["points"]):
        assert {
            "mode", "policy", "concurrency", "feasible", "reason", "output_throughput",
            "vtoken_preemptions", "vtoken_evicted_tokens", "vtoken_moved_tokens",
            "vtoken_peak_blocks", "vtoken_retained_blocks_per_request", "ideal_blocks_per_request",
        } <= set(point)  # fmt: skip
        assert "modelled" not in point


def test_blocks_per_request_are_what_requests_held(world):
    result = make_scan(world, engine=SMALL, modes=("native",), concurrency="2").run()
    (run,) = result.main.runs
    lengths = range(P + 1, P + O)  # after each decode step
    held = sum(-(-n // 32) for n in lengths) / len(lengths)
    assert run.point.vtoken_retained_blocks_per_request == pytest.approx(held)
    assert run.point.vtoken_peak_blocks == 16


# ---- repeats and prompts -------------------------------------------------------------------


def test_repeats_have_prompts_of_their_own_and_their_mean_counts(world):
    world.step_s["native"] = 0.5
    first = make_scan(world, engine=SMALL, modes=("native",), concurrency="2", repeats=3)
    slow = {"now": False}

    def on_step(engine):  # the last repeat takes twice as long
        slow["now"] = engine.num_resets >= 6
        world.step_s["native"] = 1.0 if slow["now"] else 0.5

    world.on_step = on_step
    (run,) = first.run().main.runs
    prompts = world.real[0].prompts_seen
    warm_up, measured = prompts[:5], prompts[5:]
    assert len(measured) == 6, "the warm-up is another one than this test expects"
    assert len(set(measured)) == 6
    assert [p[0] for p in measured] == [0, 0, 1, 1, 2, 2]
    assert all(len(p) <= P for p in warm_up)
    each = [2 * O / (O * s) for s in (0.5, 0.5, 1.0)]
    assert run.point.output_throughput == pytest.approx(sum(each) / 3)
    assert run.point.metrics["repeats"] == 3 and slow["now"]
    # Counts are those of one run: counters are reset between repeats.
    assert run.point.metrics["total_output_tokens"] == 2 * O


def test_counts_of_repeats_are_not_added_up(world):
    scan = make_scan(world, engine=SMALL, modes=("vtoken",), concurrency="2", repeats=3)
    (run,) = scan.run().main.runs
    assert run.point.vtoken_evicted_tokens == 2 * O


def test_the_prefix_cache_is_reset_before_every_run(world):
    make_scan(world, engine=SMALL, modes=("native",), concurrency="1,2", repeats=2).run()
    assert world.real[0].num_resets == 3 + 4  # three warm-up batches, two points twice


def test_an_infeasible_repeat_is_the_last_one(world):
    result = make_scan(world, engine=SMALL, modes=("native",), concurrency="7", repeats=3).run()
    assert result.main.runs[0].point.metrics["repeats"] == 1


def test_blocks_left_over_are_not_passed_over(world):
    world.leaks = True
    with pytest.raises(InvariantViolation, match="blocks are left"):
        make_scan(world, engine=SMALL, concurrency="1").run()


# ---- engines -------------------------------------------------------------------------------


def test_modes_with_hooks_share_an_engine_and_one_is_open_at_a_time(world):
    make_scan(world, engine=SMALL, modes=MODES).run()
    assert [x for x in world.log if x.startswith("open")] == ["open native", "open indirection"]
    modes = [x.split()[1] for x in world.log if x.startswith("reconfigure")]
    # New hooks for every point; the warm-up after the start has those it was opened with.
    assert modes == ["indirection"] * 2 + ["naive"] * 2 + ["vtoken"] * 2
    assert all(engine.is_closed for engine in world.real)


def test_engines_get_the_scan_s_pool_length_and_concurrency(world):
    make_scan(world, engine=SMALL | {"max_num_seqs": 3}, concurrency="1,40").run()
    for engine in world.real:
        assert engine.settings.max_num_seqs == 40 and engine.settings.max_model_len == P + O + 1
        assert engine.settings.num_kv_blocks == 52 and engine.settings.block_size == 32


def test_an_engine_that_is_too_small_for_the_next_point_is_opened_anew(world):
    def on_step(engine):  # far more fits than the dry run says
        if engine in world.real:
            engine.scheduler.keeps_frac = 0.1

    world.on_step = on_step
    result = make_scan(world, engine=SMALL, modes=("native",), max_requests=26).run()
    assert frontier(result.main) == {"native": 26}
    assert world.log == ["open native", "open native"]


def test_a_dry_run_opens_no_engine_and_marks_its_rows(world):
    result = make_scan(world, engine=SMALL, dry_run=True).run()
    assert not world.real and result.main.modelled
    assert all(point.row()["modelled"] is True for point in result.sections()["points"])
    assert all(row["modelled"] is True for row in result.main.frontier)
    assert all(run.point.output_throughput is None for run in result.main.runs)


# ---- the bare scan -------------------------------------------------------------------------


def test_a_bare_scan_models_vllms_pool_and_measures_a_small_one(world):
    result = make_scan(world, engine={"gpu_memory_utilization": 0.5}).run()
    sections = result.sections()
    assert sections["pool"]["usable_blocks"] == 52  # 6.5 times 256 tokens
    block_bytes = 32 * 2 * 2 * 2 * 16 * 4
    kv_bytes = 2**23 - 200_000 * 4 - 2**20
    modelled = sections["modelled"]
    assert modelled["pool"]["usable_blocks"] == kv_bytes // block_bytes - 1
    assert modelled["pool"]["host_memory_bytes"] == 2**24
    assert frontier(result.modelled)["native"] == (kv_bytes // block_bytes - 1) // 8
    assert frontier(result.main) == {"native": 6, "naive": 6, "vtoken": 10}
    assert {p.row()["modelled"] for p in modelled["points"]} == {True}
    assert not any(point.modelled for point in sections["points"])
    assert "share of host memory" in result.notes[0]


def test_a_list_of_concurrencies_is_measured_as_given(world):
    result = make_scan(world, concurrency="1,7,3").run()
    assert points(result.main, "native") == [1, 3, 7]
    assert not world.dry or result.modelled is not None


# ---- the time limit ------------------------------------------------------------------------


def test_no_point_starts_that_would_overrun_the_limit(world):
    world.step_s["native"] = 1.0
    # A warm-up of 9 s, a point of 192 s, and one of 162 s that no longer fits.
    scan = make_scan(world, engine=SMALL, modes=("native",), time_limit_s=300.0)
    result = scan.run()
    assert points(result.main, "native") == [6]
    (left,) = result.main.left_out
    assert (left.mode, left.concurrency) == ("native", 7) and 162 < left.predicted_s < 200
    assert world.clock.now_s < 300
    assert result.main.frontier[0]["next_infeasible"] is None


def test_a_limit_that_is_long_enough_leaves_nothing_out(world):
    world.step_s["native"] = 1.0
    result = make_scan(world, engine=SMALL, modes=("native",), time_limit_s=500.0).run()
    assert points(result.main, "native") == [6, 7] and not result.main.left_out


def test_time_is_kept_back_for_the_first_point_of_every_later_mode(world):
    world.step_s = dict.fromkeys(world.step_s, 1.0)
    world.load_s = 50.0
    # Three first points of 192 s and two starts fit; a confirmation of 162 s beside them does not.
    result = make_scan(world, engine=SMALL, time_limit_s=800.0).run()
    assert {m: points(result.main, m) for m in ("native", "naive", "vtoken")} == {
        "native": [6], "naive": [6], "vtoken": [10],
    }  # fmt: skip
    assert [(x.mode, x.concurrency) for x in result.main.left_out] == [
        ("native", 7), ("naive", 7), ("vtoken", 11),
    ]  # fmt: skip
    assert result.main.left_out[0].reserved_s > 2 * O
    assert world.clock.now_s < 800


def test_a_mode_for_which_no_time_is_left_is_named(world):
    world.step_s = dict.fromkeys(world.step_s, 1.0)
    result = make_scan(world, engine=SMALL, time_limit_s=225.0).run()
    assert frontier(result.main) == {"native": 6}
    assert [x.mode for x in result.main.left_out] == ["native", "naive", "vtoken"]
    assert world.log == ["open native"], "an engine was started for nothing"


def test_where_time_is_short_vtoken_comes_before_naive(world):
    world.step_s = dict.fromkeys(world.step_s, 1.0)
    result = make_scan(world, engine=SMALL, time_limit_s=500.0).run()
    assert frontier(result.main) == {"native": 6, "vtoken": 10}
    assert ("naive", 6) in [(x.mode, x.concurrency) for x in result.main.left_out]
    assert world.clock.now_s < 500


def test_what_comes_before_the_first_engine_does_not_count(world):
    world.step_s["native"] = 1.0

    def on_step(engine):
        world.clock.now_s += 1.0 if engine in world.dry else 0.0

    world.on_step = on_step
    result = make_scan(world, engine=SMALL, modes=("native",), time_limit_s=420.0).run()
    assert world.clock.now_s > 700 and points(result.main, "native") == [6, 7]


def test_the_modelled_half_of_a_bare_scan_may_not_use_up_the_time(world):
    dry_s = {"native": 0.2, "naive": 0.2, "vtoken": 0.2}

    def on_step(engine):
        if engine in world.dry:
            world.clock.now_s += dry_s[engine.config.mode]

    world.on_step = on_step
    result = make_scan(world, time_limit_s=400.0).run()
    # A quarter of it, 100 s, for six dry points of about 39 s: those that start first are the three frontiers.
    assert [run.point.mode for run in result.modelled.runs] == ["native", "naive"]
    assert result.modelled.left_out and all(x.modelled for x in result.modelled.left_out)


# ---- interruption --------------------------------------------------------------------------


def test_ctrl_c_keeps_the_points_there_are_and_closes_the_engine(world):
    def on_step(engine):
        if engine in world.real and engine.config.mode == "naive" and len(engine.prompts_seen) > 20:
            raise KeyboardInterrupt

    world.on_step = on_step
    result = make_scan(world, engine=SMALL).run()
    assert result.interrupted and result.sections()["interrupted"] is True
    assert points(result.main, "native") == [6, 7] and points(result.main, "naive") == [6]
    assert all(engine.is_closed for engine in world.real)


# ---- what is refused before an engine starts -----------------------------------------------


def refused(world, *, engine=SMALL, **settings) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        make_scan(world, engine=engine, **settings).run()
    assert not world.real and not world.dry, "an engine was started"
    assert "\n" not in str(error.value)
    return error.value


@pytest.mark.parametrize(
    ("settings", "option", "allowed"),
    [
        ({"policies": ("randon",)}, "--policy", "did you mean 'random'?"),
        ({"modes": ("native", "vtokn")}, "--mode", "did you mean 'vtoken'?"),
        ({"concurrency": "0"}, "--concurrency", "whole numbers from 1"),
        ({"concurrency": "1,0,2"}, "--concurrency", "whole numbers from 1"),
        ({"repeats": 0}, "--repeats", "1 or more"),
        ({"prompt_len": 0}, "--prompt-len", "1 or more"),
        ({"time_limit_s": 0.0}, "--time-limit", "above 0"),
        ({"config": VTokenConfig(kv_budget_tokens=20)}, "--kv-budget-tokens", "at least 37"),
        ({"engine": {"num_kv_blocks": 5, "block_size": 32}}, "--num-kv-blocks", "at least 6"),
        ({"engine": SMALL | {"max_model_len": 255}}, "--max-model-len", "at least 256"),
        ({"engine": {"block_size": 16}}, "--block-size", "multiple of 32"),
        ({"engine": {"kv_cache_memory_bytes": 100}}, "--kv-cache-memory-bytes", "at least"),
        ({"engine": {"gpu_memory_utilization": 0.05}}, "--gpu-mem-util", "larger share"),
    ],
)
def test_wrong_settings_are_refused_before_an_engine_starts(world, settings, option, allowed):
    error = refused(world, **settings)
    assert error.option == option and allowed in str(error)


def test_requests_longer_than_the_model_takes_are_refused(world):
    scan = make_scan(world, engine=SMALL)
    scan._shape = dataclasses.replace(SHAPE, max_model_len=128)
    with pytest.raises(ConfigError, match="at most 128 tokens"):
        scan.run()


def test_a_mode_whose_request_does_not_fit_is_infeasible_without_an_engine(world):
    result = make_scan(world, engine={"num_kv_blocks": 7, "block_size": 32}).run()
    assert frontier(result.main) == {"native": 0, "naive": 0, "vtoken": 1}
    row = result.main.runs[0].point
    assert row.reason == "one request needs 8 blocks, the pool has 7" and row.concurrency == 1
    assert {"open native", "open naive"}.isdisjoint(world.log) and result.is_feasible


def test_a_pool_too_small_for_native_alone_is_an_answer_not_an_error(world):
    engine = {"num_kv_blocks": 7, "block_size": 32}
    result = make_scan(world, engine=engine, modes=("native",)).run()
    assert not result.is_feasible and not world.real


# ---- small things --------------------------------------------------------------------------


def test_modes_that_do_not_evict_come_once_whatever_the_policies():
    settings = ScanSettings(modes=("native", "vtoken"), policies=("random", "streaming-llm"))
    assert settings.series == [
        Series("native", ""), Series("vtoken", "random"), Series("vtoken", "streaming-llm"),
    ]  # fmt: skip


def test_scored_policies_are_dry_run_with_made_up_scores_and_it_is_said(world):
    result = make_scan(world, engine=SMALL, dry_run=True, policies=("h2o",)).run()
    assert any("h2o" in note and "random" in note for note in result.notes)


def test_a_listener_sees_every_point_grow_to_its_end(world):
    class Watching(Listener):
        def __init__(self):
            self.seen = {}

        @contextmanager
        def progress(self, total, description):
            bar = Bar()
            bar.update = lambda done: self.seen.setdefault(description, []).append(done)
            yield bar

    listener = Watching()
    scan = make_scan(
        world, engine=SMALL, modes=("native",), concurrency="2", repeats=2, listener=listener
    )
    scan.run()
    done = listener.seen["native at 2"]
    assert done == sorted(set(done)) and done[-1] == 2 * 2 * O

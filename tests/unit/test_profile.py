"""Profiles: phases add up, wrappers come off, rows say what was measured. No engine, no model."""

from __future__ import annotations

import io
import itertools
import json
import types
from dataclasses import dataclass

import numpy as np
import pytest

from vtoken.config import VTokenConfig
from vtoken.errors import ConfigError
from vtoken.experiments.profile import kernels as kernel_suite
from vtoken.experiments.profile.boundaries import ATTENTION, OURS, PHASES, SCORES, overrides
from vtoken.experiments.profile.chrome_trace import write_trace
from vtoken.experiments.profile.metadata import LookupCounts, arrays_of, num_bytes
from vtoken.experiments.profile.overhead import (
    WARM_UP_STEPS,
    num_event_steps,
    pair_rows,
    paired_steps,
)
from vtoken.experiments.profile.profile_options import ProfileSettings
from vtoken.experiments.profile.rows import fit_slope, make_row
from vtoken.experiments.profile.run import ProfileResult, run_profile, write_plots
from vtoken.experiments.profile.running import Engines, staggered
from vtoken.experiments.profile.show import answer_lines, tables
from vtoken.experiments.profile.step import StepProfile, stock_ms
from vtoken.experiments.profile.timer import REST, PhaseTimer, StepTimes
from vtoken.experiments.report.statistics import median_interval


class Clock:
    """Stands still until told."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


class Machine:
    """A step of 100 ns: 10 by itself, 30 in `outer` by itself, twice 20 in `inner`, 20 more."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def step(self):
        self.clock.ns += 10
        return self.outer(2)

    def outer(self, times: int):
        self.clock.ns += 30
        for _ in range(times):
            self.inner()
        self.late()
        return "done"

    def inner(self) -> None:
        self.clock.ns += 20

    def late(self) -> None:
        self.clock.ns += 20


# ---- the timer -----------------------------------------------------------------------------


def timed_machine(**kwargs):
    clock = Clock()
    machine = Machine(clock)
    timer = PhaseTimer(clock_ns=clock, **kwargs)
    timer.wrap(machine, "outer", "plan")
    timer.wrap(Machine, "inner", "moves")
    return machine, timer


def test_every_moment_counts_once() -> None:
    machine, timer = timed_machine()
    with timer:
        assert timer.run_step(machine.step) == "done"
    (step,) = timer.steps
    assert step.total_s == pytest.approx(100e-9)
    assert step.phases_s == pytest.approx({"plan": 50e-9, "moves": 40e-9, REST: 10e-9})
    assert step.share(("plan", "moves")) == pytest.approx(0.9)
    assert step.sum_s(("scores",)) == 0.0


def test_wrappers_come_off_whatever_happens() -> None:
    machine, timer = timed_machine()
    before = dict(vars(Machine))
    machine.late = None  # the step fails half-way
    with pytest.raises(TypeError), timer:
        timer.run_step(machine.step)
    assert dict(vars(Machine)) == before and "outer" not in vars(machine)
    del machine.late
    with timer:  # and the timer is usable again
        timer.run_step(machine.step)
    assert timer.steps[-1].phases_s["moves"] == pytest.approx(40e-9)


def test_a_method_replaced_on_the_object_is_put_back() -> None:
    machine, timer = timed_machine()
    own = machine.outer = types.MethodType(Machine.outer, machine)
    with timer:
        assert machine.outer is not own
    assert vars(machine)["outer"] is own


def test_what_is_not_there_cannot_be_timed() -> None:
    with pytest.raises(AssertionError, match="Machine has no finalise"):
        PhaseTimer().wrap(Machine(Clock()), "finalise", "plan")


def test_a_phase_may_depend_on_the_call() -> None:
    clock = Clock()
    machine, timer = Machine(clock), PhaseTimer(clock_ns=clock)
    timer.wrap(machine, "outer", lambda args, kwargs: f"twice{args[0]}")
    with timer:
        timer.run_step(machine.step)
    assert timer.steps[0].phases_s["twice2"] == pytest.approx(90e-9)


def test_a_trace_nests_and_names_phases(tmp_path) -> None:
    machine, timer = timed_machine(keep_spans=True)
    with timer:
        timer.run_step(machine.step)
        timer.run_step(machine.step)
    path = write_trace(tmp_path / "t.json", {"native": [], "vtoken": timer.spans})
    events = json.loads(path.read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["ph"] == "M"]
    calls = [e for e in events if e["ph"] == "X"]
    assert names == ["native", "vtoken"] and {e["pid"] for e in calls} == {2}
    assert [e["name"] for e in calls] == ["step", "outer", "inner", "inner"] * 2
    assert [e["cat"] for e in calls[:3]] == [REST, "plan", "moves"]
    step, outer, inner = calls[:3]
    assert step["ts"] == 0 and step["dur"] == pytest.approx(0.1)
    for child, parent in ((outer, step), (inner, outer)):
        assert parent["ts"] <= child["ts"]
        assert child["ts"] + child["dur"] <= parent["ts"] + parent["dur"] + 1e-9


# ---- boundaries ----------------------------------------------------------------------------


def test_overrides_are_found_with_the_class_below_them() -> None:
    class Stock:
        def schedule(self): ...
        def update(self): ...
        def load_model(self): ...

    class Middle(Stock):
        def update(self): ...

    ours = {"schedule": lambda self: None, "update": lambda self: None, "own": lambda self: None,
            "load_model": lambda self: None, "__module__": "vtoken.somewhere"}  # fmt: skip
    Mixin = type("Mixin", (), ours)
    again = {"schedule": lambda self: None, "__module__": "vtoken.somewhere"}
    Joined = type("Joined", (Mixin, Middle), again)
    # Once each, though two classes of ours have it.
    assert sorted(overrides(Joined())) == [("schedule", Stock), ("update", Middle)]
    assert list(overrides(Middle())) == []


def test_ours_are_phases() -> None:
    assert set(OURS) < set(PHASES) and len(set(PHASES)) == len(PHASES)


# ---- rows ----------------------------------------------------------------------------------


def test_a_row_has_the_mean_unless_told_and_percentiles() -> None:
    row = make_row("a/b", "ms", samples=[1.0, 2.0, 6.0], ratio_to_stock=np.float32(0.5), extra=1)
    assert row == {
        "name": "a/b", "value": 3.0, "unit": "ms", "p50": 2.0, "p95": pytest.approx(5.6),
        "num_samples": 3, "ratio_to_stock": 0.5, "extra": 1,
    }  # fmt: skip
    assert "p50" not in make_row("a", "ms", value=0.0)
    with pytest.raises(AssertionError):
        make_row("a", "ms")


def test_the_interval_holds_the_median_and_ignores_one_outlier() -> None:
    values = [*np.random.default_rng(1).normal(1.0, 0.01, 200), 50.0]
    median, low, high = median_interval(values)
    assert low <= median <= high and 0.99 < low and high < 1.01
    assert high - low < 0.01


def test_a_slope_is_found_over_three_orders_of_magnitude() -> None:
    x = [1, 10, 100, 1000]
    slope, fixed = fit_slope(x, [7.0 + 3.0 * v for v in x])
    assert slope == pytest.approx(3.0) and fixed == pytest.approx(7.0)


# ---- overhead ------------------------------------------------------------------------------


class FakeEngine:
    def __init__(self, log: list, name: str) -> None:
        self.log, self.name = log, name

    def step(self) -> None:
        self.log.append(self.name)


def test_pairs_step_in_turn_and_change_the_order() -> None:
    log: list[str] = []
    pair = {n: FakeEngine(log, n) for n in ("native", "indirection")}
    seconds = paired_steps(pair, 6)
    assert {n: len(s) for n, s in seconds.items()} == {"native": 6, "indirection": 6}
    assert len(log) == 2 * (6 + WARM_UP_STEPS)
    rounds = [tuple(log[i : i + 2]) for i in range(0, len(log), 2)]
    assert all(set(r) == set(pair) for r in rounds)
    assert all(a != b for a, b in itertools.pairwise(rounds))


def test_pairs_are_timed_by_the_clock_they_are_given() -> None:
    times = iter(range(1000))
    pair = {n: FakeEngine([], n) for n in ("native", "indirection")}
    seconds = paired_steps(pair, 3, lambda: next(times))
    assert seconds["native"].tolist() == seconds["indirection"].tolist() == [1, 1, 1]


def test_pair_rows_compare_step_by_step() -> None:
    native = np.linspace(0.1, 0.3, 50)  # steps grow; each pair differs by 2 %
    rows = {
        r["name"]: r
        for r in pair_rows({"native": native, "indirection": 1.02 * native}, "native",
                           "indirection", 16)
    }  # fmt: skip
    slow = rows["indirection/slowdown_from_native/c16"]
    assert slow["value"] == pytest.approx(0.02) and slow["unit"] == "frac"
    assert slow["ci95_low"] == pytest.approx(0.02) and slow["ci95_high"] == pytest.approx(0.02)
    assert rows["indirection/step/c16"]["ratio_to_stock"] == pytest.approx(1.02)
    assert rows["native/output_throughput/c16"]["value"] == pytest.approx(16 / 0.2)
    rows = list(pair_rows({"naive": native, "vtoken": native / 2}, "naive", "vtoken", 4))
    assert rows[0]["value"] == pytest.approx(-0.5)
    assert not any("ratio_to_stock" in r for r in rows)  # naive is not stock


def test_enough_steps_are_planned_for_the_events() -> None:
    config = VTokenConfig(kv_budget_tokens=64, eviction_interval_tokens=8)
    profile = ProfileSettings(config=config, concurrencies=(10,), num_events=100, num_steps=4)
    assert num_event_steps(profile) >= 100 / 10 * 8
    half = ProfileSettings(
        config=VTokenConfig(eviction_ratio=0.5, eviction_interval_tokens=8), concurrencies=(10,)
    )
    assert num_event_steps(half) > num_event_steps(profile)  # its budget grows meanwhile


def test_stagger_stays_within_a_block() -> None:
    assert staggered(4, 100, 32) == [100, 108, 116, 124]
    assert staggered(64, 100, 32)[-1] == 131


def test_engines_are_opened_once_reconfigured_and_closed_together() -> None:
    calls: list[tuple] = []

    class Engine:
        def __init__(self, settings, config) -> None:
            calls.append(("open", config))

        def reconfigure(self, config) -> None:
            calls.append(("reconfigure", config.mode))

        def close(self) -> None:
            calls.append(("close",))

    engines = Engines(ProfileSettings().engine_settings(2, 64), Engine)
    a = engines.get("first", VTokenConfig(mode="indirection"))
    assert engines.get("first", VTokenConfig(mode="vtoken")) is a
    b = engines.get("stock", VTokenConfig(mode="native"))
    assert engines.get("stock", VTokenConfig(mode="native")) is b is not a
    engines.close()
    engines.close()
    assert [c[0] for c in calls] == ["open", "reconfigure", "open", "close", "close"]


# ---- the step suite ------------------------------------------------------------------------


def step_profile(mode: str, total_s: float, score_share: float | None = None) -> StepProfile:
    phases = {ATTENTION: 0.4 * total_s, SCORES: 0.1 * total_s, REST: 0.5 * total_s}
    return StepProfile(mode, 4, [StepTimes(total_s, phases)] * 3, score_share=score_share)


def test_fused_score_sums_count_as_scores() -> None:
    plain, fused = step_profile("naive", 0.1), step_profile("vtoken", 0.1, 0.25)
    assert plain.phase_ms(ATTENTION).tolist() == pytest.approx([40.0] * 3)
    assert fused.phase_ms(ATTENTION).tolist() == pytest.approx([30.0] * 3)
    assert fused.phase_ms(SCORES).tolist() == pytest.approx([20.0] * 3)
    assert sum(fused.phase_ms(p) for p in PHASES) == pytest.approx(fused.total_ms)


def test_step_rows_have_shares_and_compare_with_native() -> None:
    rows = {
        r["name"]: r for r in step_rows([step_profile("native", 0.1), step_profile("vtoken", 0.2)])
    }
    assert rows["vtoken/step/c4"]["ratio_to_stock"] == pytest.approx(2.0)
    assert rows["vtoken/attention/c4"]["frac"] == pytest.approx(0.4)
    assert "vtoken/moves/c4" not in rows  # there were none
    alone = step_rows([step_profile("vtoken", 0.2)])
    assert not any("ratio_to_stock" in r for r in alone)


# ---- metadata ------------------------------------------------------------------------------


def test_arrays_are_found_once_through_objects_slots_and_views() -> None:
    class Slotted:
        __slots__ = ("array", "missing")
        __module__ = "vtoken.somewhere"

    class Holder:
        __module__ = "vtoken.somewhere"

    shared = np.zeros(100, np.int32)
    slotted, holder = Slotted(), Holder()
    slotted.array = shared[10:20]  # a view keeps all of its array alive
    holder.items, holder.again = {"a": [slotted]}, (shared,)
    holder.other, holder.me = np.zeros(7, np.int64), holder
    holder.module, holder.foreign = json, types.SimpleNamespace(array=np.zeros(9))
    assert num_bytes(arrays_of(holder)) == 400 + 56


def test_a_tensor_counts_with_all_of_its_storage() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    whole = torch.zeros(50)
    assert num_bytes(arrays_of([whole, whole[:3]])) == 200


@dataclass
class FakePlan:
    req_ids: list[str]
    rewrites_block_table: np.ndarray
    mask_start: np.ndarray


def test_lookups_are_counted_by_what_crossed_to_the_worker() -> None:
    engine = types.SimpleNamespace(step_listeners=[])
    counts = LookupCounts(engine)
    (note,) = engine.step_listeners
    scheduled = {r: 1 for r in "abcd"}
    note(types.SimpleNamespace(num_scheduled_tokens=scheduled, vtoken=None))
    # a gets a row, b a mask, c a slot alone; d only grew
    plan = FakePlan(["a", "b", "c"], np.array([True, False, False]), np.array([0, 0, 4, 4]))
    note(types.SimpleNamespace(num_scheduled_tokens=scheduled, vtoken=plan))
    counts.stop()
    rows = {r["name"]: r["value"] for r in counts.rows("r4")}
    assert rows == {"lookup/appends/r4": 5, "lookup/updates/r4": 1, "lookup/rebuilds/r4": 2}
    assert engine.step_listeners == []


# ---- settings, the run and what it shows ---------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"num_steps": 3}, "--steps"),
        ({"prompt_len": 8}, "--prompt-len"),
        ({"num_events": 0}, "--events"),
        ({"concurrencies": (4, 0)}, "--concurrency"),
        ({"trace": "t.json", "suites": ("scale",)}, "--trace"),
        ({"config": VTokenConfig(record_decisions="f")}, "--replay-decisions"),
    ],
)
def test_settings_are_checked(fields, option) -> None:
    with pytest.raises(ConfigError, match=option):
        ProfileSettings(**fields)


def test_an_engine_has_room_for_all_requests() -> None:
    settings = ProfileSettings().engine_settings(16, 300)
    assert settings.num_kv_blocks * settings.block_size >= 16 * 300
    assert settings.max_model_len >= 300 and settings.max_num_seqs >= 16


def step_rows(profiles: list[StepProfile]) -> list[dict]:
    return [row for p in profiles for row in p.rows(stock_ms(profiles))]


def fake_result() -> ProfileResult:
    result = ProfileResult(ProfileSettings(concurrencies=(16,)), "now")
    native = np.full(20, 0.1)
    rows = list(pair_rows({"native": native, "indirection": native}, "native", "indirection", 16))
    rows.append(make_row("indirection/hook_share/c16", "frac", samples=[0.003, 0.004]))
    rows += [make_row(f"event/{n}/c16", "us/event", samples=[120.0])
             for n in ("planner", "launch", "rewrite")]  # fmt: skip
    result.step_profiles = [step_profile("native", 0.1), step_profile("vtoken", 0.1, 0.25)]
    scale = [make_row(f"evicting/above_native/r{n}", "us", value=9.0 * n, num_requests=n,
                      series="evicting") for n in (1, 16)]  # fmt: skip
    result.rows = {"overhead": rows, "step": step_rows(result.step_profiles), "scale": scale}
    return result


def test_the_answers_and_tables_say_what_was_measured() -> None:
    from rich.console import Console

    result = fake_result()
    lines = list(answer_lines(result))
    assert "0.35% of a step at 16 running" in lines[0] and "+0.00% slower" in lines[0]
    assert "planner 120 µs, launch 120 µs, rewrite 120 µs" in lines[1]
    assert any("mode vtoken, 20.0%" in line for line in lines)
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(*tables(result))
    text = console.export_text()
    for shown in ("indirection/hook_share/c16", "attention", "30.000", "evicting/above_native/r16"):
        assert shown in text


def test_plots_are_written(tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    written = write_plots(fake_result(), tmp_path)
    assert [p.name for p in written] == ["step.png", "scale_num_requests.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in written)


def test_an_interrupted_run_keeps_what_it_has(monkeypatch) -> None:
    def interrupted(result, say):
        yield make_row("b", "ms", value=2.0)
        raise KeyboardInterrupt

    suites = {"overhead": lambda result, say: [make_row("a", "ms", value=1.0)],
              "scale": interrupted}  # fmt: skip
    monkeypatch.setattr("vtoken.experiments.profile.run._SUITES", suites)
    result = run_profile(ProfileSettings(suites=("overhead", "scale")), lambda text: None)
    assert result.interrupted
    assert {s: [r["name"] for r in rows] for s, rows in result.rows.items()} == {
        "overhead": ["a"], "scale": ["b"],
    }  # fmt: skip


def test_kernel_rows_are_those_of_the_benchmark() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    before = torch.get_num_threads()
    rows = kernel_suite.run_kernels(
        lambda text: None, suites=("decode",), shapes=("smol",), dtypes=("f32",),
        holes_pct=(25,), batch=1, context=64, budget_s=0.01, stock=False,
    )  # fmt: skip
    names = {r["name"]: r for r in rows}
    assert names["attention_scores/holes25/smol/f32"]["value"] > 0
    assert names["attention_scores/holes25/smol/f32"]["unit"] == "us"
    assert torch.get_num_threads() == before

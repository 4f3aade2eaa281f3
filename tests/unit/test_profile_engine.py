"""Phases on real and dry engines: they add up, the work shows, and the engine is left as it was."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vtoken.config import VTokenConfig
from vtoken.engine import EngineSettings, open_engine
from vtoken.experiments.profile import scale
from vtoken.experiments.profile.boundaries import OURS, watch_engine
from vtoken.experiments.profile.metadata import device_rows, host_bytes
from vtoken.experiments.profile.overhead import measure_events, watch_steps
from vtoken.experiments.profile.profile_options import ProfileSettings
from vtoken.experiments.profile.running import start_requests, stop_requests
from vtoken.experiments.profile.step import price_of_scores, profile_steps
from vtoken.experiments.profile.timer import PhaseTimer

pytestmark = pytest.mark.vllm

HOLED = VTokenConfig(policy="h2o", kv_budget_tokens=48, fragmentation_threshold=0.9)
PACKED = VTokenConfig(policy="h2o", kv_budget_tokens=48, eviction_interval_tokens=8)
PROFILE = ProfileSettings(
    config=PACKED, engine=EngineSettings(model="tiny-llama"), concurrencies=(3,), prompt_len=64,
    num_steps=12, num_events=9,
)  # fmt: skip


@pytest.fixture(scope="module")
def engine():
    with open_engine(PROFILE.engine_settings(3, 256), HOLED) as engine:
        yield engine


def patched(engine) -> list:
    """Everything a timer may have put on the engine's objects and on vLLM's classes."""
    manager = engine.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    runner = engine.runner
    layers = runner.vtoken_attention.layers
    things = [
        engine.scheduler, manager, engine.scheduler.kv_cache_manager, engine.hooks, runner,
        engine.core.model_executor, runner.vtoken_attention, runner.vtoken_attention.kernels,
        *(layer.impl for layer in layers),
    ]  # fmt: skip
    classes = [c for thing in things for c in type(thing).__mro__ if c is not object]
    found = [(id(t), n, id(v)) for t in things for n, v in vars(t).items() if callable(v)]
    return found + [(c.__name__, n, id(v)) for c in classes for n, v in vars(c).items()]


def test_phases_of_an_evicting_step_add_up_and_the_engine_is_left_alone(engine) -> None:
    engine.reconfigure(PACKED)
    before = patched(engine)
    found = profile_steps(engine, "vtoken", PROFILE, 3, 40)
    assert patched(engine) == before
    assert len(found.steps) == PROFILE.num_steps and found.num_events >= 3
    for step in found.steps:
        assert sum(step.phases_s.values()) == pytest.approx(step.total_s)
        assert 0 < step.share(OURS) < 1
    for phase in ("schedule", "plan", "finalise", "hooks", "transport", "apply", "moves", "inputs",
                  "layouts", "attention", "scores", "rest of the model", "sampling"):  # fmt: skip
        assert found.phase_ms(phase).sum() > 0, phase
    moves = found.phase_ms("moves")
    assert 0 < (moves > 0).sum() < len(moves)  # only steps with a relocation copy
    assert len(found.plans) >= 1 and all(size > 0 for size, _ in found.plans)
    assert 0 <= found.score_share < 1


def test_indirection_plans_nothing(engine) -> None:
    engine.reconfigure(VTokenConfig(mode="indirection"))
    names = start_requests(engine, 3, 64, 20, tag="indirection")
    timer = watch_steps(engine, 6)
    assert price_of_scores(engine, 1) is None
    stop_requests(engine, names)
    for step in timer.steps:
        assert step.phases_s["hooks"] > 0 and "moves" not in step.phases_s
    assert all(s.phases_s["attention"] > 0 for s in timer.steps)


def test_events_are_timed_until_there_are_enough(engine) -> None:
    engine.reconfigure(PACKED)
    found = measure_events(engine, PROFILE, 3, 80)
    assert found["events"] >= PROFILE.num_events
    assert len(found["planner"]) == len(found["launch"]) <= found["events"]
    assert min(found["planner"]) > 0 and min(found["rewrite"]) > 0 and found["moved"] > 0
    assert not engine.scheduler.has_requests()


def test_device_metadata_is_a_score_per_slot_and_a_mask_per_held_token(engine) -> None:
    engine.reconfigure(HOLED)
    names = start_requests(engine, 3, 96, 20, tag="device")
    for _ in range(6):
        engine.step()
    rows = {r["name"]: r for r in device_rows(engine)}
    stop_requests(engine, names)
    assert rows["metadata/device/scores"]["value"] == 4.0
    assert rows["metadata/device/masks"]["num_tokens"] > 0
    assert rows["metadata/device/masks"]["value"] <= 1.0


def test_a_timer_refuses_an_engine_that_lost_a_boundary(engine) -> None:
    attention = engine.runner.vtoken_attention
    engine.runner.vtoken_attention = type("Other", (), {"kernels": attention.kernels})()
    try:
        with pytest.raises(AssertionError, match="has no begin_step"):
            watch_engine(PhaseTimer(), engine)
    finally:
        engine.runner.vtoken_attention = attention


# ---- dry engines ---------------------------------------------------------------------------


def test_the_dry_suite_counts_each_eviction_once() -> None:
    us, engine = scale.event_us("h2o", 256)
    assert len(us) >= scale.EVENTS_PER_CONTEXT - 1 and max(us) > 0
    (state,) = engine.hooks.requests.by_id.values()
    assert state.table.num_live_tokens >= 256
    length = state.table.num_computed_tokens
    assert 8 <= host_bytes(engine.hooks) / length < 64
    engine.close()


def test_rows_by_requests_have_slopes_and_lookup_counts(monkeypatch) -> None:
    monkeypatch.setattr(scale, "ROUNDS", (1, 1))
    rows = {r["name"]: r for r in scale._rows_by_requests(lambda text: None, (1, 3))}
    assert rows["native/step/r3"]["value"] > 0
    for name in scale.HOOKED:
        assert "fixed_us" in rows[f"{name}/slope"]
    # Every request evicts once a stretch: its row is written then, and grows in all other steps.
    appends, rebuilds = rows["lookup/appends/r3"]["value"], rows["lookup/rebuilds/r3"]["value"]
    assert appends + rebuilds + rows["lookup/updates/r3"]["value"] == 3 * scale.STRETCH_STEPS
    assert rebuilds == 3

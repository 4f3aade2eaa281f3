"""`vtoken verify` on a real engine: clean runs pass, every fault is seen, every check is needed."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vtoken.checks.base import CHECKS, INVARIANTS
from vtoken.config import VTokenConfig
from vtoken.engine import EngineSettings
from vtoken.models import resolve_model
from vtoken.verify.catalogue import LIVE_FAULTS
from vtoken.verify.findings import Report
from vtoken.verify.matrix import LAYOUTS, build_matrix
from vtoken.verify.replay import replay
from vtoken.verify.runs import EngineHolder, run_checked
from vtoken.verify.suites import FAULT_SETTINGS, run_coverage, run_events, run_fault
from vtoken.verify.workloads import staggered_prompts

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def holder():
    settings = EngineSettings(model=resolve_model("tiny-llama"), **FAULT_SETTINGS)
    with EngineHolder(settings, VTokenConfig(policy="h2o", hash_kv_every=1)) as holder:
        yield holder


def _config(**fields) -> VTokenConfig:
    return VTokenConfig(policy="h2o", kv_budget_tokens=44, eviction_interval_tokens=8, **fields)


def _requests(repeat: int, num: int = 4, output_len: int = 32) -> list:
    return staggered_prompts(num, 36, output_len, 500, 0, repeat)


def test_a_clean_run_is_checked_throughout(holder) -> None:
    outcome = run_checked(holder.get(), _config(hash_kv_every=1), _requests(1))
    assert outcome.violation is None
    events = outcome.tally.events
    assert set(events) == set(INVARIANTS) and not any(outcome.tally.violations.values())
    relocations = outcome.run.counters.relocation_events
    assert relocations >= 8
    for name in ("I1", "I2", "I4", "conservation", "scores"):
        assert events[name] == relocations, name
    assert 0 < events["I3"] <= relocations
    computed = sum(r.prompt_len + 32 - 1 for r in _requests(1))
    assert events["positions"] == computed


def test_an_engine_tells_what_was_checked(holder) -> None:
    """As the status page of a server does; the worker's counts ride on the steps' outputs."""
    from vtoken.server.snapshot import snapshot

    outcome = run_checked(holder.get(), _config(hash_kv_every=1), _requests(5))
    assert snapshot(holder.get().scheduler)["checks"] == outcome.tally.rows()
    assert outcome.tally.events["I1"] > 0 and outcome.tally.events["I4"] > 0
    run_checked(holder.get(), _config(), _requests(6))
    assert snapshot(holder.get().scheduler)["checks"] is None


def test_every_nth_event_only(holder) -> None:
    all_of_them = run_checked(holder.get(), _config(hash_kv_every=1), _requests(2)).tally
    some = run_checked(holder.get(), _config(hash_kv_every=3), _requests(2)).tally
    assert 0 < some.changes <= all_of_them.changes // 3 + 1
    none = run_checked(holder.get(), _config(), _requests(2)).tally
    assert none.changes == 0 and none.hashed_tokens == 0


@pytest.mark.parametrize("fault", LIVE_FAULTS, ids=lambda f: f.name)
def test_every_fault_is_reported_by_its_check(holder, fault) -> None:
    result = run_fault(holder, fault)
    assert result.detected, (fault.check, result.reported_check, result.report.get("message"))
    row = result.row()
    assert row["detected"] and row["reported_as"] == row["expected"] == fault.invariant
    report = result.report
    assert report["step"] > 0 and report["message"] and report["replay"]["requests"]


def test_the_faults_cover_every_check() -> None:
    assert {f.check for f in LIVE_FAULTS} == set(CHECKS)
    assert len({f.name for f in LIVE_FAULTS}) == len(LIVE_FAULTS) >= 15


@pytest.mark.parametrize("check", CHECKS)
def test_without_a_check_the_suite_fails(holder, check) -> None:
    """Each check is the only one that reports some fault under its name."""
    fault = next(f for f in LIVE_FAULTS if f.check == check)
    result = run_fault(holder, fault, off=[check])
    assert not result.detected and not result.row()["detected"]


def test_a_violation_can_be_replayed(holder) -> None:
    fault = next(f for f in LIVE_FAULTS if f.name == "one layer missed")
    report = run_fault(holder, fault).report
    holder.close()  # a process holds one engine
    violation, _ = replay(report)
    assert violation is None  # the fault is gone: nothing is wrong
    report["replay"]["fault"] = fault.name
    violation, tally = replay(report)
    assert violation is not None and violation.exit_code == 1
    for key in ("check", "step", "ids"):  # slots depend on what the pool served before
        assert violation.report[key] == report[key], key
    assert tally.violations["I1"] == 1


def _coverage(model: str, policies, layouts, *, full: bool = False) -> Report:
    path, report = resolve_model(model), Report()
    base = {"model": path, "num_kv_blocks": 200, "max_model_len": 512, "dtype": "float32"}
    run_coverage(report, build_matrix(policies, layouts, full=full), base, {}, model_path=path)
    return report


def _assert_clean(report: Report) -> None:
    assert report.passed, report.failures()
    assert report.reference.tokens > 0
    assert report.sensitivity > 50 * report.reference.max_abs_logprob_diff


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-gemma"])
def test_the_reference_agrees_on_every_tiny_model(holder, model) -> None:
    holder.close()  # a process holds one engine
    report = _coverage(model, ["h2o"], ["packed"])
    _assert_clean(report)
    assert report.tally.events["I1"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-gemma"])
def test_the_full_matrix(holder, model) -> None:
    from vtoken.policies.registry import policy_names

    holder.close()
    _assert_clean(_coverage(model, list(policy_names()), list(LAYOUTS), full=True))


@pytest.mark.slow
def test_ten_thousand_events(holder) -> None:
    holder.close()
    from vtoken.policies.registry import policy_names

    report = Report()
    settings = EngineSettings(model=resolve_model("tiny-llama"), **FAULT_SETTINGS)
    run_events(report, settings, list(policy_names()), {}, 10_000)
    assert report.passed and report.tally.events["I1"] >= 10_000

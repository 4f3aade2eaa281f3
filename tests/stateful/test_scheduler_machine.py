"""The state machine on vLLM's real scheduler; short here, long under `make stress`."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("vllm")
pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from policy_references import reference_victims

from vtoken.errors import InvariantViolation
from vtoken.testing.state_machine import scheduler_machine
from vtoken.verify.catalogue import PLAN_FAULTS


def profile(max_examples: int, num_rules: int, **changes) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=num_rules,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        **changes,
    )


def test_machine():
    """No block, token or hash is ever wrong, whatever arrives."""
    machine = scheduler_machine(victims=reference_victims)
    run_state_machine_as_test(machine, settings=profile(120, 30))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_machine_for_long():
    factor = float(os.environ.get("VTOKEN_STRESS", "1"))
    machine = scheduler_machine(victims=reference_victims)
    run_state_machine_as_test(machine, settings=profile(int(1500 * factor), 60))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PLAN_FAULTS)
def test_machine_finds(name):
    """A machine that cannot fail proves nothing."""
    machine = scheduler_machine(victims=reference_victims, fault=PLAN_FAULTS[name])
    with pytest.raises(InvariantViolation):
        run_state_machine_as_test(
            machine, settings=profile(400, 40, phases=[Phase.generate], database=None)
        )

"""The one catalogue of faults, each with the check that must see it.

A fault replaces one inner part of the scheduler's or the worker's side (a kernel call, a table
update, a release) by a wrong one, below the places where the checks record what happens; or it
damages a StepPlan on its way from one to the other. The modules register theirs when imported.
"""

from __future__ import annotations

from vtoken.verify import plan_faults, scheduler_faults, worker_faults  # noqa: F401 - register
from vtoken.verify.fault import PLAN, REGISTERED

FAULTS = tuple(REGISTERED)
LIVE_FAULTS = tuple(f for f in FAULTS if f.where != PLAN)
"""Those of a real engine: what `vtoken verify --suite faults` puts in; their names are unique."""

PLAN_FAULTS = {f.name: f for f in FAULTS if f.where == PLAN}
"""Those of dry engines, by name: what the random work and the state machine must find."""

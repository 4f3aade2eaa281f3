"""Damage to StepPlans on their way to the worker: a check that cannot fail proves nothing.

Each fault changes a plan in place and says whether there was anything to change; the scheduler's
tables stay as they are, so tables and KV (or what attention reads) no longer agree.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vtoken.core.messages import StepPlan

PlanFault = Callable[[StepPlan, np.random.Generator], bool]


def _skip_a_copy(plan: StepPlan, rng: np.random.Generator) -> bool:
    if not len(plan.move_source):
        return False
    m = int(rng.integers(len(plan.move_source)))
    plan.move_source[m] = plan.move_destination[m]
    return True


def _swap_destinations(plan: StepPlan, rng: np.random.Generator) -> bool:
    if len(plan.move_source) < 2:
        return False
    a, b = rng.choice(len(plan.move_source), 2, replace=False)
    d = plan.move_destination
    d[a], d[b] = d[b], d[a]
    return True


def _swap_source_and_destination(plan: StepPlan, rng: np.random.Generator) -> bool:
    if not len(plan.move_source):
        return False
    plan.move_source, plan.move_destination = plan.move_destination, plan.move_source
    return True


def _leave_a_row(plan: StepPlan, rng: np.random.Generator) -> bool:
    rows = np.flatnonzero(plan.rewrites_row)
    if not len(rows):
        return False
    plan.rewrites_row[rng.choice(rows)] = False
    return True


def _turn_a_row_round(plan: StepPlan, rng: np.random.Generator) -> bool:
    """Swap two blocks of a row; a fault only where the row has two."""
    for r in np.flatnonzero(plan.rewrites_row):
        row = plan.row_of(r)
        if len(row) >= 2:
            row[0], row[-1] = row[-1], row[0]
            return True
    return False


def _reuse_the_next_slot(plan: StepPlan, rng: np.random.Generator) -> bool:
    r = np.flatnonzero(plan.new_token_index >= 0)
    if not len(r):
        return False
    plan.new_token_index[r[0]] += 1
    return True


def _miscount_the_length(plan: StepPlan, rng: np.random.Generator) -> bool:
    r = np.flatnonzero(plan.num_reclaimed > 0)
    if not len(r):
        return False
    plan.num_reclaimed[r[0]] -= 1
    return True


def _flip_a_live_bit(plan: StepPlan, rng: np.random.Generator) -> bool:
    if not len(plan.mask_bits):
        return False
    plan.mask_bits[0] ^= 1 << int(rng.integers(4))
    return True


PLAN_FAULTS: dict[str, PlanFault] = {
    "a copy skipped": _skip_a_copy,
    "two destinations swapped": _swap_destinations,
    "source and destination swapped": _swap_source_and_destination,
    "a row left as it was": _leave_a_row,
    "a row in another order": _turn_a_row_round,
    "slot reuse off by one": _reuse_the_next_slot,
    "a length off by one": _miscount_the_length,
    "a live bit flipped": _flip_a_live_bit,
}
"""Damage to a StepPlan on its way to the worker, by what it amounts to."""

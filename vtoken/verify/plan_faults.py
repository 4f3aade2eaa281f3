"""Damage to a StepPlan on its way to the worker; see vtoken.verify.catalogue.

Each changes a plan in place and says whether there was anything to change. The scheduler's tables
stay as they are, so tables and KV (or what attention reads) no longer agree.
"""

from __future__ import annotations

import numpy as np

from vtoken.core.messages import StepPlan
from vtoken.verify.fault import PLAN, fault


@fault("a copy skipped", PLAN, "I3")
def plan_skips_a_copy(plan: StepPlan, rng: np.random.Generator) -> bool:
    if not len(plan.move_source):
        return False
    m = int(rng.integers(len(plan.move_source)))
    plan.move_source[m] = plan.move_destination[m]
    return True


@fault("two destinations swapped", PLAN, "I1")
def plan_swaps_destinations(plan: StepPlan, rng: np.random.Generator) -> bool:
    if len(plan.move_source) < 2:
        return False
    pair = rng.choice(len(plan.move_source), 2, replace=False)
    plan.move_destination[pair] = plan.move_destination[pair[::-1]]
    return True


@fault("source and destination swapped", PLAN, "I3")
def plan_swaps_ends(plan: StepPlan, rng: np.random.Generator) -> bool:
    plan.move_source, plan.move_destination = plan.move_destination, plan.move_source
    return len(plan.move_source) > 0


@fault("a row left as it was", PLAN, "I1 or I3")
def plan_leaves_a_row(plan: StepPlan, rng: np.random.Generator) -> bool:
    rows = np.flatnonzero(plan.rewrites_block_table)
    if not len(rows):
        return False
    plan.rewrites_block_table[rng.choice(rows)] = False
    return True


@fault("a row in another order", PLAN, "I3")
def plan_turns_a_row_round(plan: StepPlan, rng: np.random.Generator) -> bool:
    """Swap two blocks of a row; a fault only where the row has two."""
    for r in np.flatnonzero(plan.rewrites_block_table):
        row = plan.kept_of(r)
        if len(row) >= 2:
            row[0], row[-1] = row[-1], row[0]
            return True
    return False


@fault("slot reuse off by one", PLAN, "I3")
def plan_reuses_the_next_slot(plan: StepPlan, rng: np.random.Generator) -> bool:
    r = np.flatnonzero(plan.new_token_index >= 0)
    plan.new_token_index[r[:1]] += 1
    return len(r) > 0


@fault("a length off by one", PLAN, "I2 or I3")
def plan_miscounts_a_length(plan: StepPlan, rng: np.random.Generator) -> bool:
    r = np.flatnonzero(plan.num_reclaimed > 0)
    plan.num_reclaimed[r[:1]] -= 1
    return len(r) > 0


@fault("a live bit flipped", PLAN, "I3")
def plan_flips_a_live_bit(plan: StepPlan, rng: np.random.Generator) -> bool:
    if not len(plan.mask_bits):
        return False
    plan.mask_bits[0] ^= 1 << int(rng.integers(4))
    return True

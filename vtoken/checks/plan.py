"""What the scheduler tells the workers about a step that is to be checked."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class RequestCheck:
    """One request whose layout changes in this step.

    Attributes:
        victims: int32, ids evicted in this step.
        ids_before, ids_after: int32, logical id by physical index, -1 for a hole; before the
            step, and after it with the step's new tokens.
        first_id: the step computes ids from here on; all below were computed before.
        relocates: KV moves or blocks are released: a relocation event.
    """

    req_id: str
    victims: np.ndarray
    ids_before: np.ndarray
    ids_after: np.ndarray
    first_id: int
    relocates: bool


@dataclass(slots=True)
class Arrival:
    """A request, as far as a replay needs it.

    Attributes:
        step_seq: when it was first scheduled.
        prompt_token_ids: int32; kept for long, and a list takes nine times the memory.
    """

    step_seq: int
    req_id: str
    prompt_token_ids: np.ndarray
    max_tokens: int


@dataclass(slots=True)
class CheckPlan:
    """Rides on a SchedulerOutput beside the StepPlan; pickled to every rank."""

    step_seq: int
    requests: list[RequestCheck] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)


def first_ids(scheduler_output) -> dict[str, int]:
    """Tokens that each scheduled request had computed before the step: the first id it computes."""
    cached = scheduler_output.scheduled_cached_reqs
    first = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    first.update((r.req_id, r.num_computed_tokens) for r in scheduler_output.scheduled_new_reqs)
    return first

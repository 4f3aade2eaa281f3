"""What every request attended to in every step: enough to replay a run on a reference model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class TraceEntry:
    """What one request attended to in one step.

    Attributes:
        first_id, num_new_tokens: the step computed ids first_id .. first_id + num_new_tokens - 1.
        live_ids: int32, ids < first_id that were live in that step, ascending.
        num_preemptions: how often the request had been preempted: KV before that is gone.
        num_blocks: distinct blocks the request held in that step.
        is_sampled: the step drew a token; a chunk of a prompt, or of output that is computed again
            after a preemption, does not.
    """

    req_id: str
    step_seq: int
    first_id: int
    num_new_tokens: int
    live_ids: np.ndarray
    num_preemptions: int
    num_blocks: int
    is_sampled: bool = True


@dataclass(slots=True)
class Trace:
    """Attributes:
    entries: of every scheduled request and step; whoever reads them may take them away.
    """

    entries: list[TraceEntry] = field(default_factory=list)

    def add(
        self, step_seq: int, num_scheduled: Mapping[str, int], requests: Mapping[str, Any]
    ) -> None:
        """Take in a step.

        Args:
            num_scheduled: tokens by request.
            requests: `vtoken.scheduling.requests.RunningRequest` by id, after placement.
        """
        for req_id, n in num_scheduled.items():
            state, request = requests[req_id], requests[req_id].request
            first = request.num_computed_tokens
            live = state.sync(first + n).live_ids()
            known = request.num_tokens + request.num_output_placeholders
            self.entries.append(
                TraceEntry(
                    req_id=req_id,
                    step_seq=step_seq,
                    first_id=first,
                    num_new_tokens=n,
                    live_ids=live[live < first],
                    num_preemptions=request.num_preemptions,
                    num_blocks=sum(not b.is_null for b in state.blocks),
                    is_sampled=first + n == known,
                )
            )

"""Modelled time of a dry engine: what its steps would have taken on a device.

Nothing here is measured: a clock adds up `cost_model.step_time_s` over the steps that the real
scheduler decided on. Attention reads live tokens, and in mode `naive` also the holes of the blocks
it holds; relocation's copies are charged to the step they ride in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vtoken.experiments.planning.cost_model import CostProfile, StepWork, decode_work, step_time_s
from vtoken.experiments.planning.model_shapes import ModelShape


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What a step costs: a device's profile and a model's shape."""

    profile: CostProfile
    model: ModelShape
    tensor_parallel_size: int = 1

    def seconds(self, work: StepWork) -> np.ndarray:
        """float64[S], modelled seconds of each step."""
        return step_time_s(
            self.profile, self.model, work, tensor_parallel_size=self.tensor_parallel_size
        )

    def decode_s(self, num_seqs: float, kv_tokens: float) -> float:
        """Modelled seconds of one decode step."""
        return float(self.seconds(decode_work(num_seqs, kv_tokens)))


class ModelledClock:
    """Listens to a dry engine and keeps its time.

    Attributes:
        now_s: modelled seconds since the start; the owner may set it forward while idle.
        busy_s: modelled seconds spent in steps.
    """

    def __init__(self, engine, cost: StepCost) -> None:
        self.engine, self.cost = engine, cost
        self.now_s = self.busy_s = 0.0
        self._read_tokens = 0.0  # slots that the last step's attention read
        self._moved_tokens = 0
        engine.step_listeners.append(self._step)
        engine.bulk_listeners.append(self._stretch)

    def steps_before(self, time_s: float) -> int:
        """Decode steps that are certain to begin before a time; at least 1.

        Steps get dearer as contexts grow: the dearest of them is counted for all.
        """
        num_seqs, left_s = len(self.engine.scheduler.running), time_s - self.now_s
        if not num_seqs or left_s <= 0:
            return 1
        steps = left_s / self.cost.decode_s(num_seqs, self._read_tokens)
        # Moved tokens and what else a step may hold is far below this margin.
        last_s = 1.02 * self.cost.decode_s(num_seqs, self._read_tokens + num_seqs * (steps + 1))
        return max(1, int(min(left_s / last_s, 1e6)))

    def _step(self, output) -> None:
        scheduler, hooks = self.engine.scheduler, self.engine.hooks
        states = hooks.requests.by_id if hooks is not None else {}
        sampled = new = read = pairs = 0.0
        for req_id, n in output.num_scheduled_tokens.items():
            request = scheduler.requests[req_id]
            state = states.get(req_id)
            kv = request.num_computed_tokens
            if state is not None:
                kv += len(state.table.holes) - state.table.num_evicted_tokens
            new += n
            read += kv
            pairs += n * (kv - n) + n * (n + 1) / 2
            sampled += request.num_computed_tokens >= request.num_tokens
        if not new:
            return
        moved = self.engine.counters.moved_tokens if hooks is not None else 0
        work = StepWork(
            num_seqs=sampled, num_new_tokens=new, kv_read_tokens=read, attn_pairs=pairs,
            moved_tokens=max(0, moved - self._moved_tokens),
        )  # fmt: skip
        self._moved_tokens, self._read_tokens = moved, read
        self._spend(float(self.cost.seconds(work)))

    def _stretch(self, steps) -> None:
        work = decode_work(steps.num_running, steps.read_tokens, steps.moved_tokens)
        self._read_tokens = float(steps.read_tokens[-1])
        if self.engine.hooks is not None:
            self._moved_tokens = self.engine.counters.moved_tokens
        self._spend(float(np.sum(self.cost.seconds(work))))

    def _spend(self, seconds: float) -> None:
        self.now_s += seconds
        self.busy_s += seconds

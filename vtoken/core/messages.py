"""What crosses between the scheduler and the workers: one attribute each way.

scheduler_output.vtoken        StepPlan (`vtoken.core.events`), None where nothing changes
model_runner_output.vtoken     WorkerReport, absent where there is nothing to say
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class ScoreReport:
    """Scores that a worker kept, sent back after a step.

    Attributes:
        step_seq: the step whose attention produced the scores.
        req_ids: R requests; scores[start[r]:start[r+1]] float32, one per physical index.
    """

    step_seq: int
    req_ids: list[str]
    start: np.ndarray
    scores: np.ndarray

    @classmethod
    def of_parts(cls, step_seq: int, req_ids: list[str], parts: list[np.ndarray]) -> ScoreReport:
        """Join the scores of each request."""
        start = np.concatenate([[0], np.cumsum([len(p) for p in parts])]).astype(np.int32)
        return cls(step_seq, list(req_ids), start, np.concatenate(parts))


@dataclass(slots=True)
class WorkerReport:
    """What the first worker says after a step.

    Attributes:
        scores: of the requests that the step's plan asked for.
        relocation_ns: spent on copies since the last report.
        check_counts: [events, violations] by invariant so far, where a checker has news.
    """

    scores: ScoreReport | None = None
    relocation_ns: int = 0
    check_counts: dict[str, list[int]] | None = None

    def __bool__(self) -> bool:
        return bool(self.scores is not None or self.relocation_ns or self.check_counts is not None)

"""Score reports on their way from the workers to the policies.

The scheduler asks for a request's scores in step s and keeps, with the question, which logical id
sat at each physical index in that step. The worker answers with one float32 per physical index.
Together they are scores tagged by logical id, whatever has moved since. A decision in step s + 2
uses exactly the report of step s, under synchronous and asynchronous scheduling alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

KEEP_STEPS = 3


@dataclass(slots=True)
class ScoreReport:
    """What a worker sends back after a step.

    Attributes:
        step_seq: the step whose attention produced the scores.
        req_ids: R requests; scores[start[r]:start[r+1]] float32, one per physical index.
    """

    step_seq: int
    req_ids: list[str]
    start: np.ndarray
    scores: np.ndarray


class ReportBook:
    """Questions asked and answers received, by request and step."""

    def __init__(self) -> None:
        self._ids: dict[tuple[str, int], np.ndarray] = {}
        self._scores: dict[tuple[str, int], np.ndarray] = {}
        self._asked_at: dict[str, int] = {}

    def asked_at(self, req_id: str) -> int:
        """The last step in which this request's scores were asked for; -1: never."""
        return self._asked_at.get(req_id, -1)

    def ask(self, req_id: str, step_seq: int, ids_by_index: np.ndarray) -> None:
        """Remember the layout that a question of this step is about."""
        self._ids[req_id, step_seq] = ids_by_index
        self._asked_at[req_id] = step_seq
        for book in (self._ids, self._scores):
            book.pop((req_id, step_seq - KEEP_STEPS), None)

    def ids_asked(self, req_id: str, step_seq: int) -> np.ndarray:
        """int32[n], the logical id at each physical index that a question is about."""
        return self._ids[req_id, step_seq]

    def receive(self, report: ScoreReport) -> None:
        """Take in a report; answers to forgotten questions are dropped."""
        for r, req_id in enumerate(report.req_ids):
            key = (req_id, report.step_seq)
            if key in self._ids:
                self._scores[key] = report.scores[report.start[r] : report.start[r + 1]]

    def scores_for(self, req_id: str, step_seq: int, num_ids: int) -> np.ndarray | None:
        """float32[num_ids] by logical id, NaN where the report has none; None: no report."""
        ids, scores = self._ids.get((req_id, step_seq)), self._scores.get((req_id, step_seq))
        if ids is None or scores is None:
            return None
        assert len(ids) == len(scores), (req_id, step_seq, len(ids), len(scores))
        out = np.full(num_ids, np.nan, np.float32)
        live = ids >= 0
        out[ids[live]] = scores[live]
        return out

    def forget(self, req_id: str) -> None:
        """Drop all questions and answers about a request."""
        self._asked_at.pop(req_id, None)
        for book in (self._ids, self._scores):
            for key in [k for k in book if k[0] == req_id]:
                del book[key]

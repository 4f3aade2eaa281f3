"""Score reports on their way from the workers to the policies.

The scheduler asks for a request's scores in step s and knows, with the question, which logical id
sat at each physical index in that step: the table says so until the request's layout changes, and
before it does the ids are copied out. The worker answers with one float32 per physical index.
Together they are scores tagged by logical id, whatever has moved since. A decision in step s + 2
uses exactly the report of step s, under synchronous and asynchronous scheduling alike (a prompt whose
chunk had to wait uses its last chunk's: nothing attended since). A token
that the report does not know (it is younger) has no score, and is not evictable yet.

What a score is made of (`vtoken.policies.base.score_window` says it for results):

* Prompt queries: the last `--score-queries` of every chunk, or all; for `last` kinds one.
* Decode queries: all.
* A token that came from the prefix cache starts at zero, as though it had been written now: its
  score is what this request's own queries gave it. Which request computed it, and what that one
  went through since, does not matter. Only while another request holds the block does the count
  go on, and both give to it; such a token cannot be evicted meanwhile. Key norms are a property
  of the key and stay.
* Preemption: the KV is gone and so are its scores. Recomputation is a prefill, and scores begin
  with its queries; reports about the life before are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vtoken.core.messages import ScoreReport
from vtoken.core.ops import ScoredIds
from vtoken.core.table import RequestTable

KEEP_STEPS = 3


@dataclass(slots=True)
class Question:
    """What a report will be about: the layout of a request in the step that it was asked in.

    Attributes:
        count: physical length in that step.
        ids: int32[count], the logical id at each physical index; None while the table says so:
            growth comes behind them.
    """

    table: RequestTable
    count: int
    ids: np.ndarray | None = None

    def by_index(self) -> np.ndarray:
        """int32[count], logical ids, -1 for a hole."""
        return self.table.ids_by_physical_index()[: self.count] if self.ids is None else self.ids


class ReportBook:
    """Questions asked and answers received, by request and step."""

    def __init__(self, sync: Callable[[str], object] = lambda req_id: None) -> None:
        """Args:
        sync: brings a request's table in step with the request.
        """
        self._sync = sync
        self._questions: dict[str, dict[int, Question]] = {}
        # By request and step: (array, start, end) of the request's part of it.
        self._scores: dict[str, dict[int, tuple[np.ndarray, int, int]]] = {}

    def __len__(self) -> int:
        return sum(len(asked) for asked in self._questions.values())

    def asked_at(self, req_id: str) -> int:
        """The last step in which this request's scores were asked for; -1: never."""
        return max(self._questions.get(req_id, ()), default=-1)

    def ask(self, req_id: str, step_seq: int, table: RequestTable, length: int) -> None:
        """Remember that a question of this step is about the layout as it is now.

        Args:
            table: the request's; what was appended last need not be in it yet.
            length: logical length after the step.
        """
        asked = self._questions.setdefault(req_id, {})
        answered = self._scores.setdefault(req_id, {})
        for old in [s for s in asked if s <= step_seq - KEEP_STEPS]:
            del asked[old]
            answered.pop(old, None)
        grown = max(0, length - table.num_computed_tokens)
        asked[step_seq] = Question(table, table.num_physical_tokens + grown)

    def hold(self, req_id: str, served_step: int = -1) -> None:
        """A request's layout is about to change: copy out what open questions are about.

        Args:
            served_step: questions up to this step are of no more use, and are dropped.
        """
        for step, question in list(self._questions.get(req_id, {}).items()):
            if step <= served_step:
                del self._questions[req_id][step]
                self._scores[req_id].pop(step, None)
            elif question.ids is None:
                question.ids = self._by_index(req_id, question)

    def _by_index(self, req_id: str, question: Question) -> np.ndarray:
        if question.ids is None and question.table.num_physical_tokens < question.count:
            self._sync(req_id)
        return question.by_index()

    def ids_asked(self, req_id: str, step_seq: int) -> np.ndarray | None:
        """int32[n], the logical id at each physical index a question is about; None: not asked."""
        question = self._questions.get(req_id, {}).get(step_seq)
        return None if question is None else self._by_index(req_id, question)

    def receive(self, report: ScoreReport) -> None:
        """Take in a report; answers to forgotten questions are dropped."""
        step_seq, start = report.step_seq, report.start.tolist()
        scores = np.ascontiguousarray(report.scores, np.float32)
        for r, req_id in enumerate(report.req_ids):
            if step_seq in self._questions.get(req_id, ()):
                self._scores[req_id][step_seq] = (scores, start[r], start[r + 1])

    def has(self, req_id: str, step_seq: int) -> bool:
        """Whether the report of this step is there."""
        return step_seq in self._scores.get(req_id, ())

    def scored_ids(self, req_id: str, step_seq: int) -> ScoredIds | None:
        """The report of one step as it came, by physical index; None: no report.

        Ids that are None are the table's: while it is in step with the request, and until its
        layout changes.
        """
        scores = self._scores.get(req_id, {}).get(step_seq)
        if scores is None:
            return None
        question = self._questions[req_id][step_seq]
        array, start, end = scores
        assert question.count == end - start, (req_id, step_seq, question.count, start, end)
        return ScoredIds(question.ids, array, start, question.count)

    def forget(self, req_id: str) -> None:
        """Drop all questions and answers about a request."""
        self._questions.pop(req_id, None)
        self._scores.pop(req_id, None)

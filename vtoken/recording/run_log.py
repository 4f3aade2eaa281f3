"""What a run writes down, and what it follows: the side of the files that a scheduler calls.

RunLog.open(...)   None unless one of --record-decisions, --replay-decisions, --record-scores
                   is given, so that a run without them pays nothing
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.core.budget import Budget
from vtoken.core.messages import ScoreReport
from vtoken.errors import ConfigError
from vtoken.policies.base import score_window
from vtoken.recording.decisions import (
    DecisionRecorder,
    DecisionReplay,
    RequestKeys,
    Track,
    decisions_header,
)
from vtoken.recording.score_files import ScoreRecorder

DRY_MODEL_PREFIX = "vtoken-dry-"  # folder of a model that is not there


class RunLog:
    """Recorder and replay of one scheduler.

    Attributes:
        keys: what requests are called in the files.
        replay: recorded decisions to follow, or None.
    """

    def __init__(self, config: VTokenConfig, budget: Budget, *, model: str, block_size: int):
        name = Path(model).name
        name = None if name.startswith(DRY_MODEL_PREFIX) else name
        header = decisions_header(config, budget, model=name, block_size=block_size)
        self.keys = RequestKeys()
        self.replay = self._decisions = self._scores = None
        if config.replay_decisions:
            self.replay = DecisionReplay(config.replay_decisions, header)
        if config.record_decisions:
            self._decisions = DecisionRecorder(config.record_decisions, header)
        if config.record_scores:
            window = score_window(budget.policy.score_kind, config.score_queries)
            self._scores = ScoreRecorder(config.record_scores, {**header, **window})
        self._tracks: dict[str, Track] = {}
        self._done_at: dict[str, int] = {}  # last length at which ids of a request died

    @classmethod
    def open(
        cls,
        config: VTokenConfig,
        budget: Budget | None,
        *,
        model: str,
        block_size: int,
        num_engines: int = 1,
    ) -> RunLog | None:
        """Open the files that a config names; None where it names none or nothing is evicted.

        Args:
            num_engines: data-parallel replicas.

        Raises:
            ConfigError: a file cannot be read or written, or does not fit the config.
        """
        if budget is None or not config.run_files:
            return None
        if num_engines > 1:
            raise ConfigError(
                "--data-parallel-size", num_engines,
                "1 with recorded or replayed decisions and scores: there is one file, and which "
                "replica serves a request changes from run to run",
            )  # fmt: skip
        return cls(config, budget, model=model, block_size=block_size)

    # ---- the life of a request -------------------------------------------------------------

    def arrive(self, request) -> None:
        """A request enters the scheduler.

        Raises:
            ConfigError: decisions are replayed, and none were recorded of such a request.
        """
        key = self.keys.arrive(request.request_id, request.prompt_token_ids)
        if self.replay is not None:
            self.replay.track(key, 0)

    def start(self, request) -> None:
        """A request is scheduled for the first time, or again after a preemption.

        Raises:
            ConfigError: it comes with more prefix-cache hits than the recorded decisions allow.
        """
        if self.replay is None:
            return
        req_id = request.request_id
        key = self.keys.of(req_id)
        self._tracks[req_id] = track = self.replay.track(key, request.num_preemptions)
        self.replay.check_start(key, track, request.num_computed_tokens)

    def end(self, request) -> None:
        """A request's blocks are being freed: it finished, or is preempted."""
        req_id, finished = request.request_id, request.is_finished()
        self._tracks.pop(req_id, None)
        self._done_at.pop(req_id, None)
        if self._decisions is not None:
            self._decisions.ended(
                self.keys.of(req_id), request.num_preemptions, request.num_computed_tokens,
                "finished" if finished else "preempted",
            )  # fmt: skip
        if finished:
            self.keys.forget(req_id)
        self.flush()

    # ---- decisions -------------------------------------------------------------------------

    def cut_chunk(self, request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """New tokens that a chunk may have without running over a recorded length."""
        if self.replay is None:
            return num_new_tokens
        key = self.keys.of(request.request_id)
        track = self.replay.track(key, request.num_preemptions)
        return track.cut(num_computed_tokens, num_new_tokens)

    def next_length(self, req_id: str, num_computed_tokens: int) -> int | None:
        """Logical length, from now on, at which recorded ids die; None: the policy decides."""
        if self.replay is None:
            return None
        # Executed, but passed over by the scheduler in that step: still at the same length.
        done = self._done_at.get(req_id) == num_computed_tokens
        return self.replay.due(
            self.keys.of(req_id), self._tracks[req_id], num_computed_tokens + done
        )

    def victims(self, req_id: str, length: int, evictable: np.ndarray) -> np.ndarray:
        """int32[K], the ids that died at exactly this recorded length.

        Args:
            evictable: int32, live ids that are in no block of another request.

        Raises:
            ConfigError: one of them cannot die now.
        """
        key, track = self.keys.of(req_id), self._tracks[req_id]
        ids = track.ids_at(length)
        self.replay.check_ids(key, length, ids, evictable)
        return ids

    def died(self, request, length: int, ids: np.ndarray) -> None:
        """Ids of a request were evicted at this logical length."""
        self._done_at[request.request_id] = length
        if self._decisions is not None:
            key = self.keys.of(request.request_id)
            self._decisions.died(key, request.num_preemptions, length, ids)

    # ---- scores ----------------------------------------------------------------------------

    def take_scores(
        self,
        report: ScoreReport,
        ids_asked: Callable[[str, int], np.ndarray | None],
        requests: Mapping[str, Any],
    ) -> None:
        """Write a report down.

        Args:
            ids_asked: (request, step) -> the logical id at each physical index then.
        """
        if self._scores is None:
            return
        for r, req_id in enumerate(report.req_ids):
            ids = ids_asked(req_id, report.step_seq)
            if ids is not None:
                self._scores.add(
                    self.keys.of(req_id),
                    requests[req_id].num_preemptions,
                    ids,
                    report.scores[report.start[r] : report.start[r + 1]],
                )

    def flush(self) -> None:
        """Write out what waits; at the end of a step, and when a request has ended."""
        for recorder in (self._decisions, self._scores):
            if recorder is not None:
                recorder.flush()

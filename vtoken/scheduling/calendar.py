"""Which requests have to be looked at in a step, so that the others cost nothing.

A decoding request grows by at most one token a step: when it is due at a length, it need not be
looked at before that many steps have passed. Requests of which more can happen (a prompt's chunks,
blocks shared with others) are watched: looked at in every step.
"""

from __future__ import annotations

from collections.abc import Iterable


class Calendar:
    """Attributes:
    watched: requests to look at in this step, in the order in which they came; values are None.
    """

    def __init__(self) -> None:
        self.watched: dict[str, None] = {}
        self._step_of: dict[str, int] = {}
        self._deferred: dict[int, dict[str, None]] = {}  # by step

    def open(self, step_seq: int) -> None:
        """Watch the requests that were deferred until this step. Steps come one after another."""
        for req_id in self._deferred.pop(step_seq, ()):
            del self._step_of[req_id]
            self.watched[req_id] = None

    def watch(self, req_id: str) -> None:
        """Look at a request in every step from now on."""
        self._undo(req_id)
        self.watched[req_id] = None

    def watch_all(self, req_ids: Iterable[str]) -> None:
        """Lengths moved on in another way than a token a step: look at all of these again."""
        for req_id in req_ids:
            self.watch(req_id)

    def defer(self, req_id: str, step_seq: int | None) -> None:
        """Look at a watched request no more before this step; None: not before `watch`."""
        self.watched.pop(req_id, None)
        self._undo(req_id)
        if step_seq is not None:
            self._step_of[req_id] = step_seq
            self._deferred.setdefault(step_seq, {})[req_id] = None

    def forget(self, req_id: str) -> None:
        """A request is gone."""
        self.watched.pop(req_id, None)
        self._undo(req_id)

    def _undo(self, req_id: str) -> None:
        """Take back until when a request was deferred; nothing of it stays, however far that was."""
        step_seq = self._step_of.pop(req_id, None)
        if step_seq is not None:
            deferred = self._deferred[step_seq]
            del deferred[req_id]
            if not deferred:
                del self._deferred[step_seq]

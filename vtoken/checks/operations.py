"""The recorded trace of what touches KV in a step, and the order it must have (I3).

    move       the step's relocation copies           slots = sources, other = destinations
    zero       blocks handed out are cleared          slots
    copy       vLLM's copy-on-write of whole blocks   slots = destinations, other = sources
    write      K and V of the step's new tokens       slots
    attention  the step's first layer reads           no slots: it reads all live ones

Recorded where it happens (around the copy kernel, the layers' KV update, ...), not where it is
planned: two of the same step are ordered by when they ran.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NO_SLOTS = np.empty(0, np.int64)
KEEP_OPERATIONS = 64


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation; `slots` are those it writes, for a move those it reads."""

    step_seq: int
    kind: str
    slots: np.ndarray
    other: np.ndarray

    def summary(self) -> dict[str, object]:
        """For a report: at most 64 slots."""
        row = {"step": self.step_seq, "kind": self.kind, "num_slots": len(self.slots)}
        row["slots"] = self.slots[:64].tolist()
        if len(self.other):
            row["other"] = self.other[:64].tolist()
        return row


class OperationLog:
    """The last operations, and all of the current step."""

    def __init__(self) -> None:
        self.step_seq = -1
        self.current: list[Operation] = []
        self._past: deque[Operation] = deque(maxlen=KEEP_OPERATIONS)

    def begin_step(self, step_seq: int) -> None:
        self._past.extend(self.current)
        self.step_seq, self.current = step_seq, []

    def record(self, kind: str, slots: np.ndarray = NO_SLOTS, other: np.ndarray = NO_SLOTS) -> None:
        self.current.append(Operation(self.step_seq, kind, slots, other))

    def recent(self) -> list[Operation]:
        """The last operations, oldest first."""
        return [*self._past, *self.current][-KEEP_OPERATIONS:]


def check_order(
    operations: Sequence[Operation], source: np.ndarray, destination: np.ndarray
) -> list[str]:
    """I3: a step's planned moves ran before attention, and nothing touched their slots too early.

    Args:
        operations: of one step in the order they ran, up to its attention or beyond.
        source, destination: int64[M], the moves that were planned.

    Returns:
        What is wrong, in sentences.
    """
    wrong: list[str] = []
    moved: set[int] = set()  # indices into operations
    attention = len(operations)
    for i, op in enumerate(operations):
        if op.kind == "move":
            moved.add(i)
            if attention < i:
                wrong.append(f"{len(op.slots)} moves ran after attention had read")
        elif op.kind == "attention":
            attention = min(attention, i)
    before = [operations[i] for i in sorted(moved) if i < attention]
    done = np.concatenate([op.other for op in before]) if before else NO_SLOTS
    late = np.setdiff1d(destination, done)
    if len(late) and not wrong:
        wrong.append(f"attention reads slots {late[:8].tolist()} before their copy has run")
    last_move = max((i for i in moved if i < attention), default=attention)
    for i, op in enumerate(operations[:attention]):
        if op.kind in ("zero", "copy", "write"):
            early = i < last_move
            guarded = np.concatenate([source, destination]) if early else destination
            hit = np.intersect1d(op.slots, guarded)
            if len(hit):
                when = "before their copy has run" if early else "after a token was moved there"
                wrong.append(f"a {op.kind} touches slots {hit[:8].tolist()} {when}")
    return wrong

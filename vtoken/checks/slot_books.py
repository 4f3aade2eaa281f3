"""What the worker knows of its slots by itself: the id in each, the hash of its K and V.

Kept by listening to the calls that touch KV, below all plans.

Legend: M slots, S slots of the pool.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vtoken.checks.operations import NO_SLOTS, OperationLog


class SlotBooks:
    """Books over the slots of one worker, and the trace of what touched them.

    Attributes:
        labels: int32[S], the logical id that the worker last put in each slot; -1: not known.
        records: uint32[S], the hash of what was computed for it; valid where `recorded`.
        written: int64[M], slots of the step's new tokens until they are recorded.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.block_size = block_size
        self.labels = np.full(num_slots, -1, np.int32)
        self.records = np.zeros(num_slots, np.uint32)
        self.recorded = np.zeros(num_slots, bool)
        self.written = NO_SLOTS
        self.log = OperationLog()
        self._undo: list[tuple[object, str, Callable]] = []

    def listen(self, runner, attention) -> None:
        """Note moves, zeroing, KV writes and attention where they happen."""
        first = attention.layers[0].impl
        self._after(attention, "move", self._note_move)
        self._after(runner, "_zero_block_ids", self._note_zero)
        self._after(first, "do_kv_cache_update", lambda *_, **__: self._note_write())
        self._after(first, "forward", lambda *_, **__: self.log.record("attention"))

    def _after(self, owner, name: str, note: Callable) -> None:
        """Call `note` with the arguments of every call of a method, once it is done."""
        inner = getattr(owner, name)

        def watched(*args, **kwargs):
            out = inner(*args, **kwargs)
            note(*args, **kwargs)
            return out

        setattr(owner, name, watched)
        self._undo.append((owner, name, inner))

    def stop(self) -> None:
        """Listen no more."""
        for owner, name, inner in reversed(self._undo):
            setattr(owner, name, inner)
        self._undo.clear()

    def _note_move(self, source: np.ndarray, destination: np.ndarray) -> None:
        self.log.record("move", source, destination)
        self._copy(source, destination)

    def _note_zero(self, block_ids) -> None:
        slots = self._block_slots(block_ids)
        self.log.record("zero", slots)
        self.labels[slots] = -1
        self.recorded[slots] = False

    def _note_write(self) -> None:
        self.log.record("write", self.written)

    def note_block_copies(self, copies) -> None:
        """vLLM's copy-on-write of blocks, which `_update_states` ran after zeroing."""
        source = self._block_slots([c.src_block_id for c in copies])
        destination = self._block_slots([c.dst_block_id for c in copies])
        self.log.record("copy", destination, source)
        self._copy(source, destination)

    def expect_tokens(self, slots: np.ndarray, ids: np.ndarray) -> None:
        """The step is about to compute these tokens into these slots."""
        self.labels[slots] = ids
        self.recorded[slots] = False
        self.written = slots

    def _copy(self, source: np.ndarray, destination: np.ndarray) -> None:
        for book in (self.labels, self.records, self.recorded):
            book[destination] = book[source]

    def _block_slots(self, block_ids) -> np.ndarray:
        blocks = np.asarray(block_ids, np.int64)
        return (blocks[:, None] * self.block_size + np.arange(self.block_size)).reshape(-1)

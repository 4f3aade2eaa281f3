"""Bytes of metadata per token, on the host and on the device, and how often layouts are rebuilt.

Whatever arrays hang on the objects are counted, by walking over them: an array that is added
later counts without a change here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from vtoken.experiments.profile.rows import Row, make_row


def arrays_of(*things: object, leave_out: object = None) -> list[object]:
    """Distinct numpy arrays and torch tensors reachable through vToken's objects and containers.

    Views count as the array they look into. What is reached through `leave_out` alone does not.
    """
    found: dict[int, object] = {}
    seen: set[int] = {id(leave_out)}
    waiting = list(things)
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, np.ndarray):
            while isinstance(thing.base, np.ndarray):
                thing = thing.base
            found[id(thing)] = thing
        elif hasattr(thing, "untyped_storage"):
            found[thing.untyped_storage().data_ptr()] = thing
        else:
            waiting.extend(_parts(thing))
    return list(found.values())


def _parts(thing: object) -> Iterable[object]:
    if isinstance(thing, dict):
        return thing.values()
    if isinstance(thing, (list, tuple, set)):
        return thing
    if type(thing).__module__.startswith("vtoken.") and not isinstance(thing, type):
        return _attributes(thing)
    return ()


def _attributes(thing: object) -> Iterator[object]:
    yield from getattr(thing, "__dict__", {}).values()
    for cls in type(thing).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(thing, name):
                yield getattr(thing, name)


def num_bytes(arrays: Iterable[object]) -> int:
    """Bytes that arrays and tensors take."""
    total = 0
    for array in arrays:
        is_tensor = hasattr(array, "untyped_storage")
        total += array.untyped_storage().nbytes() if is_tensor else array.nbytes
    return total


def host_bytes(hooks) -> int:
    """Bytes of the token tables, as allocated: room for growth counts.

    The buffers of the compiled operations do not: there is one set of them, whatever is running.
    """
    return num_bytes(arrays_of(hooks.requests.tables))


def device_rows(engine) -> Iterator[Row]:
    """Rows about a real engine with running requests: bytes per slot of the KV pool.

    `kept` is what lasts from step to step (the score of each slot, and a mask where a request has
    holes); `scratch` is what a step's score sums are gathered in.
    """
    attention, num_slots = engine.runner.vtoken_attention, attention_slots(engine)
    kept = num_bytes(arrays_of(attention.scores))
    scratch = num_bytes(arrays_of(attention.step_scores))
    yield make_row("metadata/device/scores", "bytes/slot", value=kept / num_slots)
    yield make_row("metadata/device/scratch", "bytes/slot", value=scratch / num_slots)
    masks = arrays_of(engine.runner.vtoken_layouts.masks)
    covered = sum(len(m) for m in masks)
    value = num_bytes(masks) / covered if covered else 0.0
    yield make_row("metadata/device/masks", "bytes/token", value=value, num_tokens=covered)


def attention_slots(engine) -> int:
    """Slots of the pool, the null block's included."""
    return engine.block_pool.num_gpu_blocks * engine.block_size


class LookupCounts:
    """Counts, from outside, what the workers' layouts had to do for each request and step.

    append: the request only grew, nothing crosses to the worker. rebuild: its block table or its
    mask is written anew. update: a slot or a length alone.
    """

    def __init__(self, engine) -> None:
        self.engine = engine
        self.num_appends = self.num_updates = self.num_rebuilds = 0
        engine.step_listeners.append(self._note)

    def stop(self) -> None:
        self.engine.step_listeners.remove(self._note)

    def _note(self, output) -> None:
        plan, scheduled = getattr(output, "vtoken", None), len(output.num_scheduled_tokens)
        named = 0 if plan is None else len(plan.req_ids)
        rebuilt = 0
        if named:
            rebuilt = int(
                (np.asarray(plan.rewrites_block_table) | (np.diff(plan.mask_start) > 0)).sum()
            )
        self.num_appends += scheduled - named
        self.num_rebuilds += rebuilt
        self.num_updates += named - rebuilt

    def rows(self, at: str) -> Iterator[Row]:
        """Rows, counted in request-steps."""
        total = self.num_appends + self.num_updates + self.num_rebuilds
        for name in ("appends", "updates", "rebuilds"):
            count = getattr(self, f"num_{name}")
            yield make_row(
                f"lookup/{name}/{at}", "request-steps", value=count, frac=count / max(1, total)
            )

"""Faults in the copy kernel and in the worker; see vtoken.verify.faults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from vtoken.verify.fault_base import HOLES, fault, replaced

# ---- in the copy kernel -------------------------------------------------------------------------


@contextmanager
def _kernel(engine, change) -> Iterator[None]:
    """Call `change(copy, kvs, source, destination, layout, scores)` instead of the copy kernel."""
    kernels = engine.runner.vtoken_attention.kernels
    stock = kernels.move

    def move(kvs, source, destination, *, layout, scores=(), **kwargs):
        def copy(kvs, source, destination, scores=scores):
            stock(kvs, source, destination, layout=layout, scores=scores, **kwargs)

        change(copy, kvs, source, destination, layout, scores)

    with replaced(kernels, "move", move):
        yield


@fault("a copy skipped", "I1.relocated")
def copy_skipped(engine):
    def change(copy, kvs, source, destination, layout, scores):
        copy(kvs, source[1:], destination[1:])
        for array in scores:
            array[destination[:1]] = array[source[:1]]

    with _kernel(engine, change):
        yield


@fault("K copied but not V", "I1.relocated")
def values_left(engine):
    def change(copy, kvs, source, destination, layout, scores):
        before = [layout.gather(kv, destination)[1] for kv in kvs]
        copy(kvs, source, destination)
        for kv, v in zip(kvs, before, strict=True):
            layout.scatter(kv, destination, layout.gather(kv, destination)[0], v)

    with _kernel(engine, change):
        yield


@fault("one layer missed", "I1.relocated")
def layer_missed(engine):
    with _kernel(engine, lambda copy, kvs, s, d, layout, scores: copy(kvs[:-1], s, d)):
        yield


@fault("source and destination swapped", "I1.relocated")
def swapped(engine):
    with _kernel(engine, lambda copy, kvs, s, d, layout, scores: copy(kvs, d, s)):
        yield


@fault("the score accumulator not moved", "scores")
def scores_left(engine):
    with _kernel(engine, lambda copy, kvs, s, d, layout, scores: copy(kvs, s, d, ())):
        yield


@fault("a neighbour's block overwritten", "I1.written")
def neighbour_overwritten(engine):
    runner, N = engine.runner, engine.block_size

    def change(copy, kvs, source, destination, layout, scores):
        copy(kvs, source, destination)
        planned = set(runner.vtoken_plan.req_ids)
        others = [
            r for r in runner.input_batch.req_ids if r not in planned and r in runner.requests
        ]
        for req_id in others[:1]:
            victim = (
                source[:1] * 0 + runner.requests[req_id].block_ids[0][0] * N
            )  # its id 0, a sink
            for kv in kvs:
                layout.scatter(kv, victim, *layout.gather(kv, source[:1]))

    with _kernel(engine, change):
        yield


# ---- in the worker ------------------------------------------------------------------------------


@fault("attention before the copy", "I3.order")
def attention_first(engine):
    runner, put_off = engine.runner, []
    move, sample = runner.vtoken_move, runner.sample_tokens

    def sample_tokens(*args, **kwargs):
        while put_off:
            move(*put_off.pop(0))
        return sample(*args, **kwargs)

    with (
        replaced(runner, "vtoken_move", lambda s, d: put_off.append((s, d))),
        replaced(runner, "sample_tokens", sample_tokens),
    ):
        yield


@fault("a block released before its copy", "I3.order")
def released_early(engine):
    """The next owner of a released block clears it while its tokens are still to be copied."""
    runner = engine.runner
    apply = runner._vtoken_apply

    def _vtoken_apply(scheduler_output):
        plan = getattr(scheduler_output, "vtoken", None)
        for r, req_id in enumerate(plan.req_ids if plan is not None else ()):
            if plan.rewrites_row[r]:
                row = np.asarray(runner.requests[req_id].block_ids[0])
                gone = np.setdiff1d(row, row[plan.row_of(r)])
                if len(gone):
                    runner._zero_block_ids(gone.tolist())
        apply(scheduler_output)

    with replaced(runner, "_vtoken_apply", _vtoken_apply):
        yield


@fault("a live bit flipped", "I1.ids", config=HOLES)
def live_bit_flipped(engine):
    layouts = engine.runner.vtoken_layouts
    apply = layouts.apply

    def flip(plan):
        apply(plan)
        for mask in layouts.masks.values():
            mask[0] = False  # id 0, a sink

    with replaced(layouts, "apply", flip):
        yield


@fault("a row rewritten in another order", "I2.worker")
def row_misordered(engine):
    runner = engine.runner
    rewrite = runner._vtoken_rewrite_row
    with replaced(
        runner, "_vtoken_rewrite_row", lambda r, kept, *rest: rewrite(r, kept[::-1], *rest)
    ):
        yield


@fault("positions taken from physical indices", "positions")
def physical_positions(engine):
    runner = engine.runner
    use = runner._vtoken_use_physical_lengths

    def use_physical(n, positions):
        index = use(n, positions)
        positions.copy_(index)
        return index

    with replaced(runner, "_vtoken_use_physical_lengths", use_physical):
        yield

"""Faults in the copy kernel and in the worker; see vtoken.verify.catalogue."""

from __future__ import annotations

import numpy as np

from vtoken.verify.fault import HOLES, KERNEL, WORKER, fault

# ---- in the copy kernel -------------------------------------------------------------------------


def _kernel(change) -> dict:
    """Call `change(copy, kvs, source, destination, layout, scores)` instead of the copy kernel."""

    def wrapper(stock):
        def move(kvs, source, destination, *, layout, scores=(), **kwargs):
            def copy(kvs, source, destination, scores=scores):
                stock(kvs, source, destination, layout=layout, scores=scores, **kwargs)

            change(copy, kvs, source, destination, layout, scores)

        return move

    return {"copy slots": wrapper}


@fault("a copy skipped", KERNEL, "I1.relocated")
def copy_skipped(engine):
    def change(copy, kvs, source, destination, layout, scores):
        copy(kvs, source[1:], destination[1:])
        for array in scores:
            array[destination[:1]] = array[source[:1]]

    return _kernel(change)


@fault("K copied but not V", KERNEL, "I1.relocated")
def values_left(engine):
    def change(copy, kvs, source, destination, layout, scores):
        before = [layout.gather(kv, destination)[1] for kv in kvs]
        copy(kvs, source, destination)
        for kv, v in zip(kvs, before, strict=True):
            layout.scatter(kv, destination, layout.gather(kv, destination)[0], v)

    return _kernel(change)


@fault("one layer missed", KERNEL, "I1.relocated")
def layer_missed(engine):
    return _kernel(lambda copy, kvs, s, d, layout, scores: copy(kvs[:-1], s, d))


@fault("source and destination swapped", KERNEL, "I1.relocated")
def swapped(engine):
    return _kernel(lambda copy, kvs, s, d, layout, scores: copy(kvs, d, s))


@fault("the score accumulator not moved", KERNEL, "scores")
def scores_left(engine):
    return _kernel(lambda copy, kvs, s, d, layout, scores: copy(kvs, s, d, ()))


@fault("a neighbour's block overwritten", KERNEL, "I1.written")
def neighbour_overwritten(engine):
    runner = engine.runner

    def change(copy, kvs, source, destination, layout, scores):
        copy(kvs, source, destination)
        others = [r for r in runner.input_batch.req_ids if r in runner.requests]
        for req_id in [r for r in others if r not in runner.vtoken_plan.req_ids][:1]:
            sink = runner.requests[req_id].block_ids[0][0] * engine.block_size  # its id 0
            for kv in kvs:
                layout.scatter(kv, source[:1] * 0 + sink, *layout.gather(kv, source[:1]))

    return _kernel(change)


# ---- in the worker ------------------------------------------------------------------------------


@fault("attention before the copy", WORKER, "I3.order")
def attention_first(engine):
    late = []

    def wrap_move(move):
        late_move.append(move)
        return lambda source, destination: late.append((source, destination))

    def wrap_sample(sample):
        def sample_tokens(*args, **kwargs):
            while late:
                late_move[0](*late.pop(0))
            return sample(*args, **kwargs)

        return sample_tokens

    late_move = []
    return {"move": wrap_move, "sample": wrap_sample}


@fault("a block released before its copy", WORKER, "I3.order")
def released_early(engine):
    """The next owner of a released block clears it while its tokens are still to be copied."""
    runner = engine.runner

    def wrapper(apply):
        def clear_first(scheduler_output):
            plan = getattr(scheduler_output, "vtoken", None)
            for r, req_id in enumerate(plan.req_ids if plan is not None else ()):
                if plan.rewrites_block_table[r]:
                    row = np.asarray(runner.requests[req_id].block_ids[0])
                    gone = np.setdiff1d(row, row[plan.kept_of(r)])
                    if len(gone):
                        runner._zero_block_ids(gone.tolist())
            apply(scheduler_output)

        return clear_first

    return {"apply plan": wrapper}


@fault("a live bit flipped", WORKER, "I1.ids", config=HOLES)
def live_bit_flipped(engine):
    masks = engine.runner.vtoken_layouts.masks

    def wrapper(apply):
        def flip(plan):
            apply(plan)
            for mask in masks.values():
                mask[0] = False  # id 0, a sink

        return flip

    return {"apply layouts": wrapper}


@fault("a row rewritten in another order", WORKER, "I2.worker")
def row_misordered(engine):
    def wrapper(rewrite):
        return lambda req_id, kept, *rest: rewrite(req_id, kept[::-1], *rest)

    return {"rewrite row": wrapper}


@fault("positions taken from physical indices", WORKER, "positions")
def physical_positions(engine):
    def wrapper(use):
        def use_physical(n, positions):
            index = use(n, positions)
            positions.copy_(index)
            return index

        return use_physical

    return {"use lengths": wrapper}

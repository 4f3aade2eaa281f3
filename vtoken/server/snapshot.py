"""The block pool and its requests at one moment, as one JSON object.

Made in the engine's process when somebody asks (`EngineCore.vtoken_state`), between two steps;
nobody looking costs nothing. Works with and without hooks: in `native` all that a request holds
is live.

    cells       the pool in order, at most MAX_CELLS of them, each `blocks_per_cell` blocks:
                [live, dead, tail, cached] slots; what is missing to the cell's size is free
    tail        slots at the end of a request's last block that nothing was written to yet
    cached      slots of free blocks that still hold a reusable prefix
    checks      under `hash_kv_every`: events and violations per invariant, as in `vtoken verify`
    reserved_blocks  what running requests are projected to hold at their peaks
"""

from __future__ import annotations

import time

import numpy as np

from vtoken.units import cdiv

MAX_CELLS = 2048
MAX_REQUESTS = 200


def snapshot(scheduler, engine_index: int = 0) -> dict:
    """Describe a scheduler's pool and requests in plain lists and numbers."""
    hooks = getattr(scheduler, "vtoken", None)
    manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    pool, N = scheduler.kv_cache_manager.block_pool, manager.block_size
    per_block = _Slots(pool.num_gpu_blocks)
    requests = [_request_row(scheduler, hooks, manager, r, per_block) for r in scheduler.running]
    cached = np.fromiter(
        (b.ref_cnt == 0 and b.block_hash is not None for b in pool.blocks), bool, len(pool.blocks)
    )
    per_block.cached[cached] = N
    usable = pool.num_gpu_blocks - 1  # block 0 is the null block
    step = max(1, cdiv(usable, MAX_CELLS))
    free = pool.get_num_free_blocks()
    live, dead = sum(r["live"] for r in requests), sum(r["dead"] for r in requests)
    num_cached = int(cached[1:].sum())
    return {
        "engine": engine_index,
        "time_s": time.time(),
        **_settings(hooks),
        "block_size": N,
        "blocks": {"usable": usable, "free": free, "cached": num_cached, "owned": usable - free},
        "tokens": {"live": live, "dead": dead},
        "fragmentation_ratio": dead / (live + dead) if live + dead else 0.0,
        "blocks_per_cell": step,
        "cells": per_block.cells(step),
        "num_running": len(scheduler.running),
        "num_waiting": len(scheduler.waiting),
        "requests": requests[:MAX_REQUESTS],
    }


def _settings(hooks) -> dict:
    """What the hooks say of themselves; without them the mode is native."""
    if hooks is None:
        found = dict.fromkeys(("step", "policy", "evict_when", "reserved_blocks", "checks"))
        return {**found, "mode": "native", "counters": {}}
    config = hooks.config
    return {
        "step": hooks.clock.seq,
        "mode": config.mode,
        "policy": config.policy if config.evicts else None,
        "evict_when": config.evict_when if config.evicts else None,
        "counters": hooks.counters.as_dict(),
        "reserved_blocks": hooks.admission.num_claimed,
        "checks": None if hooks.checker is None else hooks.checker.rows(),
    }


class _Slots:
    """Slots of each block, by what is in them."""

    def __init__(self, num_blocks: int) -> None:
        self.live, self.dead, self.tail, self.cached = np.zeros((4, num_blocks), np.int32)

    def cells(self, step: int) -> list[list[int]]:
        """int[C][4], sums over `step` blocks; the null block is left out."""
        all_kinds = np.stack([self.live, self.dead, self.tail, self.cached], axis=1)[1:]
        missing = -len(all_kinds) % step
        padded = np.pad(all_kinds, ((0, missing), (0, 0)))
        return padded.reshape(-1, step, 4).sum(axis=1).tolist()


def _request_row(scheduler, hooks, manager, request, per_block: _Slots) -> dict:
    req_id, N = request.request_id, manager.block_size
    blocks = manager.req_to_blocks.get(req_id, [])
    ids = np.array([b.block_id for b in blocks], np.int64)
    computed = request.num_computed_tokens
    state = hooks.requests.by_id.get(req_id) if hooks is not None else None
    if state is None:
        live_at = np.clip(computed - N * np.arange(len(ids)), 0, N)
        used_at, evicted, dead, moved = live_at, 0, 0, 0
    else:
        state.sync(computed)
        table = state.table
        live_at = np.asarray(table.live_per_block())
        used_at = np.clip(table.num_physical_tokens - N * np.arange(len(live_at)), 0, N)
        evicted, dead = table.num_evicted_tokens, len(table.holes)
        moved = state.num_moved
    n = min(len(ids), len(live_at))
    at, live_at, used_at = ids[:n], live_at[:n], used_at[:n]
    # A shared block is in several rows and has one content: the most that an owner sees in it.
    np.maximum.at(per_block.live, at, live_at)
    per_block.dead[at] = np.maximum(used_at - per_block.live[at], 0)
    per_block.tail[at] = N - per_block.live[at] - per_block.dead[at]
    per_block.tail[ids[n:]] = N
    for kind in (per_block.live, per_block.dead, per_block.tail):
        kind[0] = 0  # placeholders of `naive` point at the null block
    return {
        "id": req_id,
        "prompt_tokens": request.num_prompt_tokens,
        "output_tokens": request.num_output_tokens,
        "computed": computed,
        "live": computed - evicted,
        "dead": dead,
        "blocks": len(set(ids.tolist()) - {0}),
        "evicted": evicted,
        "moved": moved,
        "preemptions": request.num_preemptions,
    }

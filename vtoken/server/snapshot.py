"""The block pool and its requests at one moment, as one JSON object.

When somebody asks, `PoolView.copy` copies what is needed in the engine's process between two steps
(`EngineCore.vtoken_state`), and `describe` makes the object of it in the front end. Nobody looking
costs nothing, and a look well under a millisecond of the scheduler at 50,000 blocks and 200
requests: tables are copied as they lie, and vLLM's free blocks, which can only be asked one by one,
are asked SCAN_BLOCKS at a time. Works with and without our step: in `native` all that a request
holds is live.

    cells       the pool in order, at most MAX_CELLS of them, each `blocks_per_cell` blocks:
                [live, dead, tail, cached] slots; what is missing to the cell's size is free
    tail        slots at the end of a request's last block that nothing was written to yet
    cached      slots of free blocks that still hold a reusable prefix, as last asked
    checks      under `hash_kv_every`: events and violations per invariant, as in `vtoken verify`
    reserved_blocks  what running requests are projected to hold at their peaks
    requests    the first MAX_REQUESTS; ids are shortened, as whoever knows one may act on it
"""

from __future__ import annotations

import time
from array import array
from itertools import islice
from typing import Any

import numpy as np

from vtoken.core.arena import COLUMN
from vtoken.units import cdiv

MAX_CELLS = 2048
MAX_REQUESTS = 200
SCAN_BLOCKS = 512
TABLE_ARRAYS = ("block_table", "block_id", "live_in")


def snapshot(scheduler, engine_index: int = 0) -> dict:
    """Describe a scheduler's pool and requests once, every block asked."""
    return describe(PoolView(scheduler).copy(engine_index, scan_blocks=None))


def short_id(request_id: str) -> str:
    """Enough of an id to tell a request in a log, too little to act on it."""
    return request_id if len(request_id) <= 18 else f"{request_id[:13]}…{request_id[-4:]}"


class PoolView:
    """A scheduler that is looked at again and again."""

    def __init__(self, scheduler) -> None:
        self.scheduler, self.step = scheduler, getattr(scheduler, "vtoken", None)
        self.manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        self.pool = scheduler.kv_cache_manager.block_pool
        self._reusable = np.zeros(self.pool.num_gpu_blocks, bool)
        self._scanned = 0
        self._plain_tables: dict[str, tuple[list, array]] = {}

    def copy(self, engine_index: int = 0, scan_blocks: int | None = SCAN_BLOCKS) -> dict[str, Any]:
        """Copy what `describe` needs, in types that travel between processes.

        Args:
            scan_blocks: blocks to ask whether they are free and reusable; None: all.
        """
        scheduler, hooks = self.scheduler, self.step
        by_id = {} if hooks is None else hooks.requests.by_id
        running = [r for r in scheduler.running if r.request_id in by_id]
        states = [by_id[r.request_id] for r in running]
        if len(running) < len(scheduler.running):
            running += [r for r in scheduler.running if r.request_id not in by_id]
        self._ask_blocks(scan_blocks)
        return {
            "state": {
                "engine": engine_index,
                "time_s": time.time(),
                **_settings(hooks),
                "block_size": self.manager.block_size,
                "num_running": len(running),
                "num_waiting": len(scheduler.waiting),
            },
            "num_free": self.pool.get_num_free_blocks(),
            "reusable": self._reusable.tobytes(),
            "requests": [
                (r.request_id, r.num_prompt_tokens, r.num_output_tokens, r.num_preemptions)
                for r in running[:MAX_REQUESTS]
            ],
            "computed": [r.num_computed_tokens for r in running],
            "moved": [state.num_moved for state in states],
            "tables": self._copy_tables(states),
            "plain_tables": self._copy_plain_tables(running[len(states) :]),
        }

    def _copy_tables(self, states: list) -> dict[str, bytes]:
        """The tables of requests that have one, and the arena's arrays that they index."""
        if not states:
            return {}
        self.step.requests.sync(states)
        arena = states[0].table.arena
        numbers = arena.numbers[[state.table.number_row for state in states]]
        arrays = {name: getattr(arena, name) for name in TABLE_ARRAYS}
        return {"numbers": numbers.tobytes(), **{n: a.tobytes() for n, a in arrays.items()}}

    def _copy_plain_tables(self, requests: list) -> list[bytes]:
        """Block ids of requests that have none; they only ever get more, so only new ones are read."""
        before, self._plain_tables = self._plain_tables, {}
        for request in requests:
            blocks = self.manager.req_to_blocks.get(request.request_id, [])
            seen, ids = before.get(request.request_id, (None, None))
            if seen is not blocks or len(ids) > len(blocks):  # preempted in between
                ids = array("i")
            ids.extend([b.block_id for b in islice(blocks, len(ids), None)])
            self._plain_tables[request.request_id] = blocks, ids
        return [ids.tobytes() for _, ids in self._plain_tables.values()]

    def _ask_blocks(self, num_blocks: int | None) -> None:
        blocks = self.pool.blocks
        start = 0 if num_blocks is None or self._scanned >= len(blocks) else self._scanned
        self._scanned = end = len(blocks) if num_blocks is None else start + num_blocks
        self._reusable[start:end] = [
            b.ref_cnt == 0 and b.block_hash is not None for b in blocks[start:end]
        ]


def describe(copied: dict[str, Any]) -> dict[str, Any]:
    """Make plain lists and numbers of what `PoolView.copy` returned."""
    state, N = copied["state"], copied["state"]["block_size"]
    reusable = np.frombuffer(copied["reusable"], bool)
    slots = _Slots(len(reusable), N)
    computed = np.array(copied["computed"], np.int64)
    moved, plain = copied["moved"], copied["plain_tables"]
    live, dead, owned = computed.copy(), np.zeros_like(computed), []
    if moved:
        numbers = np.frombuffer(copied["tables"]["numbers"], np.int64).reshape(len(moved), -1)
        live[: len(moved)] = numbers[:, COLUMN["num_live_tokens"]]
        dead[: len(moved)] = numbers[:, COLUMN["num_physical_tokens"]] - live[: len(moved)]
        owned += _count_tables(slots, numbers, copied["tables"])
    if plain:
        counts = np.array([len(ids) // 4 for ids in plain])
        left = np.repeat(computed[len(moved) :], counts) - N * _positions(counts)
        live_in = np.clip(left, 0, N)
        owned += slots.add(np.frombuffer(b"".join(plain), np.int32), live_in, live_in, counts)
    slots.cached[reusable & ~slots.is_owned] = N
    usable = len(reusable) - 1  # block 0 is the null block
    blocks_per_cell = max(1, cdiv(usable, MAX_CELLS))
    columns = (live, dead, computed - live, computed, owned, [*moved, *[0] * len(plain)])
    values = zip(*(np.asarray(c, np.int64).tolist() for c in columns), strict=True)
    num_live, num_dead = int(live.sum()), int(dead.sum())
    return state | {
        "blocks": {
            "usable": usable,
            "free": copied["num_free"],
            "cached": int(np.count_nonzero(slots.cached)),
            "owned": usable - copied["num_free"],
        },
        "tokens": {"live": num_live, "dead": num_dead},
        "fragmentation_ratio": num_dead / (num_live + num_dead) if num_live + num_dead else 0.0,
        "blocks_per_cell": blocks_per_cell,
        "cells": slots.cells(blocks_per_cell),
        "requests": [_row(*row) for row in zip(copied["requests"], values, strict=False)],
    }


def _count_tables(slots: _Slots, numbers: np.ndarray, arrays: dict[str, bytes]) -> list[int]:
    """Count the slots of requests that have a table; returns the blocks of each."""
    handles, block_id, live_in = (np.frombuffer(arrays[n], np.int32) for n in TABLE_ARRAYS)
    bases, counts = numbers[:, COLUMN["block_base"]], numbers[:, COLUMN["num_blocks"]]
    base, position = np.repeat(bases, counts), _positions(counts)
    block = base + handles[base + position]  # where the arena has what is known of it
    used = np.repeat(numbers[:, COLUMN["num_physical_tokens"]], counts)
    used_in = np.clip(used - slots.block_size * position, 0, slots.block_size)
    return slots.add(block_id[block], live_in[block], used_in, counts)


def _settings(hooks) -> dict[str, Any]:
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

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.live, self.dead, self.tail, self.cached = np.zeros((4, num_blocks), np.int32)
        self.is_owned = np.zeros(num_blocks, bool)

    def add(self, ids, live_in, used_in, counts) -> list[int]:
        """Count requests' block tables one after another, `counts` blocks in each.

        Returns:
            The blocks of each request.
        """
        # A shared block is in several tables and has one content: the most an owner sees in it.
        np.maximum.at(self.live, ids, live_in.astype(np.int32))
        np.maximum.at(self.dead, ids, used_in.astype(np.int32))  # used, until `cells`
        self.is_owned[ids] = True
        owned = np.concatenate([[0], np.cumsum(ids != 0)])  # placeholders of `naive` are block 0
        ends = np.cumsum(counts)
        return (owned[ends] - owned[ends - counts]).tolist()

    def cells(self, blocks_per_cell: int) -> list[list[int]]:
        """int[C][4], sums over so many blocks each; the null block is left out."""
        dead = np.maximum(self.dead - self.live, 0)
        tail = np.where(self.is_owned, self.block_size - self.live - dead, 0)
        starts = np.arange(1, len(self.live), blocks_per_cell)
        kinds = (self.live, dead, tail, self.cached)
        return np.stack([np.add.reduceat(kind, starts) for kind in kinds], axis=1).tolist()


def _positions(counts: np.ndarray) -> np.ndarray:
    """0 .. count - 1 for each count, one after another."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _row(request: tuple, counted: tuple) -> dict[str, Any]:
    request_id, prompt_tokens, output_tokens, preemptions = request
    live, dead, evicted, computed, blocks, moved = counted
    return {
        "id": short_id(request_id),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "computed": computed,
        "live": live,
        "dead": dead,
        "blocks": blocks,
        "evicted": evicted,
        "moved": moved,
        "preemptions": preemptions,
    }

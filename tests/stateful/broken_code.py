"""Code broken on purpose, one row each: what is replaced, and by what. Checks must find every one."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import numpy as np

# What is replaced, by a name of ours: `module:Class.method`.
PLACES = {
    "take out of the cache": "vllm.v1.core.block_pool:BlockPool.evict_blocks",
    "has evicted": "vtoken.vllm_plugin.hooks:SchedulerHooks.has_evicted",
    "protect shared": "vtoken.vllm_plugin.sharing:SharedBlocks.protect",
    "is shared": "vtoken.vllm_plugin.sharing:SharedBlocks.shared",
    "reuse a hole": "vtoken.core.planner:RequestPlanner._reuse_hole",
    "place": "vtoken.core.planner:RequestPlanner.finalize",
    "how many": "vtoken.core.planner:RequestPlanner.num_to_evict",
    "move": "vtoken.core.table:RequestTable.move",
    "forget": "vtoken.core.table:TokenTable.forget",
}


def _protects_none(stock):
    def protect(self, state, blocks):
        state.num_protected = 0

    return protect


def _reuses_the_neighbour(stock):
    def reuse(self, table, local, step):
        stock(self, table, local, step)
        if step.new_token_index > 0:
            step.new_token_index -= 1

    return reuse


def _sends_no_moves(stock):
    def finalize(self, *args, **kwargs):
        step = stock(self, *args, **kwargs)
        if step is not None:
            step.move_source = step.move_destination = None
        return step

    return finalize


def _keeps_the_order(stock):
    def finalize(self, *args, **kwargs):
        step = stock(self, *args, **kwargs)
        if step is not None and step.kept is not None:
            step.kept = np.sort(step.kept)
        return step

    return finalize


# What it amounts to -> {place: takes what stands there, returns what is put there instead}.
BROKEN: dict[str, dict[str, Callable]] = {
    "blocks keep their hash": {"take out of the cache": lambda stock: lambda self, block_ids: None},
    "evicted requests are cached": {"has evicted": lambda stock: lambda self, req_id: False},
    # Tokens of shared blocks die, and their holes are used again.
    "shared blocks are written": {
        "protect shared": _protects_none,
        "is shared": lambda stock: lambda self, blocks: None,
    },
    "a reused slot is the neighbour": {"reuse a hole": _reuses_the_neighbour},
    "moves are not sent": {"place": _sends_no_moves},
    "tables forget a move": {"move": lambda stock: lambda self, s, d: stock(self, s[:-1], d[:-1])},
    "rows keep their order": {"place": _keeps_the_order},
    "evicts one too many": {"how many": lambda stock: lambda self, *a: stock(self, *a) + 1},
    "tables are left": {"forget": lambda stock: lambda self, req_id: None},
}


def break_code(monkeypatch, name: str) -> None:
    """Break the code as a row of BROKEN says, until the test ends."""
    for place, wrapper in BROKEN[name].items():
        module, _, path = PLACES[place].partition(":")
        owner, _, attribute = path.rpartition(".")
        cls = getattr(import_module(module), owner)
        monkeypatch.setattr(cls, attribute, wrapper(getattr(cls, attribute)))

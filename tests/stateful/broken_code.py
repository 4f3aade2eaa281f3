"""Code broken on purpose, one row each: what is replaced, and by what. Checks must find every one."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import numpy as np

from vtoken.core.scalar_ops import ScalarOps

# What is replaced, by a name of ours: `module:name` or `module:Class.method`.
PLACES = {
    "take out of the cache": "vllm.v1.core.block_pool:BlockPool.evict_blocks",
    "has evicted": "vtoken.scheduling.requests:RunningRequests.has_evicted",
    "how many": "vtoken.scheduling.select:Selector._above_budget",
    "protect shared": "vtoken.scheduling.prefix:PrefixBlocks.protect",
    "is shared": "vtoken.scheduling.prefix:PrefixBlocks.shared",
    "table operations": "vtoken.vllm_plugin.scheduler:load_ops",
    "reuse a hole": "vtoken.core.scalar_ops:_reuse_hole",
    "place": "vtoken.core.scalar_ops:_place",
    "move": "vtoken.core.table:RequestTable.apply_moves",
    "forget": "vtoken.core.table:TokenTable.forget",
}
# What is broken in plain Python shows where that form of the operations is in force.
IN_PLAIN_PYTHON = {"table operations": lambda stock: ScalarOps}


def _protects_none(stock):
    def protect(self, state):
        state.num_protected = 0

    return protect


def _reuses_the_neighbour(stock):
    def reuse(table, local, layout):
        stock(table, local, layout)
        if layout.new_token_index > 0:
            layout.new_token_index -= 1

    return reuse


def _sends_no_moves(stock):
    def place(*args):
        layout = stock(*args)
        layout.move_source = layout.move_destination = np.empty(0, np.int64)
        return layout

    return place


def _keeps_the_order(stock):
    def place(*args):
        layout = stock(*args)
        if layout.kept is not None:
            layout.kept = np.sort(layout.kept)
        return layout

    return place


def _asks_for_one_more(stock):
    def above_budget(self, due):
        asked = stock(self, due)
        asked.num_evict = [n + 1 for n in asked.num_evict]
        return asked

    return above_budget


# What it amounts to -> {place: takes what stands there, returns what is put there instead}.
BROKEN: dict[str, dict[str, Callable]] = {
    "blocks keep their hash": {"take out of the cache": lambda stock: lambda self, block_ids: None},
    "evicted requests are cached": {"has evicted": lambda stock: lambda self, req_id: False},
    # Tokens of shared blocks die, and their holes are used again.
    "shared blocks are written": {
        "protect shared": _protects_none,
        "is shared": lambda stock: lambda self, blocks: None,
    },
    "a reused slot is the neighbour": IN_PLAIN_PYTHON | {"reuse a hole": _reuses_the_neighbour},
    "moves are not sent": IN_PLAIN_PYTHON | {"place": _sends_no_moves},
    "tables forget a move": IN_PLAIN_PYTHON
    | {"move": lambda stock: lambda self, s, d: stock(self, s[:-1], d[:-1])},
    "rows keep their order": IN_PLAIN_PYTHON | {"place": _keeps_the_order},
    "evicts one too many": {"how many": _asks_for_one_more},
    "tables are left": {"forget": lambda stock: lambda self, req_id: None},
}


def break_code(monkeypatch, name: str) -> None:
    """Break the code as a row of BROKEN says, until the test ends."""
    for place, wrapper in BROKEN[name].items():
        module_name, _, path = PLACES[place].partition(":")
        owner: object = import_module(module_name)
        if "." in path:
            cls, _, path = path.partition(".")
            owner = getattr(owner, cls)
        monkeypatch.setattr(owner, path, wrapper(getattr(owner, path)))

"""Blocks that the prefix cache or other requests also use: never written, sometimes left.

    protect   tokens in blocks shared with other requests are not evicted, and count neither in
              the length nor in live; a block of one's own leaves the prefix cache before it is
              rewritten
    copy      survivors of shared or cached blocks are copied to private blocks when that releases
              more than it takes; the reference is dropped, the cache entry stays for others

New blocks for copies are taken at the head of the step, before any block of the step is released:
a slot is then never the source of one request and the destination of another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vtoken.core.planner import RequestState
from vtoken.core.sharing import copy_pays
from vtoken.units import cdiv


@dataclass(slots=True)
class CopyPlan:
    """Attributes:
    leaves: bool[B], blocks of the row whose survivors are copied out.
    keeps: bool[B], shared or cached blocks that stay untouched.
    new_blocks: private blocks for the copies, taken from the pool.
    """

    leaves: np.ndarray
    keeps: np.ndarray
    new_blocks: list


class SharedBlocks:
    """What one scheduler does about blocks that are not a request's own.

    Attributes:
        sharing: requests with protected tokens when last looked; looked at again every step.
        copies: plans of this step, by request.
    """

    def __init__(self, hooks) -> None:
        self.hooks = hooks
        self.caching = hooks.caching
        config = hooks.config
        # Holes stay in place with a threshold, and under pressure blocks are released before
        # others are shrunk: both leave no room for copies, and protect instead.
        self.copies_out = (
            config.shared_prefix == "copy"
            and config.fragmentation_threshold == 0.0
            and config.evict_when == "always"
        )
        self.sharing: set[str] = set()
        self.copies: dict[str, CopyPlan] = {}
        self._declined: dict[str, int] = {}  # references held when copying last did not pay

    # ---- looking ---------------------------------------------------------------------------

    def shared(self, blocks) -> np.ndarray | None:
        """bool[B], blocks that other requests hold too; None when there are none."""
        if not self.caching:
            return None
        found = [i for i, b in enumerate(blocks) if b.ref_cnt > 1 and not b.is_null]
        if not found:
            return None
        mask = np.zeros(len(blocks), bool)
        mask[found] = True
        return mask

    def look(self, request, state: RequestState) -> None:
        """Bring `num_protected` up to date; O(1) for a request that shares nothing.

        What is shared is the head of a prompt, and protected blocks stay first in the row.
        """
        blocks = self.hooks.manager.req_to_blocks[request.request_id]
        if self.caching and blocks and blocks[0].ref_cnt > 1:
            if not state.executed:  # else its blocks match its table again after finalize
                self.hooks.sync(state, blocks, request.num_computed_tokens)
                self.protect(state, blocks)
        else:
            state.num_protected = 0
            self.sharing.discard(request.request_id)

    def protect(self, state: RequestState, blocks) -> np.ndarray | None:
        """Live ids in shared blocks, ascending; keeps `num_protected` up to date."""
        table, shared = state.table, self.shared(blocks)
        if shared is None:
            state.num_protected = 0
            self.sharing.discard(table.req_id)
            return None
        handles = table.row[: table.num_blocks][shared[: table.num_blocks]]
        ids = table.id_at.reshape(-1, table.block_size)[handles].reshape(-1)
        ids = np.sort(ids[ids >= 0])
        state.num_protected = len(ids)
        self.sharing.add(table.req_id)
        return ids

    # ---- deciding --------------------------------------------------------------------------

    def wants_copy(self, blocks) -> bool:
        """Whether copying out is to be considered for a request."""
        return self.copies_out and self.caching and any(b.block_hash is not None for b in blocks)

    def was_declined(self, req_id: str, blocks) -> bool:
        """Whether copying out of the shared blocks did not pay, and nobody came or left since."""
        return self._declined.get(req_id) == sum(b.ref_cnt for b in blocks if b.ref_cnt > 1)

    def plan_copy(self, state: RequestState, blocks, victims: np.ndarray, num_new: int) -> str:
        """Plan to copy survivors out of the shared and cached blocks that victims lie in.

        Args:
            victims: int32, ids the policy names when nothing is protected.
            num_new: tokens about to be scheduled.

        Returns:
            "copy"; "none" where no such block is touched; "declined" where the shared ones would
            take more than they release, or the pool has no room.
        """
        table, N = state.table, state.table.block_size
        refs = np.array([b.ref_cnt for b in blocks])
        frozen = np.array([b.block_hash is not None or b.ref_cnt > 1 for b in blocks])
        lost = np.bincount(table.pos_of[table.index_of[victims] // N], minlength=len(blocks))
        leaves = frozen & (lost > 0)
        if not leaves.any():
            return "none"
        live = table.live_per_block() - lost
        shared = leaves & (refs > 1)
        if shared.any() and not copy_pays(refs[shared], live[shared], N):
            self._declined[table.req_id] = int(refs[refs > 1].sum())
            return "declined"
        if not self.hooks.planner.settings.moves:
            return "copy"  # naive: the same decision, but nothing is copied
        stay = int((~leaves).sum())
        missing = cdiv(table.num_live_tokens - len(victims) + num_new, N) - stay
        # Everybody else may need a block of their own in this step.
        room = self.hooks.pool.get_num_free_blocks() - len(self.hooks.scheduler.running)
        if missing > room:
            return "declined"
        new = self.hooks.pool.get_new_blocks(missing) if missing > 0 else []
        self.copies[table.req_id] = CopyPlan(leaves, frozen & ~leaves, new)
        return "copy"

    # ---- carrying out ----------------------------------------------------------------------

    def take(self, req_id: str, state: RequestState, blocks) -> CopyPlan | None:
        """Put a request's copy blocks at the end of its row; None where nothing is copied."""
        plan = self.copies.pop(req_id, None)
        if plan is None:
            return None
        blocks.extend(plan.new_blocks)
        state.table.sync([b.block_id for b in plan.new_blocks], state.table.num_computed_tokens)
        own = np.zeros(len(plan.new_blocks), bool)
        plan.leaves = np.concatenate([plan.leaves, own])
        plan.keeps = np.concatenate([plan.keeps, own])
        return plan

    def drop_unused(self) -> None:
        """Give back blocks of plans that were not carried out in this step."""
        for plan in self.copies.values():
            self.hooks.pool.free_blocks(plan.new_blocks)
        self.copies.clear()

    def forget(self, req_id: str) -> None:
        """A request is gone."""
        self.sharing.discard(req_id)
        self._declined.pop(req_id, None)
        plan = self.copies.pop(req_id, None)
        if plan is not None:
            self.hooks.pool.free_blocks(plan.new_blocks)

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

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.core.ops import Change
from vtoken.scheduling.ports import Block, BlockManager, Pool, Scheduler
from vtoken.scheduling.requests import RunningRequest, RunningRequests
from vtoken.units import cdiv

# Sharers decide one by one, each over its own survivors. Near break-even one would copy and
# another not, and the pool would hold the shared blocks and the copies until that one follows.
MIN_GAIN_FRAC = 1 / 16


def copy_gain_blocks(ref_counts: np.ndarray, survivors: np.ndarray, block_size: int) -> float:
    """Blocks won by copying survivors out of shared blocks and dropping the references.

    A block that r requests hold comes back when the last of them has dropped it: each brings
    1 / r of it. Its survivors take room in a private block.

    Args:
        ref_counts: int[S], requests holding each block, this one included.
        survivors: int[S], live tokens left in each.
        block_size: tokens.

    Returns:
        Positive where copying pays. At half retention and two sharers it is zero: no gain.
    """
    return float((1.0 / ref_counts).sum() - survivors.sum() / block_size)


def copy_pays(ref_counts: np.ndarray, survivors: np.ndarray, block_size: int) -> bool:
    """Whether copying out of shared blocks wins enough of the blocks it gives up."""
    gain = copy_gain_blocks(ref_counts, survivors, block_size)
    return gain > MIN_GAIN_FRAC * float((1.0 / ref_counts).sum())


@dataclass(slots=True)
class CopyPlan:
    """Attributes:
    leaves: bool[B], blocks of the block table whose survivors are copied out.
    keeps: bool[B], shared or cached blocks that stay untouched.
    new_blocks: private blocks for the copies, taken from the pool.
    """

    leaves: np.ndarray
    keeps: np.ndarray
    new_blocks: list[Block]


class CopyOutcome(Enum):
    """What `PrefixBlocks.plan_copy` came to.

    DECLINED: the shared blocks would take more than they release, or the pool has no room.
    """

    COPIES = "copies"
    TOUCHES_NONE = "touches none"
    DECLINED = "declined"


class PrefixBlocks:
    """What one scheduler does about blocks that are not a request's own.

    Attributes:
        sharing: requests with protected tokens when last looked; looked at again every step.
        copies: planned in this step and not carried out yet, by request.
        copies_out: whether survivors may be copied out of shared blocks at all.
    """

    def __init__(
        self,
        config: VTokenConfig,
        requests: RunningRequests,
        manager: BlockManager,
        pool: Pool,
        scheduler: Scheduler,
    ) -> None:
        self.requests, self.pool, self.scheduler = requests, pool, scheduler
        self.caching, self.block_size = manager.enable_caching, manager.block_size
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

    def shared(self, blocks: Sequence[Block]) -> np.ndarray | None:
        """bool[B], blocks that other requests hold too; None when there are none."""
        if not self.caching:
            return None
        found = [i for i, b in enumerate(blocks) if b.ref_cnt > 1 and not b.is_null]
        if not found:
            return None
        mask = np.zeros(len(blocks), bool)
        mask[found] = True
        return mask

    def look(self, state: RunningRequest) -> None:
        """Bring `num_protected` up to date; O(1) for a request that shares nothing.

        What is shared is the head of a prompt, and protected blocks stay first in the block table.
        """
        blocks = state.blocks
        if self.caching and blocks and blocks[0].ref_cnt > 1:
            if state.change is None:  # else its blocks match its table again after placement
                state.sync()
                self.protect(state)
        else:
            state.num_protected = 0
            self.sharing.discard(state.req_id)

    def protect(self, state: RunningRequest) -> np.ndarray | None:
        """int32 ascending, live ids in shared blocks, or None; keeps `num_protected` up to date.

        Args:
            state: its table in step.
        """
        shared = self.shared(state.blocks)
        if shared is None:
            state.num_protected = 0
            self.sharing.discard(state.req_id)
            return None
        ids = self.requests.shared_table_ids(state, shared)
        state.num_protected = len(ids)
        self.sharing.add(state.req_id)
        return ids

    # ---- deciding --------------------------------------------------------------------------

    def wants_copy(self, blocks: Sequence[Block]) -> bool:
        """Whether copying out is to be considered for a request."""
        return self.copies_out and self.caching and any(b.block_hash is not None for b in blocks)

    def was_declined(self, state: RunningRequest) -> bool:
        """Whether copying out of the shared blocks did not pay, and their holders are the same."""
        references = sum(b.ref_cnt for b in state.blocks if b.ref_cnt > 1)
        return self._declined.get(state.req_id) == references

    def plan_copy(self, state: RunningRequest, victims: np.ndarray, num_new: int) -> CopyOutcome:
        """Plan to copy survivors out of the shared and cached blocks that victims lie in.

        Args:
            victims: int32, ids the policy names when nothing is protected.
            num_new: tokens about to be scheduled.
        """
        table, N, blocks = state.table, self.block_size, state.blocks
        refs = np.array([b.ref_cnt for b in blocks])
        frozen = np.array([b.block_hash is not None or b.ref_cnt > 1 for b in blocks])
        lost = np.bincount(table.pos_of[table.index_of[victims] // N], minlength=len(blocks))
        leaves = frozen & (lost > 0)
        if not leaves.any():
            return CopyOutcome.TOUCHES_NONE
        live = table.live_per_block() - lost
        shared = leaves & (refs > 1)
        if shared.any() and not copy_pays(refs[shared], live[shared], N):
            self._declined[table.req_id] = int(refs[refs > 1].sum())
            return CopyOutcome.DECLINED
        if not self.requests.rules.moves:
            return CopyOutcome.COPIES  # naive: the same decision, but nothing is copied
        stay = int((~leaves).sum())
        missing = cdiv(table.num_live_tokens - len(victims) + num_new, N) - stay
        # Each of the others may need a block of its own in this step.
        room = self.pool.get_num_free_blocks() - len(self.scheduler.running)
        if missing > room:
            return CopyOutcome.DECLINED
        new = self.pool.get_new_blocks(missing) if missing > 0 else []
        self.copies[table.req_id] = CopyPlan(leaves, frozen & ~leaves, new)
        return CopyOutcome.COPIES

    # ---- carrying out ----------------------------------------------------------------------

    def reserve(self, state: RunningRequest, change: Change) -> int:
        """Tell a change which blocks it must leave alone or leave, before the eviction.

        A request's copy blocks are put at the end of its block table.

        Returns:
            Copy blocks that it took.
        """
        plan = self.copies.pop(state.req_id, None)
        if plan is None:
            change.pinned = self.shared(state.blocks)
            return 0
        state.blocks.extend(plan.new_blocks)
        state.sync(state.table.num_computed_tokens)
        own = np.zeros(len(plan.new_blocks), bool)
        change.leaves = np.concatenate([plan.leaves, own])
        change.pinned = np.concatenate([plan.keeps, own])
        change.added = [b.block_id for b in plan.new_blocks]
        return len(plan.new_blocks)

    def drop_unused(self) -> None:
        """Give back blocks of plans that were not carried out in this step."""
        for plan in self.copies.values():
            self.pool.free_blocks(plan.new_blocks)
        self.copies.clear()

    def forget(self, req_id: str) -> None:
        """A request is gone."""
        self.sharing.discard(req_id)
        self._declined.pop(req_id, None)
        plan = self.copies.pop(req_id, None)
        if plan is not None:
            self.pool.free_blocks(plan.new_blocks)

"""Decide when a request must shrink, by which tokens, and what that does to its layout.

One `RequestState` per running request. `RequestPlanner` has three steps, called in this order in
every scheduler step, and touches nothing but the token table:

    decide    head of the step: policy -> ids to evict (nothing changes yet)
    execute   head of the step, for prompts when they get their slots: marks them dead, says which
              blocks go back
    finalize  when the number of scheduled tokens is final: places the survivors, describes the
              change for the workers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vtoken.core.budget import NEVER, Budget
from vtoken.core.events import MASK_GIVEN, MASK_KEPT, MASK_PACKED, Counters, RequestStep
from vtoken.core.reclaim import blocks_needed, choose_kept, place_packed
from vtoken.core.table import NO_SLOTS, RequestTable
from vtoken.policies.base import RequestView
from vtoken.units import cdiv

NULL_BLOCK = 0
RANKED_FROM_TOKENS = 8192  # below, listing all live ids is as fast as counts of them


@dataclass(slots=True)
class RequestState:
    """What the scheduler remembers of one running request between steps.

    Attributes:
        next_eviction_len: logical length at which the next eviction is due.
        num_protected: live tokens in blocks shared with others, when last looked.
        last_chunk_step: step of the last prompt chunk, where scores are kept; -1 before.
        executed: an eviction or compaction took effect in the current step; the fields below
            are set by `execute` and used up by `finalize`.
        packs: every hole is to be filled in this step.
        kept: row positions that stay, where the row is rewritten.
        pack_order: the new row's order when it packs, rewritten or not.
        num_released: blocks whose reference was dropped in this step.
        added: block ids put at the end of the row before `kept` chooses from it, for copies.
    """

    table: RequestTable
    budget: Budget | None
    num_prompt_tokens: int
    prompt_hash: int
    next_eviction_len: int = NEVER
    num_protected: int = 0
    last_chunk_step: int = -1
    executed: bool = False
    packs: bool = False
    kept: np.ndarray | None = None
    pack_order: np.ndarray | None = None
    num_released: int = 0
    added: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """Blocks a request gives up.

    Attributes:
        kept: int32, row positions that stay in new order; None: the row is not rewritten.
        released: int32, row positions whose reference is dropped.
        rewritten: int32, row positions that stay and hold a hole: they must leave the prefix
            cache before anything is written into them.
        leaves_placeholder: a released block keeps its place in the row (naive).
    """

    kept: np.ndarray | None
    released: np.ndarray
    rewritten: np.ndarray
    leaves_placeholder: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """Attributes:
    moves: False for `naive`: holes stay, no slot reuse, only fully dead blocks go.
    fragmentation_threshold: hole fraction at which a request is compacted; 0: always packed.
    seed: what a policy's random draws depend on.
    """

    moves: bool
    fragmentation_threshold: float = 0.0
    seed: int = 0


class RequestPlanner:
    """decide / execute / finalize for one request at a time; see the module's head."""

    def __init__(self, settings: PlannerSettings, counters: Counters) -> None:
        self.settings, self.counters = settings, counters

    # ---- decide ----------------------------------------------------------------------------

    def schedule_next(self, state: RequestState, num_computed_tokens: int) -> None:
        """Compute when the request's next eviction is due."""
        if state.budget is None:
            state.next_eviction_len = NEVER
            return
        evicted = state.table.num_evicted_tokens
        state.next_eviction_len = state.budget.next_eviction_len(
            evicted, state.num_protected, num_computed_tokens
        )

    def num_to_evict(self, state: RequestState, num_computed_tokens: int) -> int:
        """Live tokens above the budget, protected ones left out."""
        live = num_computed_tokens - state.table.num_evicted_tokens - state.num_protected
        return live - int(state.budget.tokens(num_computed_tokens - state.num_protected))

    def decide(
        self,
        state: RequestState,
        *,
        num_evict: int,
        protected_ids: np.ndarray | None = None,
        scores: np.ndarray | None = None,
        token_ids: Callable[[], np.ndarray] | None = None,
    ) -> np.ndarray:
        """Ask the policy for victims.

        Args:
            state: its table in step with the request (`table.sync`).
            num_evict: how many, at most.
            protected_ids: int32 ascending, live ids in shared blocks, or None.
            scores: float32[num_computed_tokens] by logical id, NaN where there is none.
            token_ids: gives int32[known tokens], vocabulary ids by logical id.

        Returns:
            int32[<= num_evict] live logical ids, ascending.
        """
        table, policy = state.table, state.budget.policy
        L = table.num_computed_tokens

        def live_ids() -> np.ndarray:
            ids = table.live_ids()
            return ids if protected_ids is None else np.setdiff1d(ids, protected_ids, True)

        first_free = 0
        oldest = table.oldest
        if protected_ids is not None and len(protected_ids):
            first_free = _leading_run(protected_ids)
            if first_free != len(protected_ids):
                oldest = None  # shared blocks in the middle: the general way
        view = RequestView(
            live_ids=live_ids,
            num_computed_tokens=L,
            num_prompt_tokens=state.num_prompt_tokens,
            budget_tokens=int(state.budget.tokens(L - state.num_protected)),
            num_evict=num_evict,
            protected_tokens=first_free,
            token_ids=token_ids() if token_ids is not None and policy.needs_token_ids else None,
            seed=self.settings.seed,
            prompt_hash=state.prompt_hash,
            oldest=oldest,
            ranked=table.ranked if oldest is not None and L >= RANKED_FROM_TOKENS else None,
        )
        if scores is not None:
            view._scores = lambda: scores[view.live_ids]
            if oldest is not None:  # nothing is protected, or the first ids alone
                view._scores_by_id = scores
                view._all_live = lambda ids: bool((table.index_of[ids] >= 0).all())
        victims = np.asarray(policy.evict(view), np.int32)
        assert len(victims) <= num_evict, (policy.name, len(victims), num_evict)
        return np.sort(victims)

    # ---- execute ---------------------------------------------------------------------------

    def execute(
        self,
        state: RequestState,
        victims: np.ndarray,
        num_new_tokens: int,
        pinned: np.ndarray | None = None,
        under_pressure: bool = False,
        leaves: np.ndarray | None = None,
    ) -> Release | None:
        """Mark victims dead and choose the blocks that go back to the pool.

        Args:
            state: its table in step with the request.
            victims: int32, live ids.
            num_new_tokens: tokens about to be scheduled; blocks for them are kept, not freed.
            pinned: bool[B] or None, shared blocks; none of the victims lies in one.
            under_pressure: compact even below the fragmentation threshold.
            leaves: bool[B] or None, blocks that go even though they hold live tokens, which are
                copied out; nothing is written into them.

        Returns:
            None when nothing changes for the row or for the prefix cache.
        """
        table = state.table
        if len(victims):
            table.evict(victims)
            self.counters.evicted_tokens += len(victims)
            self.counters.eviction_events += 1
            state.executed = True
        if not table.num_holes:
            return None
        if not self.settings.moves:
            return self._release_dead_in_place(state)
        return self._release_by_packing(state, num_new_tokens, pinned, under_pressure, leaves)

    def _release_dead_in_place(self, state: RequestState) -> Release:
        table = state.table
        full = table.num_physical_tokens // table.block_size
        handles = table.row[:full]
        dead = (table.live_in[handles] == 0) & (table.block_id[handles] != NULL_BLOCK)
        released = np.flatnonzero(dead).astype(np.int32)
        rewritten = np.unique(table.pos_of[table.holes // table.block_size])
        rewritten = np.setdiff1d(rewritten, released, assume_unique=True)
        if len(released):
            table.block_id[table.row[released]] = NULL_BLOCK
            gone = np.isin(table.holes // table.block_size, table.row[released])
            table.holes = table.holes[~gone]
        state.num_released = len(released)
        self.counters.dropped_blocks += len(released)
        return Release(None, released, rewritten, leaves_placeholder=True)

    def packs_now(self, state: RequestState, num_new_tokens: int, under_pressure: bool) -> bool:
        """Whether the request's holes are to be filled in this step."""
        table, threshold = state.table, self.settings.fragmentation_threshold
        if threshold == 0.0:
            return True
        needed = blocks_needed(table, num_new_tokens, packs=True)
        if under_pressure:  # there may be nothing to give back, but less to ask for
            return needed < blocks_needed(table, num_new_tokens, packs=False)
        fragmented = table.num_holes >= threshold * table.num_physical_tokens
        return fragmented and needed < cdiv(table.num_physical_tokens, table.block_size)

    def _release_by_packing(
        self, state, num_new_tokens, pinned, under_pressure, leaves
    ) -> Release | None:
        table, N = state.table, state.table.block_size
        B = table.num_blocks
        state.packs = self.packs_now(state, num_new_tokens, under_pressure)
        if state.packs:
            stays = np.arange(B) if leaves is None else np.flatnonzero(~leaves)
            num_keep = min(len(stays), cdiv(table.num_live_tokens + num_new_tokens, N))
            if pinned is not None:
                pinned = pinned[stays]
                num_keep = max(num_keep, int(pinned.sum()))
            kept = choose_kept(table.live_per_block()[stays], num_keep, pinned)
            kept = stays[kept].astype(np.int32)
        else:
            kept = self._without_dead_blocks(table)
        in_row = np.zeros(B, bool)
        in_row[kept] = True
        holed = np.zeros(B, bool)
        holed[table.pos_of[table.holes // N]] = True
        released = np.flatnonzero(~in_row).astype(np.int32)
        if state.packs:  # from the packed end on, new tokens overwrite what moves out
            holed[kept[table.num_live_tokens // N :]] = True
        rewritten = np.flatnonzero(holed & in_row).astype(np.int32)
        in_order = len(kept) == B and bool((kept == np.arange(B)).all())
        state.executed, state.kept = True, None if in_order else kept
        state.num_released = len(released)
        if state.packs:
            state.pack_order = kept
        elif len(released):
            self._drop_dead(table, kept)
        self.counters.dropped_blocks += len(released)
        return Release(state.kept, released, rewritten)

    @staticmethod
    def _without_dead_blocks(table: RequestTable) -> np.ndarray:
        """Row positions of blocks below the tail that hold a live token, and of what lies beyond."""
        used = cdiv(table.num_physical_tokens, table.block_size)
        keep = np.ones(table.num_blocks, bool)
        keep[:used] = table.live_per_block()[:used] > 0
        return np.flatnonzero(keep).astype(np.int32)

    @staticmethod
    def _drop_dead(table: RequestTable, kept: np.ndarray) -> None:
        """Shorten the row by fully dead blocks; other holes stay where they are."""
        N, used = table.block_size, cdiv(table.num_physical_tokens, table.block_size)
        below = kept[kept < used]
        tail_slots = table.num_physical_tokens - (used - 1) * N
        tail_kept = len(below) > 0 and int(below[-1]) == used - 1
        gone = table.set_row(kept)
        table.holes = table.holes[table.pos_of[table.holes // N] >= 0]
        table.forget_handles(gone)
        full = len(below) - tail_kept
        table.num_physical_tokens = full * N + (tail_slots if tail_kept else 0)

    def num_blocks_needed(self, state: RequestState, num_new_tokens: int) -> int:
        """Blocks the request needs for its layout and this many new tokens.

        In `naive` indices stay logical: released blocks keep a placeholder.
        """
        table = state.table
        if not self.settings.moves:
            return cdiv(table.num_computed_tokens + num_new_tokens, table.block_size)
        return blocks_needed(table, num_new_tokens, packs=state.packs)

    # ---- finalize --------------------------------------------------------------------------

    def finalize(
        self,
        state: RequestState,
        num_new_tokens: int,
        row_from: Callable[[int], Sequence[int]],
    ) -> RequestStep | None:
        """Place survivors and new tokens; describe the change for the workers.

        Args:
            state: after `execute` in this step, or with holes left from earlier steps.
            num_new_tokens: tokens scheduled in this step, 0 when the request was passed over.
            row_from: gives vLLM's row after allocation, from a position on.

        Returns:
            None for plain growth, which the table takes in when it is next read.
        """
        table, executed = state.table, state.executed
        if not executed and (
            not self.settings.moves or not len(table.holes) or num_new_tokens != 1
        ):
            return None
        step = RequestStep(table.req_id, 0, kept=state.kept, added=state.added)
        rest = num_new_tokens
        if state.packs:
            rest = self._pack(state, num_new_tokens, step)
            table.sync(row_from(table.num_blocks), table.num_computed_tokens)
        else:
            table.sync(row_from(table.num_blocks), table.num_computed_tokens)
            if self.settings.moves and num_new_tokens == 1 and len(table.holes):
                self._reuse_hole(table, int(table.holes[-1]), step)
                table.holes = table.holes[:-1]
                rest = 0
        if executed and (step.move_source is not None or state.num_released):
            self.counters.relocation_events += 1
        if rest:
            table.sync((), table.num_computed_tokens + rest)
        self._describe_layout(table, step, executed)
        state.executed, state.packs, state.kept, state.pack_order = False, False, None, None
        state.num_released, state.added = 0, None
        return step

    def _pack(self, state: RequestState, num_new_tokens: int, step: RequestStep) -> int:
        """Fill every hole.

        Returns:
            The step's new tokens that are still to be appended at the packed end.
        """
        table, kept = state.table, state.pack_order
        # Blocks allocated since `execute` are not in the table's row yet: kept is all there is.
        placement = place_packed(table, kept, num_new_tokens)
        if len(placement.source):
            step.move_source = table.slots_of(placement.source)
            step.move_destination = table.slots_of(placement.destination)
            table.move(placement.source, placement.destination)
            self.counters.moved_tokens += len(placement.source)
            self.counters.repacking_moves += 0 if state.num_released else len(placement.source)
        table.forget_handles(table.set_row(kept))
        table.holes = NO_SLOTS
        table.num_physical_tokens = table.num_live_tokens
        if placement.reused < 0:
            return num_new_tokens
        table.num_physical_tokens += 1
        self._reuse_hole(table, placement.reused, step)
        return 0

    def _reuse_hole(self, table: RequestTable, local: int, step: RequestStep) -> None:
        """Give the step's new token a dead slot inside the layout: no copy."""
        table.put_next(local)
        index = int(table.physical_of(np.array([local]))[0])
        at_end = index == table.num_physical_tokens - 1
        if not at_end or not table.is_packed:  # else it goes to the packed end by itself
            step.new_token_index = index
        self.counters.reused_slots += not at_end

    @staticmethod
    def _describe_layout(table: RequestTable, step: RequestStep, changed: bool) -> None:
        step.num_reclaimed = table.num_reclaimed_tokens
        if table.is_packed:
            step.mask_kind = MASK_PACKED
        elif changed:
            step.mask_kind, step.mask = MASK_GIVEN, table.live_mask()
        else:
            step.mask_kind = MASK_KEPT


def _leading_run(ids: np.ndarray) -> int:
    """Length of the run 0, 1, 2, ... at the head of ascending ids."""
    return int((ids == np.arange(len(ids))).argmin()) if ids[-1] != len(ids) - 1 else len(ids)

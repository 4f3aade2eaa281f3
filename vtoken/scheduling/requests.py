"""What is known of the requests that hold blocks: vLLM's record and ours side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from vtoken.core.budget import NEVER, Budget
from vtoken.core.ops import Change, LayoutRules, TableOps
from vtoken.core.reclaim import blocks_needed
from vtoken.core.table import RequestTable, TokenTable
from vtoken.policies.base import ScoreKind
from vtoken.scheduling.ports import Block, BlockManager, Request
from vtoken.units import cdiv


@dataclass(slots=True, kw_only=True, eq=False)
class RunningRequest:
    """One request from its first step until its blocks are freed.

    Attributes:
        request: vLLM's.
        blocks: vLLM's block table of it: the block manager's own list, which changes in place.
        table: may lag behind vLLM's record until `sync`.
        budget: None: it keeps every token.
        prompt_hash: what random draws depend on.
        needs_scores: its policy reads scores.
        next_eviction_len: logical length at which the next eviction is due.
        num_protected: live tokens in blocks shared with others, when last looked.
        last_chunk_step: step of the last prompt chunk; -1 before.
        change: what this step does to the layout, from eviction to placement.
        num_moved: tokens moved so far.
    """

    request: Request
    blocks: list[Block]
    table: RequestTable
    budget: Budget | None
    prompt_hash: int
    needs_scores: bool
    next_eviction_len: int = NEVER
    num_protected: int = 0
    last_chunk_step: int = -1
    change: Change | None = None
    num_moved: int = 0

    @property
    def req_id(self) -> str:
        return self.table.req_id

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that vLLM knows and that are not computed; 1 for a request that decodes."""
        request = self.request
        known = request.num_tokens + request.num_output_placeholders
        return known - request.num_computed_tokens

    def sync(self, length: int | None = None) -> RequestTable:
        """Bring the table in step with vLLM: new blocks, tokens grown at the tail.

        Args:
            length: logical; None: what vLLM has computed.
        """
        table = self.table
        if length is None:
            length = self.request.num_computed_tokens
        table.sync_new_tokens(self.block_ids_from(table.num_blocks), length)
        return table

    def block_ids_from(self, position: int) -> list[int]:
        return [b.block_id for b in self.blocks[position:]]


@dataclass(slots=True, kw_only=True, eq=False)
class BudgetedRequest(RunningRequest):
    """A request that may lose tokens; each one with a budget is of this class."""

    budget: Budget

    def num_above_budget(self, length: int) -> int:
        """Live tokens above the budget at a logical length, protected ones left out."""
        live = length - self.table.num_evicted_tokens - self.num_protected
        return live - self.budget.tokens(length - self.num_protected)


class RunningRequests:
    """All requests that hold blocks.

    Attributes:
        by_id: in the order in which they were first scheduled.
        num_reclaimed: logical minus physical length, of every request whose slots are just that
            many less than its tokens; the others have holes, or a change in progress.
    """

    def __init__(
        self, tables: TokenTable, ops: TableOps, manager: BlockManager, rules: LayoutRules
    ) -> None:
        self.tables, self.ops, self.manager, self.rules = tables, ops, manager, rules
        self.block_size = manager.block_size
        self.by_id: dict[str, RunningRequest] = {}
        self.num_reclaimed: dict[str, int] = {}

    def start(self, request: Request, budget: Budget | None) -> RunningRequest:
        """Take in a request that was scheduled for the first time, or again after a preemption."""
        req_id = request.request_id
        prompt = np.asarray(request.prompt_token_ids, np.int32)
        kind: type[RunningRequest] = RunningRequest if budget is None else BudgetedRequest
        state = kind(
            request=request,
            blocks=self.manager.req_to_blocks[req_id],
            table=self.tables.add(req_id),
            budget=budget,
            prompt_hash=crc32(prompt.tobytes()),
            needs_scores=budget is not None and budget.policy.score_kind is not ScoreKind.NONE,
        )
        self.by_id[req_id], self.num_reclaimed[req_id] = state, 0
        return state

    def forget(self, req_id: str) -> None:
        """A request's blocks are being freed."""
        self.by_id.pop(req_id, None)
        self.num_reclaimed.pop(req_id, None)
        self.tables.forget(req_id)

    def sync(self, states: Sequence[RunningRequest]) -> None:
        """`RunningRequest.sync` of several requests."""
        if states:
            self.ops.sync(
                [s.table for s in states],
                [s.block_ids_from(s.table.num_blocks) for s in states],
                [s.request.num_computed_tokens for s in states],
            )

    def layout_settled(self, state: RunningRequest) -> None:
        """A request's layout was changed, and the change is complete."""
        table = state.table
        if not self.rules.moves or not len(table.holes):
            self.num_reclaimed[table.req_id] = table.num_reclaimed_tokens

    def has_evicted(self, req_id: str) -> bool:
        """Whether KV of this request may have seen truncated attention."""
        state = self.by_id.get(req_id)
        return state is not None and (
            state.change is not None or state.table.num_evicted_tokens > 0
        )

    def num_slots_needed(self, req_id: str, num_tokens: int) -> int:
        """Tokens' worth of slots a request needs to have `num_tokens` logical tokens computed.

        Called twice a step for every running request: integers only, the table is not read.
        """
        reclaimed = self.num_reclaimed.get(req_id)
        if reclaimed is not None:  # growth at the tail leaves it as it is
            return num_tokens - reclaimed
        state = self.by_id.get(req_id)
        if state is None:
            return num_tokens
        table, change = state.table, state.change
        if change is None:
            num_new = num_tokens - state.request.num_computed_tokens
            return num_tokens - table.num_reclaimed_tokens - (num_new == 1)  # one takes a hole
        num_new = num_tokens - table.num_computed_tokens
        if not self.rules.moves:  # indices stay logical: released blocks keep a placeholder
            return cdiv(num_tokens, self.block_size) * self.block_size
        return blocks_needed(table, num_new, packs=change.packs) * self.block_size

    def num_blocks_missing(self, req_id: str, num_tokens: int) -> int:
        """Blocks a request lacks to have this many logical tokens computed; may be negative."""
        needed = cdiv(self.num_slots_needed(req_id, num_tokens), self.block_size)
        return needed - len(self.manager.req_to_blocks[req_id])

    def shared_table_ids(self, state: RunningRequest, shared: np.ndarray) -> np.ndarray:
        """int32 ascending, live ids in the blocks at these positions: bool[B]."""
        table = state.table
        handles = table.block_table[: table.num_blocks][shared[: table.num_blocks]]
        ids = table.id_at.reshape(-1, table.block_size)[handles].reshape(-1)
        return np.sort(ids[ids >= 0])

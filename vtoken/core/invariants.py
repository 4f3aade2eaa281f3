"""The invariants of DESIGN section 6 as functions that return what is wrong.

Each returns a list of sentences, empty when the invariant holds. Unit tests, the stateful test,
`vtoken verify` and sampled checks in production call the same functions.

    I1 token conservation   over K/V bytes, see vtoken.checks.worker_side
    I2 unique mapping       `check_unique_mapping`
    I4 layout-aware plans   `check_step_plan`, `check_release`
    conservation            `check_conservation`, `check_pool`
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from vtoken.core.arena import SPAN_TOKENS
from vtoken.core.messages import StepPlan
from vtoken.core.table import RequestTable
from vtoken.units import cdiv


def check_unique_mapping(table: RequestTable) -> list[str]:
    """I2: each live id has one valid slot, each slot at most one live id; both maps agree."""
    wrong: list[str] = []
    ids = table.live_ids()
    local = table.index_of[ids]
    who = table.req_id
    if len(ids) != table.num_live_tokens:
        wrong.append(f"{who}: {len(ids)} ids are live, the count says {table.num_live_tokens}")
    if len(np.unique(local)) != len(local):
        wrong.append(f"{who}: two live tokens share a slot")
    if not np.array_equal(table.id_at[local], ids):
        wrong.append(f"{who}: slot and token disagree about each other")
    chunks = np.bincount(ids // SPAN_TOKENS, minlength=len(table.live_in_span))
    if not np.array_equal(chunks, table.live_in_span):
        wrong.append(f"{who}: a chunk of ids has another number of live ones than is counted")
    owned = np.zeros(len(table.pos_of), bool)
    owned[table.block_table[: table.num_blocks]] = True
    if not owned[local // table.block_size].all():
        wrong.append(f"{who}: a live token is in a block the request does not own")
    elif len(ids) and int(table.physical_of(local).max()) >= table.num_physical_tokens:
        wrong.append(f"{who}: a live token lies beyond the physical length")
    resident = table.ids_by_physical_index()
    if int((resident >= 0).sum()) != len(ids):
        wrong.append(f"{who}: the block table holds a token that is not live")
    return wrong


def check_conservation(table: RequestTable, null_block: int = 0) -> list[str]:
    """live + holes + tail == owned blocks * block size; blocks that are placeholders left out."""
    handles = table.block_table[: table.num_blocks]
    is_null = table.block_id[handles] == null_block
    owned_slots = int((~is_null).sum()) * table.block_size
    live = int(table.live_in[handles].sum())
    tail = table.num_blocks * table.block_size - table.num_physical_tokens
    holes = len(table.holes)
    if live + holes + tail != owned_slots:
        counted = f"{live} live + {holes} holes + {tail} tail slots"
        return [f"{table.req_id}: {counted} are not {owned_slots} owned slots"]
    return []


def check_block_table(table: RequestTable, block_ids: Sequence[int]) -> list[str]:
    """The table's blocks are the head of the pool's block table for this request."""
    mine = table.block_ids()
    theirs = np.asarray(block_ids[: len(mine)], np.int32)
    if not np.array_equal(mine, theirs):
        return [f"{table.req_id}: table has blocks {mine.tolist()}, the pool {theirs.tolist()}"]
    return []


def check_pool(
    num_total: int, num_free: int, rows: Iterable[Iterable[int]], null_block: int = 0
) -> list[str]:
    """free + owned + null == total, over distinct blocks.

    Args:
        num_total: blocks in the pool, the null block included.
        num_free: blocks in the free queue.
        rows: block ids of every request that holds some.
    """
    owned = {b for row in rows for b in row} - {null_block}
    if num_free + len(owned) + 1 != num_total:
        return [f"{num_free} free + {len(owned)} owned + 1 null blocks are not {num_total}"]
    return []


def check_release(num_blocks_before: int, num_blocks_after: int, num_moves: int) -> list[str]:
    """I4: a plan that relocates in order to reclaim strictly lowers the block count."""
    if num_moves and num_blocks_after >= num_blocks_before:
        return [f"{num_moves} moves leave {num_blocks_after} of {num_blocks_before} blocks"]
    return []


def check_step_plan(
    plan: StepPlan, num_slots: int, shared_blocks: set[int], block_size: int
) -> list[str]:
    """I4: no slot is written twice or read by one request and written by another; none is shared.

    Args:
        num_slots: slots in the pool.
        shared_blocks: block ids with more than one owner.
    """
    wrong: list[str] = []
    if len(set(plan.req_ids)) != len(plan.req_ids):
        wrong.append("two plans of one step change the same request")
    src, dst = plan.move_source, plan.move_destination
    if not len(src):
        return wrong
    if min(src.min(), dst.min()) < block_size or max(src.max(), dst.max()) >= num_slots:
        wrong.append("a move leaves the pool or touches the null block")
    if len(np.unique(dst)) != len(dst):
        wrong.append("two moves write one slot")
    owner = np.repeat(np.arange(len(plan.req_ids)), np.diff(plan.move_start))
    # Two sharers may both copy a token out of the block they share.
    if len(np.unique(owner * num_slots + src)) != len(src):
        wrong.append("two moves of a request read one slot")
    both, at_src, at_dst = np.intersect1d(src, dst, return_indices=True)
    if len(both) and (owner[at_src] != owner[at_dst]).any():
        wrong.append("a slot is the source of one request and the destination of another")
    hit = shared_blocks.intersection((dst // block_size).tolist())
    if hit:
        wrong.append(f"shared blocks {sorted(hit)} are written")
    return wrong


def check_packed(table: RequestTable) -> list[str]:
    """A packed request fills physical indices 0..live-1 and nothing else."""
    if table.is_packed and not (table.ids_by_physical_index() >= 0).all():
        return [f"{table.req_id}: counted as packed, but has a hole"]
    return []


def check_table(table: RequestTable) -> list[str]:
    """All checks that need only the table."""
    if table.num_physical_tokens > table.num_blocks * table.block_size:
        used, needed = table.num_physical_tokens, cdiv(table.num_physical_tokens, table.block_size)
        return [
            f"{table.req_id}: {used} slots in use, {needed} blocks needed, {table.num_blocks} owned"
        ]
    return check_unique_mapping(table) + check_conservation(table) + check_packed(table)

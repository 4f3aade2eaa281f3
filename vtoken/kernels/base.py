"""What a kernel implementation offers: plan once a step, then run every layer.

Legend: R requests, T query rows, HQ query heads, H KV heads, D head size, B blocks, N block size,
L layers, M tokens, S slots (`B * N`; slot = block_id * N + offset).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from vtoken.kernels.layout import KVLayout


def pack_mask(live: torch.Tensor) -> torch.Tensor:
    """Pack bool[R, P] (live by physical index) into int64[R, ceil(P / 64)], bit i = index i."""
    rows, width = live.shape
    padded = np.zeros((rows, -(-width // 64) * 64), bool)
    padded[:, :width] = live.numpy()
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int64))


def unpack_mask(bits: torch.Tensor) -> torch.Tensor:
    """Unpack int64[R, W] into bool[R, 64 * W]; the inverse of `pack_mask`."""
    raw = np.ascontiguousarray(bits.numpy()).view(np.uint8)
    return torch.from_numpy(np.unpackbits(raw, axis=1, bitorder="little").astype(bool))


@lru_cache(maxsize=64)
def _filled(rows: int, value: int) -> torch.Tensor:
    """int32[rows] of one value; nobody may write into it."""
    return torch.full((rows,), value, dtype=torch.int32)


@dataclass(frozen=True, kw_only=True)
class PlanInput:
    """Checked arrays of one step's batch, all on the CPU; see `Kernels.plan`."""

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    live_mask: torch.Tensor | None
    score_queries: torch.Tensor
    block_size: int

    @property
    def num_requests(self) -> int:
        return self.seq_lens.numel()


class Plan:
    """What one step's attention reads; made by `Kernels.plan`, serves every layer of the step.

    Attributes:
        block_size: N, tokens.
        num_live_tokens: int32[R], tokens attended by each request's last query; 0 where a request
            has no query.
        max_block: the largest block id read, -1 for none.
        num_queries: query rows read, T at least.
    """

    block_size: int
    num_live_tokens: torch.Tensor
    max_block: int
    num_queries: int


class Kernels(ABC):
    """Attention over live tokens with score sums, relocation copies and key norms.

    Attributes:
        name: "cpp" or "torch".
        why: one line for people: which code runs, and why not the other.
    """

    name: str
    why: str

    def plan(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        *,
        block_size: int,
        live_mask: torch.Tensor | None = None,
        score_queries: int | torch.Tensor = -1,
    ) -> Plan:
        """Lay out one step's attention.

        Args:
            block_table: int32[R, >= blocks], rows may be strided.
            seq_lens: int32[R], physical length of each request, this step's tokens included.
            query_start_loc: int32[R + 1], request r owns query rows [r], [r + 1]; none is fine.
            live_mask: None (no holes), bool[R, P] or its `pack_mask` int64[R, W], by physical
                index. Bits at or beyond a request's length are ignored.
            score_queries: count only the last this many queries of a request in the scores; -1
                all, 0 none. One number, or int32[R].

        A request with one query attends every live slot; the token may sit anywhere (slot reuse).
        With n > 1 queries the chunk's tokens are the last n physical indices, ascending and all
        live: query i attends the live history and the chunk's tokens up to itself.

        Raises:
            AssertionError: arrays contradict each other, or a token of a chunk is dead.
        """
        rows = seq_lens.numel()
        if isinstance(score_queries, int):
            score_queries = _filled(rows, score_queries)
        if live_mask is not None and live_mask.dtype == torch.bool:
            live_mask = pack_mask(live_mask)
        given = PlanInput(
            block_table=block_table,
            seq_lens=seq_lens.contiguous(),
            query_start_loc=query_start_loc.contiguous(),
            live_mask=live_mask,
            score_queries=score_queries.contiguous(),
            block_size=block_size,
        )
        for array in (block_table, seq_lens, query_start_loc, score_queries):
            assert array.dtype == torch.int32 and array.device.type == "cpu", array
        assert block_table.ndim == 2 and block_table.shape[0] >= rows
        assert block_table.stride(1) == 1 or block_table.shape[1] == 1
        assert query_start_loc.numel() == rows + 1 and score_queries.numel() == rows
        if live_mask is not None:
            assert live_mask.dtype == torch.int64 and live_mask.shape[0] >= rows
            assert live_mask.stride(1) == 1 or live_mask.shape[1] == 1
            longest = int(seq_lens.max()) if rows else 0
            assert live_mask.shape[1] * 64 >= longest, (live_mask.shape, longest)
        return self._plan(given)

    def attention(
        self,
        plan: Plan,
        query: torch.Tensor,
        kv: torch.Tensor,
        out: torch.Tensor | None,
        *,
        layout: KVLayout,
        scale: float,
        softcap: float = 0.0,
        step_scores: torch.Tensor | None = None,
        num_threads: int | None = None,
    ) -> None:
        """Run one layer's attention over live tokens.

        Args:
            plan: this step's plan.
            query: `[T, HQ, D]` of the cache's dtype; rows may be strided.
            kv: `[B, H, N, 2 * D]`, one layer.
            out: `[T, HQ, D]`, or None to compute scores alone (values are then not read, queries
                that do not count not computed).
            scale, softcap: logits are `softcap * tanh(scale * q.k / softcap)`, 0 for no cap.
            step_scores: float32[S] or None; `step_scores[slot]` grows by the slot's attention
                probability summed over heads and counted queries.
            num_threads: at most; None takes torch's number.

        The result does not depend on the number of threads. NaN and inf in dead slots or beyond a
        request's length stay there. A request without a live token gets zeros.
        """
        layout.check(kv)
        heads, head_size = query.shape[1:]
        assert query.dtype == kv.dtype and head_size == layout.head_size, (query.dtype, kv.dtype)
        assert heads % kv.shape[1] == 0 and query.stride()[1:] == (head_size, 1), query.stride()
        assert plan.num_queries <= query.shape[0] and plan.max_block < kv.shape[0]
        assert plan.block_size == layout.block_size
        if out is not None:
            assert out.shape[1:] == query.shape[1:] and out.dtype == query.dtype
            assert out.stride()[1:] == (head_size, 1) and plan.num_queries <= out.shape[0]
        if step_scores is not None:
            assert step_scores.dtype == torch.float32 and step_scores.is_contiguous()
            assert step_scores.numel() >= (plan.max_block + 1) * layout.block_size
        self._attention(
            plan, query, kv, out, layout, float(scale), float(softcap), step_scores, num_threads
        )

    def move(
        self,
        kvs: Sequence[torch.Tensor],
        src_slots: torch.Tensor,
        dst_slots: torch.Tensor,
        *,
        layout: KVLayout,
        scores: Sequence[torch.Tensor] = (),
        num_threads: int | None = None,
    ) -> None:
        """Copy tokens from slot to slot in every layer, and their scores.

        All sources are read before any destination is written, so a slot may be the source of one
        move and the destination of another.

        Args:
            kvs: L tensors `[B, H, N, 2 * D]` of one shape, stride and dtype.
            src_slots, dst_slots: int64[M]; destinations are distinct.
            scores: arrays [S] whose entries move along.
        """
        src, dst = src_slots.contiguous(), dst_slots.contiguous()
        assert src.dtype == dst.dtype == torch.int64 and src.shape == dst.shape and src.ndim == 1
        if src.numel() == 0:
            return
        slots = kvs[0].shape[0] * layout.block_size if kvs else min(s.numel() for s in scores)
        low, high = min(int(src.min()), int(dst.min())), max(int(src.max()), int(dst.max()))
        assert 0 <= low and high < slots, (low, high, slots)
        for kv in kvs:
            layout.check(kv)
            assert kv.shape == kvs[0].shape and kv.stride() == kvs[0].stride()
            assert kv.dtype == kvs[0].dtype
        if kvs:
            self._move(kvs, src, dst, layout, num_threads)
        for array in scores:
            array[dst] = array[src]  # indexing reads all before it writes

    def key_norms(
        self, kv: torch.Tensor, slots: torch.Tensor, scores: torch.Tensor, *, layout: KVLayout
    ) -> None:
        """Add each slot's key norm, summed over heads, to `scores`: `scores[slot] += sum |k|`.

        Args:
            kv: `[B, H, N, 2 * D]`, one layer; called for each layer it sums over layers too.
            slots: int64[M], distinct.
            scores: float32[S].
        """
        layout.check(kv)
        slots = slots.contiguous()
        assert slots.dtype == torch.int64 and scores.dtype == torch.float32
        if slots.numel() == 0:
            return
        assert 0 <= int(slots.min()) and int(slots.max()) < kv.shape[0] * layout.block_size
        assert scores.is_contiguous() and int(slots.max()) < scores.numel()
        self._key_norms(kv, slots, scores, layout)

    @abstractmethod
    def _plan(self, given: PlanInput) -> Plan: ...

    @abstractmethod
    def _attention(
        self, plan, query, kv, out, layout, scale, softcap, step_scores, num_threads
    ) -> None: ...

    @abstractmethod
    def _move(self, kvs, src, dst, layout, num_threads) -> None: ...

    @abstractmethod
    def _key_norms(self, kv, slots, scores, layout) -> None: ...

"""Checks that the implementations for CPUs share; their contract is in contract.py.

A cache is `[B, H, N, 2 * D]`, one layer, with the interior of a `KVLayout`; all arrays are on the
CPU. What contradicts itself is refused here, before compiled code writes where it must not.
"""

from __future__ import annotations

import torch

from vtoken.kernels.layout import KVLayout, check_supported, probe_layout


class CPUPlan:
    """A plan of `CPUKernels`; see `contract.Plan`."""

    num_live_tokens: torch.Tensor
    block_size: int
    max_block: int  # the largest block id read, -1 for none
    num_queries: int  # query rows read


class CPUKernels:
    """`contract.Kernels` whose calls, once checked, go to what a subclass implements.

    _plan(block_table, seq_lens, query_start_loc, mask, score_queries, block_size)
    _attention(plan, query, kv, out, layout, scale, softcap, step_scores, num_threads)
    _move(kvs, src, dst, layout, num_threads)
    _key_norms(kv, slots, scores, layout)
    """

    name: str
    why: str

    def probe(self, write, kv_like) -> KVLayout:
        layout = probe_layout(write, kv_like)
        check_supported(layout, kv_like.dtype)
        return layout

    def plan(
        self, block_table, seq_lens, query_start_loc, *, block_size, live_mask=None,
        score_queries=-1,
    ) -> CPUPlan:  # fmt: skip
        rows = seq_lens.numel()
        for array in (block_table, seq_lens, query_start_loc):
            assert array.dtype == torch.int32 and array.device.type == "cpu", array
        assert block_table.ndim == 2 and block_table.shape[0] >= rows
        assert block_table.stride(1) == 1 or block_table.shape[1] == 1
        assert query_start_loc.numel() == rows + 1
        if live_mask is not None:
            assert live_mask.dtype == torch.bool and live_mask.shape[0] >= rows
            longest = int(seq_lens.max()) if rows else 0
            assert live_mask.shape[1] >= longest, (live_mask.shape, longest)
        return self._plan(
            block_table, seq_lens.contiguous(), query_start_loc.contiguous(), live_mask,
            score_queries, block_size,
        )  # fmt: skip

    def attention(
        self, plan, query, kv, out, *, layout, scale, softcap=0.0, step_scores=None,
        num_threads=None,
    ) -> None:  # fmt: skip
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

    def move(self, kvs, src_slots, dst_slots, *, layout, scores=(), num_threads=None) -> None:
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

    def key_norms(self, kv, slots, scores, *, layout) -> None:
        layout.check(kv)
        slots = slots.contiguous()
        assert slots.dtype == torch.int64 and scores.dtype == torch.float32
        if slots.numel() == 0:
            return
        assert 0 <= int(slots.min()) and int(slots.max()) < kv.shape[0] * layout.block_size
        assert scores.is_contiguous() and int(slots.max()) < scores.numel()
        self._key_norms(kv, slots, scores, layout)

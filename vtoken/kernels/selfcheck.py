"""One small problem run by two implementations: a build that computes wrongly is not used."""

from __future__ import annotations

import torch

from vtoken.kernels.contract import Kernels
from vtoken.kernels.fallback import TorchKernels
from vtoken.kernels.layout import KVLayout

# Twice what rounding to the cell type can cost on values of order one.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def differs(kernels: Kernels) -> str | None:
    """Run attention, a move and key norms on every dtype; say what differs from torch, or None."""
    for dtype, tolerance in TOLERANCE.items():
        for name, got, expected in _results(kernels, dtype):
            error = (got.float() - expected.float()).abs().max()
            if not error <= tolerance:  # also true for NaN
                short = str(dtype).removeprefix("torch.")
                return f"{name} in {short} is off by {error:.1e}, self-check failed"
    return None


def _results(kernels: Kernels, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(7)
    layout = KVLayout(block_size=16, head_size=48, k_group=16)
    lens = torch.tensor([37, 20, 300], dtype=torch.int32)
    starts = torch.tensor([0, 1, 4, 5], dtype=torch.int32)
    kv = torch.randn(30, 2, 16, 96, generator=generator).to(dtype)
    table = torch.randperm(30, generator=generator)[:29].to(torch.int32)
    rows = torch.zeros(3, 19, dtype=torch.int32)
    rows[0, :3], rows[1, :2], rows[2] = table[:3], table[3:5], table[5:24]
    live = torch.rand(3, 304, generator=generator) < 0.6
    live[1, 17:20] = True
    query = torch.randn(5, 6, 48, generator=generator).to(dtype)
    ends = []
    for k in (kernels, TorchKernels()):
        out, scores = torch.zeros_like(query), torch.zeros(480)
        plan = k.plan(rows, lens, starts, block_size=16, live_mask=live, score_queries=2)
        k.attention(plan, query, kv, out, layout=layout, scale=0.2, softcap=3.0, step_scores=scores)
        moved = kv.clone()
        k.move([moved], torch.arange(40), torch.arange(8, 48), layout=layout)
        norms = torch.zeros(480)
        k.key_norms(kv, torch.arange(0, 480, 7), norms, layout=layout)
        ends.append((out, scores, moved, norms))
    names = ("attention", "score sums", "a move", "key norms")
    yield from zip(names, *ends, strict=True)

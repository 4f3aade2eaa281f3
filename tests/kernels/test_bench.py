"""The benchmark runs, names its rows and measures what it says."""

from __future__ import annotations

import pytest
import torch
from kernel_problems import load_cpp

from vtoken.kernels import bench

TINY = {"shapes": ("smol",), "dtypes": ("f32",), "budget_s": 0.0, "stock": False}


def test_decode_rows():
    load_cpp()
    rows = list(bench.rows(suites=("decode",), holes_pct=(0, 50), batch=2, context=40, **TINY))
    names = {r.name for r in rows}
    assert {"attention_scores/holes0/smol/f32", "torch_scores/holes50/smol/f32"} <= names
    assert all(r.value > 0 and r.unit == "us" and r.ratio_to_stock is None for r in rows)


@pytest.mark.parametrize("suite", ["chunk", "move", "step"])
def test_other_suites(suite, monkeypatch):
    load_cpp()
    monkeypatch.setattr(bench, "MOVES", (1, 8))
    rows = list(bench.rows(suites=(suite,), queries=16, batch=2, context=64, **TINY))
    assert rows and all(r.value > 0 for r in rows)
    assert len({r.name for r in rows}) == len(rows)


@pytest.mark.parametrize("queries", [1, 8])
def test_stock_and_ours_attend_the_same_tokens(queries):
    """Otherwise the ratios would compare different work."""
    pytest.importorskip("vllm._custom_ops")
    kernels = load_cpp()
    step = bench.Batch("smol", torch.float32, 0.5, 2, 100, 16, queries)
    stock, want = bench.stock_attention(step)
    stock()
    step.runner(kernels, 1)()
    assert torch.allclose(step.out, want, atol=1e-5)
    assert step.plan(kernels).num_live_tokens.tolist() == [100, 100]

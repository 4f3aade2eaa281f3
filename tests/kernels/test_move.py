"""Relocation copies and key norms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_problems import keys_values, make_problem

from vtoken.kernels.layout import KVLayout

LAYOUTS = [(16, 16), (32, 32), (64, 32), (48, 48), (128, 128)]


def layers(layout: KVLayout, dtype, count=3, blocks=9, heads=3):
    g = torch.Generator().manual_seed(1)
    shape = (blocks, heads, layout.block_size, 2 * layout.head_size)
    return [torch.randn(shape, generator=g).to(dtype) for _ in range(count)]


def tokens(kv, layout, slots):
    """Keys and values of slots as one array, read with the reference reader."""
    problem = make_problem(queries=[1], lens=[1])
    problem.layout, problem.kv = layout, kv
    return np.concatenate(keys_values(problem, slots), axis=-1)


@pytest.mark.parametrize("block_size, k_group", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_move(kernels, block_size, k_group, dtype, threads):
    layout = KVLayout(block_size=block_size, head_size=48, k_group=k_group)
    kvs = layers(layout, dtype)
    num_slots = 9 * block_size
    order = np.random.default_rng(0).permutation(num_slots)
    src, dst = order[:100], order[20:120]  # 80 slots are both a source and a destination
    before = [tokens(kv, layout, np.arange(num_slots)) for kv in kvs]
    scores = [torch.rand(num_slots), torch.rand(num_slots)]
    scores_before = [s.clone() for s in scores]
    kernels.move(
        kvs, torch.from_numpy(src), torch.from_numpy(dst), layout=layout, scores=scores,
        num_threads=threads,
    )  # fmt: skip
    for kv, old in zip(kvs, before, strict=True):
        new = old.copy()
        new[dst] = old[src]
        assert np.array_equal(tokens(kv, layout, np.arange(num_slots)), new)
    for array, old in zip(scores, scores_before, strict=True):
        new = old.numpy().copy()
        new[dst] = old.numpy()[src]
        assert np.array_equal(array.numpy(), new)


def test_swap_and_cycle(kernels):
    layout = KVLayout(block_size=16, head_size=32, k_group=16)
    (kv,) = layers(layout, torch.float32, count=1)
    old = tokens(kv, layout, np.arange(40))
    src, dst = torch.tensor([0, 17, 5, 6, 7]), torch.tensor([17, 0, 6, 7, 5])
    kernels.move([kv], src, dst, layout=layout)
    new = old.copy()
    new[dst.numpy()] = old[src.numpy()]
    assert np.array_equal(tokens(kv, layout, np.arange(40)), new)


def test_move_strided_layers(kernels):
    """Layers as slices of one allocation; what lies between them stays."""
    layout = KVLayout(block_size=16, head_size=32, k_group=16)
    big = torch.randn(5, 4, 32, 64)
    before, kv = big.clone(), big[:, 1:3, :16]
    old = tokens(kv.contiguous(), layout, np.arange(80))
    kernels.move([kv], torch.arange(30), torch.arange(50, 80), layout=layout)
    new = old.copy()
    new[50:80] = old[:30]
    assert np.array_equal(tokens(kv.contiguous(), layout, np.arange(80)), new)
    big[:, 1:3, :16] = before[:, 1:3, :16]
    assert torch.equal(big, before)


def test_moves_outside_the_cache_are_refused(kernels):
    layout = KVLayout(block_size=16, head_size=32, k_group=16)
    kvs = layers(layout, torch.float32)
    for src, dst in [(0, 9 * 16), (9 * 16, 0), (-1, 0)]:
        with pytest.raises(AssertionError):
            kernels.move(kvs, torch.tensor([src]), torch.tensor([dst]), layout=layout)


def test_no_moves(kernels):
    layout = KVLayout(block_size=16, head_size=32, k_group=16)
    kvs = layers(layout, torch.float32)
    before = [kv.clone() for kv in kvs]
    none = torch.empty(0, dtype=torch.int64)
    kernels.move(kvs, none, none, layout=layout)
    assert all(torch.equal(a, b) for a, b in zip(kvs, before, strict=True))


@pytest.mark.parametrize("block_size, k_group", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_key_norms(kernels, block_size, k_group, dtype):
    layout = KVLayout(block_size=block_size, head_size=80, k_group=k_group)
    kvs = layers(layout, dtype, count=2)
    slots = np.random.default_rng(0).permutation(9 * block_size)[:77]
    scores = torch.ones(9 * block_size)
    for kv in kvs:
        kernels.key_norms(kv, torch.from_numpy(slots), scores, layout=layout)
    want = np.ones(9 * block_size)
    for kv in kvs:
        keys = tokens(kv, layout, slots)[..., :80]
        want[slots] += np.linalg.norm(keys, axis=-1).sum(-1)
    assert np.allclose(scores.numpy(), want, rtol=1e-6)

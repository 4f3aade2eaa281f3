"""The layout probe, on layouts of our own and on the engine's own op."""

from __future__ import annotations

import pytest
import torch

from vtoken.errors import UnsupportedError
from vtoken.kernels.layout import KVLayout, probe_layout


def kv_like(block_size, head_size, dtype=torch.float32, heads=3):
    return torch.empty(7, heads, block_size, 2 * head_size, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "block_size, k_group", [(16, 16), (32, 32), (32, 16), (64, 64), (64, 32), (96, 48), (128, 32)]
)
def test_probe_finds_the_key_group(block_size, k_group, dtype):
    layout = KVLayout(block_size=block_size, head_size=48, k_group=k_group)

    def write(key, value, kv, slots):
        layout.scatter(kv, slots, key, value)

    assert probe_layout(write, kv_like(block_size, 48, dtype)) == layout


def write_plain(key, value, kv, slots):
    """A token's key and value side by side: the layout of GPUs."""
    kv[slots // 16, :, slots % 16] = torch.cat([key, value], -1)


def write_nothing(key, value, kv, slots):
    pass


def write_too_much(key, value, kv, slots):
    KVLayout(block_size=16, head_size=48, k_group=16).scatter(kv, slots, key, value)
    kv[0, 0, 0, 0] += 1


@pytest.mark.parametrize("write", [write_plain, write_nothing, write_too_much])
def test_probe_refuses_what_it_cannot_read(write):
    with pytest.raises(UnsupportedError, match="block size 16, head size 48"):
        probe_layout(write, kv_like(16, 48))


def test_probe_refuses_a_quantised_cache():
    with pytest.raises(UnsupportedError, match="float32, bfloat16, float16"):
        probe_layout(write_plain, kv_like(16, 48, torch.float8_e4m3fn))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "isa, block_size", [("vec16", 16), ("vec16", 48), ("vec", 32), ("vec", 64)]
)
def test_probe_on_the_engine(isa, block_size, dtype):
    stock = pytest.importorskip("vllm._custom_ops")
    from vllm.platforms import current_platform

    current_platform.import_kernels()

    def write(key, value, kv, slots):
        n, heads, size, _ = kv.shape
        halves = kv.view(n, heads, size * 2, -1).chunk(2, dim=2)
        stock.cpu_attn_reshape_and_cache(key, value, *halves, slots, isa)

    found = probe_layout(write, kv_like(block_size, 64, dtype))
    assert found == KVLayout(block_size=block_size, head_size=64, k_group=block_size)

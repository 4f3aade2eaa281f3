"""Where a token's key and value lie inside a KV block, and how to find out at start-up.

Legend: B blocks, H KV heads, N block size, D head size, M tokens, all sizes in tokens or cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from vtoken.errors import UnsupportedError
from vtoken.kernels.contract import WriteFn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUP_TOKENS = 16  # tokens and head dims that the C++ kernels take at a time


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Interior of one (block, head) of a `[B, H, N, 2 * D]` KV tensor.

    First N * D cells of keys, as `N / k_group` groups of `[D, k_group]`; then values as `[N, D]`.

    Attributes:
        block_size: N, tokens.
        head_size: D, cells.
        k_group: tokens whose keys are interleaved; N itself for vLLM's "vec" and "vec16".
    """

    block_size: int
    head_size: int
    k_group: int

    def check(self, kv: torch.Tensor) -> None:
        """Assert that `kv` is a `[B, H, N, 2 * D]` tensor with a contiguous interior."""
        row = 2 * self.head_size
        assert kv.ndim == 4 and tuple(kv.shape[2:]) == (self.block_size, row), (kv.shape, self)
        assert kv.stride(3) == 1 and kv.stride(2) == row, kv.stride()

    def keys(self, kv: torch.Tensor) -> torch.Tensor:
        """View the keys as `[B, H, N / k_group, D, k_group]`."""
        n, d, g = self.block_size, self.head_size, self.k_group
        shape = (*kv.shape[:2], n // g, d, g)
        stride = (*kv.stride()[:2], d * g, g, 1)
        return kv.as_strided(shape, stride)

    def values(self, kv: torch.Tensor) -> torch.Tensor:
        """View the values as `[B, H, N, D]`."""
        n, d = self.block_size, self.head_size
        offset = kv.storage_offset() + n * d
        return kv.as_strided((*kv.shape[:2], n, d), (*kv.stride()[:2], d, 1), offset)

    def gather(self, kv: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy out keys and values of int64[M] slots, each `[M, H, D]`."""
        block, offset = slots // self.block_size, slots % self.block_size
        k = self.keys(kv)[block, :, offset // self.k_group, :, offset % self.k_group]
        return k, self.values(kv)[block, :, offset]

    def scatter(self, kv: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        """Write keys and values, each `[M, H, D]`, into int64[M] slots."""
        block, offset = slots // self.block_size, slots % self.block_size
        self.keys(kv)[block, :, offset // self.k_group, :, offset % self.k_group] = k
        self.values(kv)[block, :, offset] = v


def probe_layout(write: WriteFn, kv_like: torch.Tensor) -> KVLayout:
    """See `contract.Kernels.probe`: the layout whose every cell, written or not, is as it should."""
    _, heads, n, row = kv_like.shape
    d = row // 2
    if kv_like.dtype not in DTYPES:
        raise UnsupportedError("kv cache dtype", str(kv_like.dtype), _names(DTYPES))
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(kv_like.dtype)

    before = draw(3, heads, n, row)
    # Two of three blocks, in a scrambled order: every offset is seen, and one block must not change.
    slots = torch.randperm(2 * n, generator=generator) + n
    key, value = draw(2 * n, heads, d), draw(2 * n, heads, d)
    kv = before.clone()
    write(key, value, kv, slots)
    for group in [n, *range(GROUP_TOKENS, n, GROUP_TOKENS)]:
        if n % group:
            continue
        layout = KVLayout(block_size=n, head_size=d, k_group=group)
        expected = before.clone()
        layout.scatter(expected, slots, key, value)
        if torch.equal(kv, expected):
            return layout
    raise UnsupportedError(
        "kv cache layout",
        f"block size {n}, head size {d}, {kv_like.dtype}",
        "the engine stores keys in an order the kernels cannot read; float32, or a block size "
        "that is not a multiple of 32, selects a layout that works where AMX is the cause",
    )


@cache
def check_supported(layout: KVLayout, dtype: torch.dtype) -> None:
    """Refuse what the C++ kernels cannot run, saying what would work.

    Raises:
        UnsupportedError: head size, block size, key group or dtype.
    """
    if dtype not in DTYPES:
        raise UnsupportedError("kv cache dtype", str(dtype), _names(DTYPES))
    if layout.head_size % 16 or not 16 <= layout.head_size <= 256:
        raise UnsupportedError("head size", layout.head_size, "a multiple of 16 up to 256")
    if layout.block_size % 16 or not 16 <= layout.block_size <= 128:
        raise UnsupportedError("block size", layout.block_size, "a multiple of 16 up to 128")
    if layout.k_group % 16 or layout.block_size % layout.k_group:
        raise UnsupportedError("key group", layout.k_group, "a divisor of the block size, by 16s")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)

"""One number per KV slot, over the bytes of K and V in every layer.

    h(slot) = sum of w[i] * x[i] mod 2^32,   x: K and V of all layers and heads as integers

The weights are random and odd, so a change of a single cell always changes the sum, and other
changes go unseen once in 2^32. A sum of products needs no Python per token: a layer is a
few torch calls for all slots at once. The hash of an event, over many tokens in the order of their
ids, is xxhash (or BLAKE2 where it is not installed) over these numbers.

Legend: M slots, B blocks, N block size, H KV heads, D head size, g keys interleaved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

_AS_INTEGERS = {4: torch.int32, 2: torch.int16, 1: torch.int8}


class SlotHasher:
    """Hashes KV slots of all layers of one worker.

    Whole blocks are read, in one piece each: K of a single token lies scattered over its block,
    and picking it out cell by cell takes ten times as long.

    Args:
        kvs: one KV tensor `[B, H, N, 2 * D]` per layer, of one shape and dtype.
        layout: their interior, a vtoken.kernels.KVLayout.
        seed: of the weights; hashes compare only within one seed.
    """

    def __init__(self, kvs: Sequence[torch.Tensor], layout, seed: int = 0x5EED) -> None:
        first = kvs[0]
        self.device, self.block_size = first.device, layout.block_size
        self._integers = _AS_INTEGERS[first.element_size()]
        self._keys = [layout.keys(kv) for kv in kvs]  # [B, H, N / g, D, g]
        self._values = [layout.values(kv) for kv in kvs]  # [B, H, N, D]
        heads, size = first.shape[1], layout.head_size
        generator = torch.Generator().manual_seed(seed)
        shape = (len(kvs), 2, heads, size)
        weights = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64)
        weights = (weights | 1).to(torch.int32).to(self.device)
        self._key_weights = weights[:, 0, :, None, :, None]  # [layers, H, 1, D, 1]
        self._value_weights = weights[:, 1, :, None, :]  # [layers, H, 1, D]

    def hash_slots(self, slots: np.ndarray) -> np.ndarray:
        """Hash slots.

        Args:
            slots: int64[M].

        Returns:
            uint32[M].
        """
        if not len(slots):
            return np.empty(0, np.uint32)
        blocks, row = np.unique(slots // self.block_size, return_inverse=True)
        where = torch.from_numpy(blocks.astype(np.int64)).to(self.device)
        total = torch.zeros(len(blocks), self.block_size, dtype=torch.int32, device=self.device)
        for layer, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            k = keys.index_select(0, where).view(self._integers) * self._key_weights[layer]
            v = values.index_select(0, where).view(self._integers) * self._value_weights[layer]
            # Sums wrap around, as they should.
            total += k.sum((1, 3), dtype=torch.int32).view_as(total)
            total += v.sum((1, 3), dtype=torch.int32)
        return total.cpu().numpy().view(np.uint32)[row, slots % self.block_size]


def digest(ids: np.ndarray, hashes: np.ndarray) -> str:
    """Hex digest of tokens with their KV, ordered by id: what an event's two sides compare."""
    order = np.argsort(ids, kind="stable")
    data = np.ascontiguousarray(ids[order], np.int64).tobytes() + hashes[order].tobytes()
    try:
        import xxhash
    except ImportError:
        return hashlib.blake2b(data, digest_size=8).hexdigest()
    return xxhash.xxh3_64_hexdigest(data)

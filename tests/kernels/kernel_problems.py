"""Problems with holes, and what float64 says about them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from vtoken.kernels import available, load
from vtoken.kernels.layout import KVLayout

CPP_OK, CPP_WHY = available()
needs_cpp = pytest.mark.skipif(not CPP_OK, reason=CPP_WHY)


def load_cpp():
    """The compiled kernels, or a skip that says why there are none."""
    if not CPP_OK:
        pytest.skip(CPP_WHY)
    return load("cpp")


@dataclass
class Problem:
    """A paged batch with holes, all dead cells set to `poison`."""

    layout: KVLayout
    kv: torch.Tensor
    query: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    live: torch.Tensor  # bool[R, P]
    scale: float

    @property
    def num_slots(self) -> int:
        return self.kv.shape[0] * self.layout.block_size

    def slots(self, r: int) -> np.ndarray:
        """Live slots of a request, in physical order."""
        length = int(self.seq_lens[r])
        physical = np.flatnonzero(self.live[r, :length].numpy())
        n = self.layout.block_size
        return self.block_table[r].numpy().astype(np.int64)[physical // n] * n + physical % n

    def plan(self, kernels, *, masked: bool = True, score_queries=-1):
        return kernels.plan(
            self.block_table, self.seq_lens, self.query_start_loc,
            block_size=self.layout.block_size,
            live_mask=self.live if masked else None, score_queries=score_queries,
        )  # fmt: skip


def make_problem(
    *,
    queries: list[int],
    lens: list[int],
    heads: int = 6,
    kv_heads: int = 2,
    head_size: int = 32,
    block_size: int = 16,
    k_group: int | None = None,
    holes: float = 0.4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    poison: float = float("nan"),
    spread: float = 1.0,
) -> Problem:
    """Random keys and values; every cell no live token owns holds `poison`."""
    g = torch.Generator().manual_seed(seed)
    layout = KVLayout(block_size=block_size, head_size=head_size, k_group=k_group or block_size)
    rows = len(lens)
    width = max(1, max(-(-n // block_size) for n in lens)) + 1
    num_blocks = rows * width + 2
    table = torch.randperm(num_blocks, generator=g)[: rows * width].to(torch.int32)
    table = table.view(rows, width)
    live = torch.rand(rows, width * block_size, generator=g) >= holes
    for r, (n, length) in enumerate(zip(queries, lens, strict=True)):
        if n > 1:
            live[r, length - n : length] = True
        elif length:
            live[r, int(torch.randint(length, (1,), generator=g))] = True
    kv = torch.full((num_blocks, kv_heads, block_size, 2 * head_size), poison).to(dtype)
    problem = Problem(
        layout, kv,
        torch.randn(sum(queries), heads, head_size, generator=g).mul(spread).to(dtype),
        table, torch.tensor(lens, dtype=torch.int32),
        torch.tensor(np.concatenate([[0], np.cumsum(queries)]), dtype=torch.int32),
        live, head_size**-0.5,
    )  # fmt: skip
    for r in range(rows):
        slots = torch.from_numpy(problem.slots(r))
        shape = (slots.numel(), kv_heads, head_size)
        layout.scatter(
            kv, slots,
            torch.randn(shape, generator=g).to(dtype), torch.randn(shape, generator=g).to(dtype),
        )  # fmt: skip
    return problem


def keys_values(problem: Problem, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 [M, H, D] keys and values, read cell by cell from the definition of the layout."""
    n, d, g = (
        problem.layout.block_size, problem.layout.head_size, problem.layout.k_group,
    )  # fmt: skip
    flat = problem.kv.double().numpy().reshape(problem.kv.shape[0], problem.kv.shape[1], -1)
    block, off = slots // n, slots % n
    dims = np.arange(d)
    k_cell = (off // g * g * d + off % g)[:, None] + dims[None] * g
    v_cell = n * d + off[:, None] * d + dims[None]
    heads = np.arange(flat.shape[1])
    at = (block[:, None, None], heads[None, :, None])
    return flat[(*at, k_cell[:, None])], flat[(*at, v_cell[:, None])]


def reference(problem: Problem, *, score_queries=-1, softcap: float = 0.0):
    """float64 outputs [T, HQ, D] and score sums [S], query by query."""
    rows = len(problem.seq_lens)
    query = problem.query.double().numpy()
    out, scores = np.zeros_like(query), np.zeros(problem.num_slots)
    starts = problem.query_start_loc.tolist()
    for r in range(rows):
        slots = problem.slots(r)
        keys, values = keys_values(problem, slots)
        n = starts[r + 1] - starts[r]
        for i in range(n):
            seen = len(slots) - n + i + 1
            if seen <= 0:
                continue
            q = query[starts[r] + i].reshape(keys.shape[1], -1, keys.shape[2])
            x = np.einsum("hgd,mhd->hgm", q, keys[:seen]) * problem.scale
            if softcap:
                x = np.tanh(x / softcap) * softcap
            p = np.exp(x - x.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            out[starts[r] + i] = np.einsum("hgm,mhd->hgd", p, values[:seen]).reshape(
                query.shape[1:]
            )
            if score_queries < 0 or i >= n - score_queries:
                np.add.at(scores, slots[:seen], p.sum((0, 1)))
    return out, scores

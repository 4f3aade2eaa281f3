"""The kernels in plain torch: same results, several times slower, any CPU and no compiler."""

from __future__ import annotations

import torch

from vtoken.kernels.base import CPUKernels, CPUPlan


class TorchPlan(CPUPlan):
    """Live slots of every request that has queries."""

    def __init__(self, block_table, seq_lens, query_start_loc, mask, score_queries, n: int) -> None:
        self.block_size = n
        self.requests: list[tuple[int, int, int, torch.Tensor]] = []
        self.num_live_tokens = torch.zeros(seq_lens.numel(), dtype=torch.int32)
        self.max_block, self.num_queries = -1, 0
        starts = query_start_loc.tolist()
        for r, length in enumerate(seq_lens.tolist()):
            first, queries = starts[r], starts[r + 1] - starts[r]
            assert first >= 0 and queries >= 0, starts
            self.num_queries = max(self.num_queries, starts[r + 1])
            if queries == 0:
                continue
            assert length >= queries, f"request {r}: {queries} queries, {length} keys"
            physical = torch.arange(length)
            if mask is not None:
                physical = physical[mask[r, :length]]
                own = int((physical >= length - queries).sum())
                assert queries == 1 or own == queries, f"request {r}: a token of the chunk is dead"
            blocks = block_table[r, : -(-length // n)].long()[physical // n]
            assert bool((blocks >= 0).all()), f"request {r}: bad block"
            slots = blocks * n + physical % n
            self.num_live_tokens[r] = slots.numel()
            if slots.numel():
                self.max_block = max(self.max_block, int(blocks.max()))
            count = queries if score_queries < 0 else min(score_queries, queries)
            self.requests.append((first, queries, count, slots))


class TorchKernels(CPUKernels):
    """Gathers live tokens, then dense attention in float32."""

    name = "torch"

    # Queries worked on at once, so that the logits of a long chunk stay small.
    chunk_queries = 256

    def __init__(self, why: str = "torch gathers") -> None:
        self.why = why

    _plan = TorchPlan

    def _attention(
        self, plan, query, kv, out, layout, scale, softcap, step_scores, num_threads
    ) -> None:
        for first, queries, count, slots in plan.requests:
            if slots.numel() == 0:
                if out is not None:
                    out[first : first + queries] = 0
                continue
            keys, values = layout.gather(kv, slots)
            sums = torch.zeros(slots.numel())
            for low in range(0, queries, self.chunk_queries):
                high = min(queries, low + self.chunk_queries)
                part = slice(first + low, first + high)
                history = slots.numel() - queries
                p = _probabilities(query[part], keys, history + low, scale, softcap)
                if step_scores is not None and high > queries - count:
                    sums += p[:, :, max(0, queries - count - low) :].sum((0, 1, 2))
                if out is not None:
                    v = values.float().permute(1, 0, 2)[:, None]
                    out[part] = (p @ v).permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)
            if step_scores is not None:
                step_scores[slots] += sums

    def _move(self, kvs, src, dst, layout, num_threads) -> None:
        for kv in kvs:
            layout.scatter(kv, dst, *layout.gather(kv, src))

    def _key_norms(self, kv, slots, scores, layout) -> None:
        keys, _ = layout.gather(kv, slots)
        scores[slots] += keys.float().norm(dim=-1).sum(-1)


def _probabilities(
    query: torch.Tensor, keys: torch.Tensor, before: int, scale: float, softcap: float
) -> torch.Tensor:
    """float32[H, G, n, M], softmax over the first `before + i + 1` keys for query i.

    Args:
        query: `[n, HQ, D]`.
        keys: `[M, H, D]`.
    """
    n, (num_keys, heads, d) = query.shape[0], keys.shape
    q = query.float().view(n, heads, -1, d).permute(1, 2, 0, 3)
    x = (q @ keys.float().permute(1, 2, 0)[:, None]) * scale
    if softcap:
        x = torch.tanh(x / softcap) * softcap
    later = torch.arange(num_keys)[None] > before + torch.arange(n)[:, None]
    return torch.softmax(x.masked_fill(later, float("-inf")), -1)

"""What vToken asks of a device's attention: plan once a step, then run every layer.

An implementation is any object with these methods; it need not inherit from anything here. Those
for CPUs are `cpp.CppKernels` and `fallback.TorchKernels`. What a policy keeps per slot is updated
by `vtoken.kernels.scores`, in plain torch on any device.

Legend: R requests, T query rows, HQ query heads, H KV heads, D head size, B blocks, N block size,
L layers, M tokens, S slots (`B * N`; slot = block_id * N + offset).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

WriteFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class Layout(Protocol):
    """Where a token's key and value lie in one layer's cache, N and D in tokens and cells."""

    block_size: int
    head_size: int

    def keys(self, kv: torch.Tensor) -> torch.Tensor:
        """View the keys; an axis over blocks comes first."""

    def values(self, kv: torch.Tensor) -> torch.Tensor:
        """View the values; an axis over blocks comes first."""

    def gather(self, kv: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy out keys and values of int64[M] slots, each `[M, H, D]`."""

    def scatter(
        self, kv: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write keys and values, each `[M, H, D]`, into int64[M] slots."""


class Plan(Protocol):
    """What one step's attention reads; serves every layer of the step.

    Attributes:
        num_live_tokens: int32[R], tokens attended by each request's last query; 0 where a request
            has no query.
    """

    num_live_tokens: torch.Tensor


class Kernels(Protocol):
    """Attention over live tokens with score sums, relocation copies and key norms.

    Attributes:
        name: which implementation, a word.
        why: one line for people: which code runs, and why not another.
    """

    name: str
    why: str

    def probe(self, write: WriteFn, kv_like: torch.Tensor) -> Layout:
        """Learn a KV cache's interior by writing known tokens through the engine's own op.

        Args:
            write: `write(key[M, H, D], value[M, H, D], kv, slots int64[M])` stores tokens in `kv`.
            kv_like: one layer's cache, for its shape and dtype; not touched.

        Raises:
            UnsupportedError: not a layout, size or dtype that these kernels can read.
        """

    def plan(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        *,
        block_size: int,
        live_mask: torch.Tensor | None = None,
        score_queries: int = -1,
    ) -> Plan:
        """Lay out one step's attention.

        Args:
            block_table: int32[R, >= blocks], rows may be strided.
            seq_lens: int32[R], physical length of each request, this step's tokens included.
            query_start_loc: int32[R + 1], request r owns query rows [r], [r + 1]; none is fine.
            live_mask: None (no holes), or bool[R, P] by physical index. What it holds at or beyond
                a request's length is ignored.
            score_queries: count only the last this many queries of a request in the scores; -1
                all, 0 none.

        A request with one query attends every live slot; the token may sit anywhere (slot reuse).
        With n > 1 queries the chunk's tokens are the last n physical indices, ascending and all
        live: query i attends the live history and the chunk's tokens up to itself.

        Raises:
            AssertionError: arrays contradict each other, or a token of a chunk is dead.
        """

    def attention(
        self,
        plan: Plan,
        query: torch.Tensor,
        kv: torch.Tensor,
        out: torch.Tensor | None,
        *,
        layout: Layout,
        scale: float,
        softcap: float = 0.0,
        step_scores: torch.Tensor | None = None,
        num_threads: int | None = None,
    ) -> None:
        """Run one layer's attention over live tokens.

        Args:
            plan: this step's plan.
            query: `[T, HQ, D]` of the cache's dtype; rows may be strided.
            kv: one layer's cache.
            out: `[T, HQ, D]`, or None to compute scores alone (values are then not read, queries
                that do not count not computed).
            scale, softcap: logits are `softcap * tanh(scale * q.k / softcap)`, 0 for no cap.
            step_scores: float32[S] or None; `step_scores[slot]` grows by the slot's attention
                probability summed over heads and counted queries.
            num_threads: of the CPU, at most; None takes torch's number.

        The result does not depend on the number of threads. NaN and inf in dead slots or beyond a
        request's length stay there. A request without a live token gets zeros.
        """

    def move(
        self,
        kvs: Sequence[torch.Tensor],
        src_slots: torch.Tensor,
        dst_slots: torch.Tensor,
        *,
        layout: Layout,
        scores: Sequence[torch.Tensor] = (),
        num_threads: int | None = None,
    ) -> None:
        """Copy tokens from slot to slot in every layer, and their scores.

        All sources are read before any destination is written, so a slot may be the source of one
        move and the destination of another.

        Args:
            kvs: L layers' caches, of one shape, stride and dtype.
            src_slots, dst_slots: int64[M]; destinations are distinct.
            scores: arrays [S] whose entries move along.
        """

    def key_norms(
        self, kv: torch.Tensor, slots: torch.Tensor, scores: torch.Tensor, *, layout: Layout
    ) -> None:
        """Add each slot's key norm, summed over heads, to `scores`: `scores[slot] += sum |k|`.

        Args:
            kv: one layer's cache; called for each layer it sums over layers too.
            slots: int64[M], distinct.
            scores: float32[S].
        """

"""Kernels against the engine's own op, in one process, interleaved, fastest of N.

    python -m vtoken.kernels.bench [--threads 1 2] [--shapes smol llama] [--dtypes f32 bf16]

A row's `ratio_to_stock` is its time over that of stock decode attention (no scores) on the same
live tokens, packed. Names read `what/holes/shape/dtype/threads`.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from vtoken.kernels import Kernels, KVLayout, load, pack_mask

SHAPES = {"smol": (9, 3, 64), "llama": (32, 8, 128)}  # query heads, KV heads, head size
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
NUM_LAYERS = {"smol": 30, "llama": 32}
HOLES_PCT = (0, 25, 50)


@dataclass(frozen=True)
class Row:
    """One measurement; `ratio_to_stock` is None where nothing in stock compares."""

    name: str
    value: float
    unit: str
    ratio_to_stock: float | None = None


class Batch:
    """One decode step: holed cache, mask and a packed twin with the same live tokens."""

    def __init__(
        self, shape: str, dtype: torch.dtype, holes: float, batch: int, context: int, n: int
    ) -> None:
        g = torch.Generator().manual_seed(0)
        heads, kv_heads, d = SHAPES[shape]
        self.layout = KVLayout(block_size=n, head_size=d, k_group=n)
        self.scale = d**-0.5
        physical = round(context / (1 - holes))
        width = -(-physical // n)
        self.live = torch.zeros(batch, width * n, dtype=torch.bool)
        for row in self.live:
            row[torch.randperm(physical, generator=g)[:context]] = True
        self.query = torch.randn(batch, heads, d, generator=g).to(dtype)
        self.starts = torch.arange(batch + 1, dtype=torch.int32)
        self.lens = torch.full((batch,), physical, dtype=torch.int32)
        self.table = torch.randperm(batch * width, generator=g).to(torch.int32).view(batch, width)
        self.kv = torch.randn(batch * width, kv_heads, n, 2 * d, generator=g).to(dtype)
        self.packed_lens = torch.full((batch,), context, dtype=torch.int32)
        packed_width = -(-context // n)
        order = torch.randperm(batch * packed_width, generator=g).to(torch.int32)
        self.packed_table = order.view(batch, packed_width)
        self.packed_kv = torch.zeros(batch * packed_width, kv_heads, n, 2 * d, dtype=dtype)
        for r in range(batch):
            src = self._slots(self.table[r], self.live[r].nonzero()[:, 0])
            dst = self._slots(self.packed_table[r], torch.arange(context))
            self.layout.scatter(self.packed_kv, dst, *self.layout.gather(self.kv, src))
        self.out = torch.empty_like(self.query)
        self.scores = torch.zeros(self.kv.shape[0] * n)

    def _slots(self, blocks: torch.Tensor, physical: torch.Tensor) -> torch.Tensor:
        n = self.layout.block_size
        return blocks.long()[physical // n] * n + physical % n

    def runner(self, kernels: Kernels, threads: int, *, scores=True, out=True) -> Callable:
        """A call that attends the holed cache."""
        mask = pack_mask(self.live)
        plan = kernels.plan(
            self.table, self.lens, self.starts, block_size=self.layout.block_size, live_mask=mask
        )
        return lambda: kernels.attention(
            plan, self.query, self.kv, self.out if out else None, layout=self.layout,
            scale=self.scale, step_scores=self.scores if scores else None, num_threads=threads,
        )  # fmt: skip


def stock_decode(batch: Batch) -> tuple[Callable, torch.Tensor]:
    """The engine's decode attention over the packed twin, and where its output lands.

    Raises:
        ImportError: vLLM is not installed.
    """
    ops = importlib.import_module("vllm._custom_ops")
    importlib.import_module("vllm.platforms").current_platform.import_kernels()
    heads, d = batch.query.shape[1:]
    kv, n = batch.packed_kv, batch.layout.block_size
    isa = "vec16" if n % 32 else "vec"
    meta = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=batch.query.shape[0], num_heads=heads, num_kv_heads=kv.shape[1], head_dim=d,
        seq_lens=batch.packed_lens, dtype=kv.dtype, query_start_loc=batch.starts, causal=True,
        sliding_window_size=-1, isa=isa, enable_kv_split=True,
    )  # fmt: skip
    keys, values = kv.view(kv.shape[0], kv.shape[1], n * 2, -1).chunk(2, dim=2)
    out = torch.empty_like(batch.query)

    def run() -> None:
        ops.cpu_attention_with_kv_cache(
            query=batch.query, key_cache=keys, value_cache=values, output=out,
            query_start_loc=batch.starts, seq_lens=batch.packed_lens, scale=batch.scale,
            causal=True, alibi_slopes=None, sliding_window=-1, block_table=batch.packed_table,
            softcap=0.0, scheduler_metadata=meta, s_aux=None,
        )  # fmt: skip

    return run, out


def fastest(calls: dict[str, Callable], budget_s: float, threads: int) -> dict[str, float]:
    """Time calls in turn until the budget is spent; the fastest of each, in seconds.

    With one thread it is processor time: other work on the core does not count.
    """
    clock = time.thread_time if threads == 1 else time.perf_counter
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    end, rounds = time.perf_counter() + budget_s, 0
    while time.perf_counter() < end or rounds < 3:
        rounds += 1
        for name, call in calls.items():
            for _ in range(2):
                start = clock()
                call()
                best[name] = min(best[name], clock() - start)
    return best


def decode_rows(
    shape: str, dtype: str, threads: int, *, holes_pct=HOLES_PCT, batch=8, context=2048,
    block_size=16, budget_s=1.0, stock=True, fallback=True,
) -> Iterator[Row]:  # fmt: skip
    """Decode attention with and without scores, and scores alone, at each share of holes."""
    torch.set_num_threads(threads)
    compiled = load()
    for pct in holes_pct:
        step = Batch(shape, DTYPES[dtype], pct / 100, batch, context, block_size)
        tail = f"holes{pct}/{shape}/{dtype}/thr{threads}"
        calls = {
            f"attention_scores/{tail}": step.runner(compiled, threads),
            f"attention/{tail}": step.runner(compiled, threads, scores=False),
            f"scores_only/{tail}": step.runner(compiled, threads, out=False),
        }
        base = f"stock/{tail}"
        if stock:
            calls[base] = stock_decode(step)[0]
        best = fastest(calls, budget_s, threads)
        if fallback:
            slow = f"torch_scores/{tail}"
            best |= fastest({slow: step.runner(load("torch"), threads)}, 0.0, threads)
        for name, seconds in best.items():
            yield Row(name, seconds * 1e6, "us", seconds / best[base] if stock else None)


def main() -> None:
    """Print a table of decode rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["f32", "bf16"])
    parser.add_argument("--holes", type=int, nargs="+", default=list(HOLES_PCT))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--budget-s", type=float, default=1.0, help="seconds a group of rows")
    parser.add_argument("--no-fallback", action="store_true", help="leave out torch")
    args = parser.parse_args()
    for threads in args.threads:
        for shape in args.shapes:
            for dtype in args.dtypes:
                for row in decode_rows(
                    shape, dtype, threads, holes_pct=args.holes, batch=args.batch,
                    context=args.context, block_size=args.block_size, budget_s=args.budget_s,
                    fallback=not args.no_fallback,
                ):  # fmt: skip
                    ratio = "" if row.ratio_to_stock is None else f"{row.ratio_to_stock:6.2f}"
                    print(f"{row.name:44} {row.value:10.0f} {row.unit} {ratio}", flush=True)


if __name__ == "__main__":
    main()

"""Kernels against the engine's own op, in one process, interleaved, fastest of N.

    python -m vtoken.kernels.bench [--threads 1 2] [--shapes smol llama] [--dtypes f32 bf16]

A row's `ratio_to_stock` is its time over that of stock attention (no scores) on the same live
tokens, packed, with as many queries. Names read `what/case/shape/dtype`.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from vtoken.kernels import load
from vtoken.kernels.contract import Kernels, Plan
from vtoken.kernels.layout import KVLayout
from vtoken.kernels.scores import StepShape, update_scores
from vtoken.policies.base import ScoreKind

SHAPES = {"smol": (9, 3, 64), "llama": (32, 8, 128)}  # query heads, KV heads, head size
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
NUM_LAYERS = {"smol": 30, "llama": 32}
HOLES_PCT = (0, 25, 50)
MOVES = (1, 32, 512)  # tokens relocated in one call


@dataclass(frozen=True)
class Row:
    """One measurement; `ratio_to_stock` is None where nothing in stock compares."""

    name: str
    value: float
    unit: str
    num_threads: int
    ratio_to_stock: float | None = None


class Batch:
    """One step's batch: holed cache, mask and a packed twin with the same live tokens.

    Each request has `queries` queries, the newest tokens of it.
    """

    def __init__(
        self, shape: str, dtype: torch.dtype, holes: float, batch: int, context: int,
        block_size: int, queries: int = 1,
    ) -> None:  # fmt: skip
        g = torch.Generator().manual_seed(0)
        heads, kv_heads, d = SHAPES[shape]
        self.layout = KVLayout(block_size=block_size, head_size=d, k_group=block_size)
        self.scale = d**-0.5
        old = context - queries  # live tokens that a hole may lie between
        physical = round(old / (1 - holes)) + queries
        self.table = self._table(batch, physical, g)
        self.live = torch.zeros(batch, self.table.shape[1] * block_size, dtype=torch.bool)
        for row in self.live:
            row[torch.randperm(physical - queries, generator=g)[:old]] = True
            row[physical - queries : physical] = True
        self.query = torch.randn(batch * queries, heads, d, generator=g).to(dtype)
        self.starts = torch.arange(0, batch * queries + 1, queries, dtype=torch.int32)
        self.lens = torch.full((batch,), physical, dtype=torch.int32)
        interior = (kv_heads, block_size, 2 * d)
        self.kv = torch.randn(self.table.numel(), *interior, generator=g).to(dtype)
        self.packed_lens = torch.full_like(self.lens, context)
        self.packed_table = self._table(batch, context, g)
        self.packed_kv = torch.zeros(self.packed_table.numel(), *interior, dtype=dtype)
        for r in range(batch):
            dst = self._slots(self.packed_table[r], torch.arange(context))
            self.layout.scatter(self.packed_kv, dst, *self.layout.gather(self.kv, self.slots(r)))
        self.out = torch.empty_like(self.query)
        self.scores = torch.zeros(self.kv.shape[0] * block_size)

    def _table(self, batch: int, length: int, generator: torch.Generator) -> torch.Tensor:
        width = -(-length // self.layout.block_size)
        order = torch.randperm(batch * width, generator=generator)
        return order.to(torch.int32).view(batch, width)

    def _slots(self, blocks: torch.Tensor, physical: torch.Tensor) -> torch.Tensor:
        n = self.layout.block_size
        return blocks.long()[physical // n] * n + physical % n

    def slots(self, r: int) -> torch.Tensor:
        """int64[M], live slots of a request."""
        return self._slots(self.table[r], self.live[r].nonzero()[:, 0])

    def plan(self, kernels: Kernels, score_queries: int = -1) -> Plan:
        """Lay out the holed cache."""
        return kernels.plan(
            self.table, self.lens, self.starts, block_size=self.layout.block_size,
            live_mask=self.live, score_queries=score_queries,
        )  # fmt: skip

    def runner(
        self, kernels: Kernels, threads: int, *, scores=True, out=True, score_queries=-1
    ) -> Callable:
        """A call that attends the holed cache."""
        return partial(
            kernels.attention, self.plan(kernels, score_queries), self.query, self.kv,
            self.out if out else None, layout=self.layout, scale=self.scale,
            step_scores=self.scores if scores else None, num_threads=threads,
        )  # fmt: skip


def stock_attention(batch: Batch) -> tuple[Callable, torch.Tensor]:
    """The engine's attention over the packed twin, and where its output lands.

    Raises:
        ImportError: vLLM is not installed.
    """
    ops = importlib.import_module("vllm._custom_ops")
    importlib.import_module("vllm.platforms").current_platform.import_kernels()
    heads, d = batch.query.shape[1:]
    kv, n = batch.packed_kv, batch.layout.block_size
    isa = "vec16" if n % 32 else "vec"
    meta = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=batch.lens.numel(), num_heads=heads, num_kv_heads=kv.shape[1], head_dim=d,
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


def _rows(best: dict[str, float], case: str, threads: int, per: int = 0) -> Iterator[Row]:
    """Rows in microseconds, a call or one of `per` tokens, against the entry "stock"."""
    for name, seconds in best.items():
        ratio = seconds / best["stock"] if "stock" in best else None
        unit = "us/token" if per else "us"
        yield Row(f"{name}/{case}", seconds * 1e6 / (per or 1), unit, threads, ratio)


def decode_rows(
    shape: str, dtype: str, threads: int, *, holes_pct=HOLES_PCT, batch=8, context=2048,
    block_size=16, budget_s=1.0, stock=True, fallback=True,
) -> Iterator[Row]:  # fmt: skip
    """Decode attention with and without scores, and scores alone, at each share of holes."""
    for pct in holes_pct:
        step = Batch(shape, DTYPES[dtype], pct / 100, batch, context, block_size)
        calls = {
            "attention_scores": step.runner(load(), threads),
            "attention": step.runner(load(), threads, scores=False),
            "scores_only": step.runner(load(), threads, out=False),
        }
        if stock:
            calls["stock"] = stock_attention(step)[0]
        best = fastest(calls, budget_s, threads)
        if fallback:
            best |= fastest({"torch_scores": step.runner(load("torch"), threads)}, 0.0, threads)
        yield from _rows(best, f"holes{pct}/{shape}/{dtype}", threads)


def chunk_rows(
    shape: str, dtype: str, threads: int, *, queries=512, context=2048, block_size=16,
    budget_s=1.0, stock=True,
) -> Iterator[Row]:  # fmt: skip
    """A prefill chunk over a history with a quarter of holes: all queries counted, or the last."""
    step = Batch(shape, DTYPES[dtype], 0.25, 1, context, block_size, queries)
    calls = {
        "chunk_scores": step.runner(load(), threads),
        "chunk": step.runner(load(), threads, scores=False),
        "chunk_last32_scores_only": step.runner(load(), threads, out=False, score_queries=32),
    }
    if stock:
        calls["stock"] = stock_attention(step)[0]
    best = fastest(calls, budget_s, threads)
    yield from _rows(best, f"q{queries}_of_{context}/{shape}/{dtype}", threads)


def move_rows(
    shape: str, dtype: str, threads: int, *, block_size=16, budget_s=0.5, fallback=True
) -> Iterator[Row]:
    """Relocation in all layers of the model, per token."""
    _, heads, d = SHAPES[shape]
    layout = KVLayout(block_size=block_size, head_size=d, k_group=block_size)
    num_blocks = 2 * max(MOVES) // block_size
    row = torch.randn(num_blocks, heads, block_size, 2 * d).to(DTYPES[dtype])
    layers = [row.clone() for _ in range(NUM_LAYERS[shape])]
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(0))
    names = {"move": load()} | ({"torch_move": load("torch")} if fallback else {})
    for count in MOVES:
        src, dst = slots[:count].clone(), slots[-count:].clone()
        calls = {
            name: partial(k.move, layers, src, dst, layout=layout, num_threads=threads)
            for name, k in names.items()
        }
        best = fastest(calls, budget_s, threads)
        yield from _rows(best, f"n{count}/{shape}/{dtype}", threads, count)


def step_rows(
    shape: str, dtype: str, threads: int, *, batch=16, context=480, block_size=16, budget_s=0.5
) -> Iterator[Row]:
    """What a step costs once, whatever the number of layers; and key norms of one layer."""
    step = Batch(shape, DTYPES[dtype], 0.0, batch, context, block_size)
    compiled = load()
    plan, slots = step.plan(compiled), torch.cat([step.slots(r) for r in range(batch)])
    ones = torch.ones(batch, dtype=torch.int32)
    sizes = StepShape(
        num_live_tokens=plan.num_live_tokens, num_queries=ones, num_counted=ones,
        num_heads=NUM_LAYERS[shape] * SHAPES[shape][0],
    )  # fmt: skip
    kept, new = torch.zeros_like(step.scores), slots[:batch].clone()
    calls = {"plan": lambda: step.plan(compiled)} | {
        f"update_{kind.value}": partial(update_scores, kind, kept, step.scores, slots, sizes)
        for kind in (ScoreKind.ACCUMULATED, ScoreKind.WINDOW, ScoreKind.COUNT_ABOVE_THRESHOLD)
    }
    calls["key_norms"] = lambda: compiled.key_norms(step.kv, new, kept, layout=step.layout)
    best = fastest(calls, budget_s, threads)
    yield from _rows(best, f"b{batch}_ctx{context}/{shape}/{dtype}", threads)


SUITES = {"decode": decode_rows, "chunk": chunk_rows, "move": move_rows, "step": step_rows}


def rows(
    *, suites=tuple(SUITES), shapes=tuple(SHAPES), dtypes=("f32", "bf16"), threads=(1,),
    **options,
) -> Iterator[Row]:  # fmt: skip
    """Measure; rows come as they are done.

    Args:
        suites: names of SUITES; `options` go to each that takes them.
    """
    for num_threads in threads:
        torch.set_num_threads(num_threads)
        for suite in suites:
            takes = inspect.signature(SUITES[suite]).parameters
            given = {k: v for k, v in options.items() if k in takes}
            for shape in shapes:
                for dtype in dtypes:
                    yield from SUITES[suite](shape, dtype, num_threads, **given)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["f32", "bf16"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--holes-pct", type=int, nargs="+", default=HOLES_PCT)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--budget-s", type=float, default=1.0, help="seconds a group of rows")
    parser.add_argument("--no-stock", dest="stock", action="store_false", help="without vLLM")
    parser.add_argument("--no-fallback", dest="fallback", action="store_false", help="no torch")
    parser.add_argument("--batch", type=int, help="requests of a decode")
    parser.add_argument("--context", type=int, help="live tokens of each")
    args = {k: v for k, v in vars(parser.parse_args()).items() if v is not None}
    for row in rows(**args):
        ratio = "" if row.ratio_to_stock is None else f"{row.ratio_to_stock:5.2f} x stock"
        what = f"{row.name:50} {row.num_threads} thread"
        print(f"{what} {row.value:12.2f} {row.unit:8} {ratio}", flush=True)


if __name__ == "__main__":
    main()

"""Attention on CPUs: vLLM's own where a batch is packed, our kernels for holes and scores.

`CPUAttention` sits between vLLM's attention layers and their implementation. Per step it decides,
for the whole batch, what each layer's forward does:

    stock      vLLM's kernel, untouched: no holes, no scores wanted, and ours is not chosen
    all ours   one pass of our kernel gives output and scores: where it was compiled and the mode
               evicts (it measures faster than vLLM's)
    mixed      ours is not chosen (no compiler, or prompts where vLLM has matrix tiles): vLLM's
               kernel runs the batch, then ours does over the requests with holes, and adds the
               scores of the rest

Legend: R requests, T query rows, S slots of the pool.
"""

from __future__ import annotations

import numpy as np
import torch

from vtoken.core.messages import ScoreReport
from vtoken.kernels import load
from vtoken.kernels.contract import Kernels, Layout
from vtoken.kernels.scores import (
    ATTENTION_KINDS,
    WINDOW_QUERIES,
    StepShape,
    counted_queries,
    reset_scores,
    update_scores,
)
from vtoken.policies.base import ScoreKind

# Pools of up to so many slots are added up as a whole: under 0.1 ms, where listing the live slots
# of a batch takes several times that.
ADD_ALL_SLOTS = 1 << 17


def probe(kernels: Kernels, layer) -> Layout:
    """Learn where vLLM's own op puts keys and values of this layer.

    Raises:
        UnsupportedError: in an order that the kernels cannot read.
    """

    def write(key, value, kv, slots):
        layer.impl.do_kv_cache_update(layer, key, value, kv, slots)

    return kernels.probe(write, layer.kv_cache)


class StepWork:
    """What the layers' forwards do in one step, prepared once for all layers."""

    __slots__ = ("plan", "replaces_stock", "rows", "score_plan", "score_rows")

    def __init__(self) -> None:
        self.plan = None  # gives output (and scores where counted)
        self.rows = None  # int64: query rows of `plan`, None for all
        self.score_plan = None  # scores alone, of requests whose output vLLM's kernel made
        self.score_rows = None
        self.replaces_stock = False


class CPUAttention:
    """See the module's head.

    Attributes:
        kernels, layout: what runs, and how KV lies in a block.
        scores: float32[S], what the policy keeps per slot; None without a scored policy.
        decode_kernel, prefill_kernel: "ours" where our kernel serves packed batches too, of
            decodes alone or with prompts among them; else "stock".
    """

    def __init__(self, runner, layers: dict, config, block_size: int) -> None:
        self.kernels = load()
        self.layers = list(layers.values())
        first = self.layers[0]
        self.layout = probe(self.kernels, first)
        self.block_size = block_size
        self.kvs = [layer.kv_cache for layer in self.layers]
        self.num_heads = sum(layer.impl.num_heads for layer in self.layers)
        self.work: StepWork | None = None
        self.kind = ScoreKind.NONE
        self.score_queries = -1
        self.scores = self.step_scores = None
        self.decode_kernel = self.prefill_kernel = "stock"
        self.configure(config)
        for layer in self.layers:
            layer.impl.attention = self

    def configure(self, config) -> None:
        """Take the policy's score kind; start with empty scores."""
        self.work = None
        self.kind = ScoreKind.NONE
        if config.evicts:
            policy = config.make_policy(self.block_size)
            self.kind = policy.score_kind
        self.score_queries = -1 if config.score_queries == "all" else config.score_queries
        if self.kind is ScoreKind.NONE:
            self.scores = self.step_scores = None
        else:
            num_slots = self.kvs[0].shape[0] * self.block_size
            self.scores = torch.zeros(num_slots)
            self.step_scores = torch.zeros(num_slots)
        ours = self.kernels.name == "cpp" and config.evicts
        self.decode_kernel = "ours" if ours else "stock"
        # Tile units multiply many rows an instruction, which ours does not use.
        has_tiles = getattr(self.layers[0], "isa", None) == "amx"
        self.prefill_kernel = "ours" if ours and not has_tiles else "stock"

    def run_layer(self, impl, work: StepWork, query, kv, output) -> None:
        """Do a step's work for one layer."""
        common = {
            "layout": self.layout,
            "scale": impl.scale,
            "softcap": float(impl.logits_soft_cap),
            "step_scores": self.step_scores,
        }
        if work.plan is not None:
            if work.rows is None:
                self.kernels.attention(work.plan, query, kv, output, **common)
            else:
                part = torch.empty_like(query[work.rows])
                self.kernels.attention(work.plan, query[work.rows], kv, part, **common)
                output[work.rows] = part
        if work.score_plan is not None:
            self.kernels.attention(work.score_plan, query[work.score_rows], kv, None, **common)

    # ---- a step ----------------------------------------------------------------------------

    def begin_step(self, runner, scheduler_output) -> None:
        """Prepare the step's work from the batch as vLLM has laid it out."""
        batch, n = runner.input_batch, runner.input_batch.num_reqs
        self.work = None
        masks = runner.vtoken_layouts.masks
        holed = np.array([r in masks for r in batch.req_ids], bool) if masks else None
        if holed is not None and not holed.any():
            holed = None  # the requests with holes are not in this step's batch
        starts = runner.query_start_loc.np[: n + 1]
        if self.scores is not None:
            new_slots = batch.block_table[0].slot_mapping.gpu[: int(starts[n])]
            reset_scores(self.scores, new_slots)
            self.step_scores.zero_()
        all_decode = int(starts[n]) == n
        scored = self.kind in ATTENTION_KINDS
        ours = (self.decode_kernel if all_decode else self.prefill_kernel) == "ours"
        if holed is None and not scored and not ours:
            return
        self.work = work = StepWork()
        arrays = _BatchArrays(runner, n, starts, holed, masks)
        counted = counted_queries(self.kind, self.score_queries)
        if ours:
            work.replaces_stock = True
            work.plan = arrays.plan(self, None, counted)[0]
            return
        rest = np.ones(n, bool) if holed is None else ~holed
        if holed is not None:
            work.plan, work.rows = arrays.plan(self, np.flatnonzero(holed), counted)
        if scored and rest.any():
            work.score_plan, work.score_rows = arrays.plan(self, np.flatnonzero(rest), counted)

    def end_step(self, runner, plan) -> ScoreReport | None:
        """Update what the policy keeps; after the last layer's attention."""
        if self.scores is None:
            return None
        if self.kind in ATTENTION_KINDS:
            self._update_scores(runner)
        elif self.kind is ScoreKind.KEY_NORM:
            batch = runner.input_batch
            total = int(runner.query_start_loc.np[batch.num_reqs])
            slots = batch.block_table[0].slot_mapping.gpu[:total]
            for kv in self.kvs:
                self.kernels.key_norms(kv, slots, self.scores, layout=self.layout)
        return self._report(runner, plan)

    def _update_scores(self, runner) -> None:
        if self.kind is ScoreKind.ACCUMULATED and len(self.scores) <= ADD_ALL_SLOTS:
            self.scores += self.step_scores  # zero where nobody attended
            return
        n = runner.input_batch.num_reqs
        live, counts = self._live_slots(runner, n)
        num_queries = torch.from_numpy(np.diff(runner.query_start_loc.np[: n + 1]))
        counted = counted_queries(self.kind, self.score_queries)
        shape = StepShape(
            num_live_tokens=counts,
            num_queries=num_queries,
            num_counted=num_queries if counted < 0 else num_queries.clamp(max=counted),
            num_heads=self.num_heads,
        )
        update_scores(
            self.kind, self.scores, self.step_scores, live, shape,
            window_steps=self.score_queries if self.score_queries > 0 else WINDOW_QUERIES,
        )  # fmt: skip

    def restart_scores(self, block_ids: np.ndarray) -> None:
        """Start the scores of tokens from the prefix cache at zero; key norms stay."""
        if self.scores is not None and self.kind in ATTENTION_KINDS:
            self.scores.view(-1, self.block_size)[torch.from_numpy(block_ids).long()] = 0.0

    def _live_slots(self, runner, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """int64[M] live slots of the batch, request by request, and int[R] how many each has."""
        batch, masks, N = runner.input_batch, runner.vtoken_layouts.masks, self.block_size
        lengths = runner.seq_lens[:n].numpy()
        width = -(-int(lengths.max()) // N)
        blocks = batch.block_table[0].block_table.np[:n, :width].astype(np.int64)
        slots = (blocks[:, :, None] * N + np.arange(N)).reshape(n, width * N)
        live = np.arange(width * N) < lengths[:, None]
        for req_id, mask in masks.items():
            row = batch.req_id_to_index.get(req_id)
            if row is not None:
                held = min(len(mask), width * N)  # what grew beyond its mask is live
                live[row, :held] &= mask[:held]
        return torch.from_numpy(slots[live]), torch.from_numpy(np.count_nonzero(live, axis=1))

    def _report(self, runner, plan) -> ScoreReport | None:
        if plan is None or not plan.report_req_ids:
            return None
        batch, N = runner.input_batch, self.block_size
        table = batch.block_table[0].block_table.np
        by_block, parts = self.scores.numpy().reshape(-1, N), []
        for req_id in plan.report_req_ids:
            row = batch.req_id_to_index[req_id]
            length = int(runner.seq_lens[row])
            parts.append(by_block[table[row, : -(-length // N)]].reshape(-1)[:length])
        return ScoreReport.of_parts(plan.step_seq, plan.report_req_ids, parts)

    def move(self, source: np.ndarray, destination: np.ndarray) -> None:
        """Relocate K, V and the score, in every layer."""
        self.kernels.move(
            self.kvs,
            torch.from_numpy(source),
            torch.from_numpy(destination),
            layout=self.layout,
            scores=() if self.scores is None else (self.scores,),
        )


class _BatchArrays:
    """The batch as the kernels take it; whole, or some requests of it."""

    def __init__(self, runner, n: int, starts: np.ndarray, holed, masks: dict) -> None:
        self.n, self.starts = n, starts
        self.block_table = runner.input_batch.block_table[0].block_table.cpu[:n]
        self.seq_lens = runner.seq_lens[:n].to(torch.int32)
        self.mask = None if holed is None else self._mask(runner.input_batch.req_ids, masks)

    def _mask(self, req_ids, masks: dict) -> torch.Tensor:
        """bool[R, longest], live by physical index; all live where a request has no mask."""
        out = np.ones((self.n, int(self.seq_lens.max())), bool)
        for row, req_id in enumerate(req_ids):
            mask = masks.get(req_id)
            if mask is not None:
                width = min(len(mask), out.shape[1])
                out[row, :width] = mask[:width]
        return torch.from_numpy(out)

    def plan(self, attention: CPUAttention, requests: np.ndarray | None, counted: int):
        """A kernel plan over these requests, and the query rows it reads (None: all)."""
        table, lengths, mask = self.block_table, self.seq_lens, self.mask
        start, rows = self.starts, None
        if requests is not None:
            rows = torch.from_numpy(
                np.concatenate([np.arange(start[r], start[r + 1]) for r in requests])
            )
            start = np.concatenate([[0], np.cumsum(np.diff(start)[requests])]).astype(np.int32)
            pick = torch.from_numpy(requests)
            table, lengths = table[pick].contiguous(), lengths[pick]
            mask = None if mask is None else mask[pick]
        plan = attention.kernels.plan(
            table, lengths, torch.from_numpy(start),
            block_size=attention.block_size, live_mask=mask, score_queries=counted,
        )  # fmt: skip
        return plan, rows

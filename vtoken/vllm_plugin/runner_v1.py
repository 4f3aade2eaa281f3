"""Model Runner V1 with vToken's layouts: moves, rows, physical lengths and slots.

The mixin goes over vLLM's CPU runner and over GPUModelRunner (VLLM_USE_V2_MODEL_RUNNER=0). The
order inside a step matters: moves first (their sources may lie in blocks that were freed and are
handed out, zeroed or copied into in this same step), then the rows, then vLLM's own work.
"""

from __future__ import annotations

import time
from itertools import repeat

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vtoken.core.messages import MASK_GIVEN, MASK_PACKED, StepPlan, WorkerReport
from vtoken.vllm_plugin import compat
from vtoken.vllm_plugin.manager import VTokenFullAttentionSpec
from vtoken.vllm_plugin.settings import config_of
from vtoken.vllm_plugin.support import check_layer_impls, check_layer_specs


def attention_layers(compilation_config) -> dict:
    """vLLM's attention layers by name, those that own a KV cache."""
    context = compilation_config.static_forward_context
    return {n: x for n, x in context.items() if hasattr(x, "impl") and hasattr(x, "kv_cache")}


class LayoutCache:
    """What the worker knows of layouts that are not vLLM's plain one.

    Attributes:
        num_reclaimed: per request, logical minus physical length.
        masks: per request with holes, bool by physical index; indices beyond are live.
        new_token_index: per request, where this step's single new token goes.
    """

    def __init__(self) -> None:
        self.num_reclaimed: dict[str, int] = {}
        self.masks: dict[str, np.ndarray] = {}
        self.new_token_index: dict[str, int] = {}

    def forget(self, req_id: str) -> None:
        self.num_reclaimed.pop(req_id, None)
        self.masks.pop(req_id, None)

    def apply(self, plan: StepPlan) -> None:
        """Take in a step's changes of lengths and masks."""
        for r, req_id in enumerate(plan.req_ids):
            self.num_reclaimed[req_id] = int(plan.num_reclaimed[r])
            kind, index = plan.mask_kind[r], int(plan.new_token_index[r])
            if kind == MASK_PACKED:
                self.masks.pop(req_id, None)
            elif kind == MASK_GIVEN:
                self.masks[req_id] = plan.mask_of(r).copy()
            if index >= 0:
                self.new_token_index[req_id] = index
                mask = self.masks.get(req_id)
                if mask is not None and index < len(mask):
                    mask[index] = True


class VTokenRunnerV1Mixin:
    """Overrides of GPUModelRunner; see the module's head."""

    vtoken_config = None
    vtoken_attention = None  # the device's attention wrapper; also moves KV
    vtoken_checker = None  # vtoken.checks.worker_side.WorkerChecker where invariants are watched

    def _vtoken_init(self, vllm_config) -> None:
        compat.check("worker")
        self.vtoken_config = config_of(vllm_config)
        self.vtoken_layouts = LayoutCache()
        self.vtoken_plan: StepPlan | None = None
        self._vtoken_num_mappings = 0  # of this step
        self.vtoken_relocation_ns = 0  # spent on copies and not reported yet

    # ---- start-up --------------------------------------------------------------------------

    def get_kv_cache_spec(self):
        specs = super().get_kv_cache_spec()
        if self.vtoken_config is None:
            return specs
        check_layer_specs(specs)
        return {n: VTokenFullAttentionSpec.from_spec(s) for n, s in specs.items()}

    def initialize_kv_cache(self, kv_cache_config, *args, **kwargs) -> None:
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        if self.vtoken_config is None or kwargs.get("is_profiling"):
            return
        layers = attention_layers(self.compilation_config)
        check_layer_impls(layers)
        self.vtoken_setup_kv(layers)
        self._vtoken_map_physical_slots()
        self._vtoken_start_checks()

    def _vtoken_map_physical_slots(self) -> None:
        """Give vLLM's slot mapping physical positions, in the one call that it makes in a step.

        Replaced on the instance. When it is called sequence lengths and positions are in place and
        nothing has read them yet but vLLM's comparison with the prompt's length, which is logical.
        """
        table = self.input_batch.block_table
        if "compute_slot_mapping" in vars(table):
            return  # the cache was set up before, around the same batch
        stock = table.compute_slot_mapping

        def compute_slot_mapping(num_reqs, query_start_loc, positions):
            self._vtoken_num_mappings += 1
            if self.vtoken_layouts.num_reclaimed:
                positions = self._vtoken_use_physical_lengths(num_reqs, positions)
            stock(num_reqs, query_start_loc, positions)

        table.compute_slot_mapping = compute_slot_mapping

    def vtoken_setup_kv(self, layers: dict) -> None:
        """Make the mover and, where holes or scores are possible, the attention wrapper."""
        raise NotImplementedError("a device's runner says how its KV is laid out")

    # ---- a step ----------------------------------------------------------------------------

    def _update_states(self, scheduler_output):
        if self.vtoken_config is not None:
            if self.vtoken_checker is not None:
                self.vtoken_checker.before_moves(self, scheduler_output)
            self._vtoken_apply(scheduler_output)
        return super()._update_states(scheduler_output)

    def _vtoken_apply(self, scheduler_output) -> None:
        layouts = self.vtoken_layouts
        layouts.new_token_index.clear()
        for req_id in scheduler_output.finished_req_ids:
            layouts.forget(req_id)
        for req_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            layouts.forget(req_id)
        plan = self.vtoken_plan = getattr(scheduler_output, "vtoken", None)
        if plan is None:
            return
        if len(plan.move_source):
            start = time.perf_counter_ns()
            self.vtoken_move(plan.move_source, plan.move_destination)
            self.vtoken_relocation_ns += time.perf_counter_ns() - start
        if len(plan.fresh_blocks) and self.vtoken_attention is not None:
            self.vtoken_attention.restart_scores(plan.fresh_blocks)
        for r, req_id in enumerate(plan.req_ids):
            if plan.rewrites_block_table[r]:
                self._vtoken_rewrite_block_table(req_id, plan.kept_of(r), plan.added_of(r))
        layouts.apply(plan)

    def _vtoken_rewrite_block_table(self, req_id: str, kept: np.ndarray, added: np.ndarray) -> None:
        """Keep these positions of a block table; vLLM then appends the step's new blocks.

        Args:
            added: block ids put at the end before `kept` chooses.
        """
        ids = self.requests[req_id].block_ids[0]
        ids.extend(int(b) for b in added)
        ids[:] = [ids[i] for i in kept]
        row = self.input_batch.req_id_to_index.get(req_id)
        if row is None:
            return  # not in the batch: it is added from `requests` when it is scheduled again
        table = self.input_batch.block_table[0]
        table.block_table.np[row, : len(ids)] = ids
        table.num_blocks_per_row[row] = len(ids)

    def vtoken_move(self, source: np.ndarray, destination: np.ndarray) -> None:
        """Copy K and V of every layer from slots to slots; all are read before any is written."""
        raise NotImplementedError

    def _prepare_inputs(self, scheduler_output, num_scheduled_tokens):
        self._vtoken_num_mappings = 0
        out = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        if self.vtoken_config is not None:
            # Lengths are made physical in that call: never or twice would corrupt what is read.
            assert self._vtoken_num_mappings == 1, self._vtoken_num_mappings
            if self.vtoken_attention is not None:
                self.vtoken_attention.begin_step(self, scheduler_output)
            if self.vtoken_checker is not None:
                self.vtoken_checker.before_attention(self, scheduler_output)
        return out

    def _vtoken_use_physical_lengths(self, n: int, positions: torch.Tensor) -> torch.Tensor:
        """Make sequence lengths physical; positions stay logical.

        Args:
            n: requests in the batch.
            positions: int64[T], logical, of the step's tokens.

        Returns:
            int64[T], the physical index of each.
        """
        batch = self.input_batch
        reclaimed = np.fromiter(
            map(self.vtoken_layouts.num_reclaimed.get, batch.req_ids, repeat(0)), np.int32, n
        )
        new_index = self.vtoken_layouts.new_token_index
        if not new_index and not reclaimed.any():
            return positions
        shift = torch.from_numpy(reclaimed)
        self.optimistic_seq_lens_cpu[:n] -= shift  # gives max_seq_len
        shift = async_tensor_h2d(shift, self.seq_lens.device)
        self.seq_lens[:n] -= shift
        if len(positions) > n:  # else every request has one token
            shift = shift[self.req_indices.gpu[: len(positions)]]
        index = positions - shift
        row_of, starts = batch.req_id_to_index, self.query_start_loc.np
        placed = [(int(starts[row_of[r]]), i) for r, i in new_index.items() if r in row_of]
        if placed:
            at = async_tensor_h2d(placed, index.device)
            index[at[:, 0]] = at[:, 1]
        return index

    def sample_tokens(self, grammar_output):
        if self.vtoken_checker is not None:
            self.vtoken_checker.after_attention()
        # The forward pass is over: its scores are complete.
        scores = None
        if self.vtoken_attention is not None:
            scores = self.vtoken_attention.end_step(self, self.vtoken_plan)
        out = super().sample_tokens(grammar_output)
        if not self.input_batch.num_reqs:
            return out  # vLLM's shared empty output: what there is to say waits for the next step
        counts = self.vtoken_checker.take_counts() if self.vtoken_checker is not None else None
        report = WorkerReport(scores, self.vtoken_relocation_ns, counts)
        self.vtoken_relocation_ns = 0
        return attach(out, report) if report else out

    def vtoken_reconfigure(self, config) -> None:
        """Take other settings while idle; in-process engines only."""
        self.vtoken_config = config
        self.vtoken_layouts = LayoutCache()
        if self.vtoken_attention is not None:
            self.vtoken_attention.configure(config)
        self._vtoken_start_checks()

    def _vtoken_start_checks(self) -> None:
        """Watch the invariants where the config asks for it."""
        if self.vtoken_checker is not None:
            self.vtoken_checker.stop()
            self.vtoken_checker = None
        if self.vtoken_config.hash_kv_every and self.vtoken_attention is not None:
            from vtoken.checks.worker_side import WorkerChecker

            self.vtoken_checker = WorkerChecker(self, self.vtoken_config)


def attach(output, report: WorkerReport):
    """Put a report on a ModelRunnerOutput, now or when an async one is fetched."""
    if hasattr(output, "get_output"):
        fetch = output.get_output

        def get_output():
            return attach(fetch(), report)

        output.get_output = get_output
        return output
    # Never on vLLM's shared empty output, which other steps return too.
    assert output is not None and output.req_ids, "a report belongs to a step with requests"
    output.vtoken = report
    return output

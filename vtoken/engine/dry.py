"""vLLM's real scheduler and block pool with no model behind them.

The scheduler cannot tell: it gets a ModelRunnerOutput with a made-up token for every request that
has computed all it knows. Used for capacity planning, and as the fastest test bed of everything
above the worker.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.core.messages import ScoreReport, StepPlan, WorkerReport
from vtoken.engine.base import FinishedRequest, StepEngine
from vtoken.engine.fast_forward import TOKEN, BulkSteps, FastForward
from vtoken.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DrySettings:
    """Attributes:
    num_kv_blocks: usable blocks.
    block_size: tokens per block.
    max_model_len, max_num_seqs, max_num_batched_tokens: as in vLLM.
    num_layers, num_kv_heads, head_size: of the model that is not there; sizes only.
    async_scheduling: keep two steps in flight, as vLLM does on GPUs.
    fast_forward: let `step` take a stretch of decode steps at once where the outcome is the same.
    """

    num_kv_blocks: int
    block_size: int = 16
    max_model_len: int = 131072
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    enable_prefix_caching: bool = False
    async_scheduling: bool = False
    fast_forward: bool = False
    num_layers: int = 2
    num_kv_heads: int = 8
    head_size: int = 128
    seed: int = 0


class DryEngine(StepEngine):
    """Steps vLLM's scheduler with made-up outputs.

    Args:
        score_source: gives float32[n] scores for (request id, step, logical ids of the request by
            physical index); needed by scored policies.
        worker: called with every SchedulerOutput before its output is made up, e.g. to apply the
            StepPlan to KV made of (request, id) pairs.
    """

    def __init__(
        self,
        settings: DrySettings,
        config: VTokenConfig | None = None,
        *,
        score_source: Callable[[str, int, np.ndarray], np.ndarray] | None = None,
        worker: Callable[[object], None] | None = None,
    ) -> None:
        self.settings, self.config = settings, config
        self.score_source, self.worker = score_source, worker
        self.block_size, self.num_usable_blocks = settings.block_size, settings.num_kv_blocks
        self.scheduler = _build_scheduler(settings, config)
        if self.hooks is not None and self.hooks.collects_scores and score_source is None:
            raise ConfigError(
                "--policy", config.policy,
                "needs attention scores, and a dry run has none: give a recorded score trace, or "
                "one of streaming-llm, sliding-window, random",
            )  # fmt: skip
        self._in_flight: list = []
        self._block_hasher = self._make_hasher()
        self._requests: dict[str, object] = {}
        if hasattr(score_source, "bind"):  # a ScoreTrace knows requests by their prompts
            score_source.bind(lambda req_id: self._requests[req_id].prompt_token_ids)
        # Told of every plain step's SchedulerOutput, and of every stretch taken at once.
        self.step_listeners: list[Callable[[object], None]] = []
        self.bulk_listeners: list[Callable[[BulkSteps], None]] = []
        self._fast: FastForward | None = None
        if settings.fast_forward and (fast := FastForward(self)).is_possible():
            self._fast = fast

    def _make_hasher(self):
        if not self.settings.enable_prefix_caching:
            return None
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        function = get_hash_fn_by_name("sha256")
        init_none_hash(function)
        return get_request_block_hasher(self.block_size, function)

    def add(
        self, req_id, prompt_token_ids, max_tokens, *, logprobs=False, ignore_eos=True,
        arrival_s=None,
    ) -> None:  # fmt: skip
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        if len(prompt_token_ids) + max_tokens > self.settings.max_model_len:
            raise ConfigError(
                "--max-model-len", self.settings.max_model_len,
                f"at least {len(prompt_token_ids) + max_tokens}: request {req_id} has "
                f"{len(prompt_token_ids)} prompt and {max_tokens} output tokens",
            )  # fmt: skip
        request = Request(
            request_id=req_id,
            prompt_token_ids=[int(t) for t in prompt_token_ids],
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0),
            pooling_params=None,
            block_hasher=self._block_hasher,
        )
        if self.hooks is not None:
            self.hooks.budgets.check_fits(len(prompt_token_ids), max_tokens)
        self._requests[req_id] = request
        self.scheduler.add_request(request)
        if self._fast is not None:
            self._fast.note_added()

    def step(self, max_steps: int | None = None) -> tuple[dict[str, int], list[FinishedRequest]]:
        """Run one step, or with `fast_forward` up to `max_steps` at once (None: no limit).

        `bulk_listeners` are told of stretches; they are not seen in `scheduler.schedule`.
        """
        if self._fast is not None and max_steps != 1:
            stretch = self._fast.advance(max_steps)
            if stretch is not None:
                for listener in self.bulk_listeners:
                    listener(stretch)
                new = dict.fromkeys(
                    [r.request_id for r in self.scheduler.running], stretch.num_steps
                )
                return new, []
        depth = 2 if self.settings.async_scheduling else 1
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            for listener in self.step_listeners:
                listener(output)
            if self.worker is not None:
                self.worker(output)
            self._in_flight.append((output, self._make_output(output)))
            if len(self._in_flight) < depth and output.total_num_scheduled_tokens:
                return {}, []
        return self._update(*self._in_flight.pop(0)) if self._in_flight else ({}, [])

    def _make_output(self, scheduler_output):
        from vllm.v1.outputs import ModelRunnerOutput

        req_ids = list(scheduler_output.num_scheduled_tokens)
        sampled = []
        for req_id in req_ids:
            request = self.scheduler.requests[req_id]
            known = request.num_tokens + request.num_output_placeholders
            is_sampling = request.num_computed_tokens >= known - (
                request.num_output_placeholders > 0
            )
            sampled.append([TOKEN] if is_sampling else [])
        out = ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={r: i for i, r in enumerate(req_ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        plan = getattr(scheduler_output, "vtoken", None)
        if plan is not None and plan.report_req_ids:
            out.vtoken = WorkerReport(scores=self._make_scores(plan))
        return out

    def _make_scores(self, plan: StepPlan) -> ScoreReport:
        ids = [self.hooks.reports.ids_asked(r, plan.step_seq) for r in plan.report_req_ids]
        parts = [
            np.asarray(self.score_source(r, plan.step_seq, i), np.float32)
            for r, i in zip(plan.report_req_ids, ids, strict=True)
        ]
        return ScoreReport.of_parts(plan.step_seq, plan.report_req_ids, parts)

    def _update(self, scheduler_output, model_output):
        outputs = self.scheduler.update_from_output(scheduler_output, model_output)
        new_tokens: dict[str, int] = {}
        finished: list[FinishedRequest] = []
        for per_client in outputs.values():
            for out in per_client.outputs:
                if out.new_token_ids:
                    new_tokens[out.request_id] = len(out.new_token_ids)
                if out.finish_reason is not None:
                    request = self._requests.pop(out.request_id)
                    finished.append(
                        FinishedRequest(
                            out.request_id,
                            list(request.prompt_token_ids),
                            list(request.output_token_ids),
                            [],
                            str(out.finish_reason),
                        )
                    )
        if self._fast is not None:
            self._fast.note_step(scheduler_output, bool(finished))
        return new_tokens, finished

    def has_unfinished(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_requests()

    def abort(self, req_ids: Sequence[str]) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(list(req_ids), RequestStatus.FINISHED_ABORTED)
        if self._fast is not None:
            self._fast.note_added()
        for req_id in req_ids:
            self._requests.pop(req_id, None)

    def close(self) -> None:
        self.scheduler = None


def _write_model_config(folder: str, settings: DrySettings) -> None:
    """Write a config.json: all that vLLM's config needs of a model."""
    heads = settings.num_kv_heads
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "hidden_size": heads * settings.head_size, "head_dim": settings.head_size,
        "num_attention_heads": heads, "num_key_value_heads": heads,
        "num_hidden_layers": settings.num_layers, "intermediate_size": 64,
        "max_position_embeddings": settings.max_model_len, "vocab_size": 128256,
    }  # fmt: skip
    (Path(folder) / "config.json").write_text(json.dumps(config))


def _build_scheduler(settings: DrySettings, config: VTokenConfig | None):
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from vtoken.vllm_plugin import plugin
    from vtoken.vllm_plugin.manager import VTokenFullAttentionSpec
    from vtoken.vllm_plugin.support_list import OUR_WORKERS

    plugin.register()
    hooked = config is not None and config.hooks_installed
    if settings.async_scheduling:
        from vtoken.engine.cpu import keep_async_scheduling

        keep_async_scheduling()
    with tempfile.TemporaryDirectory(prefix="vtoken-dry-") as folder:
        _write_model_config(folder, settings)
        vllm_config = VllmConfig(
            model_config=ModelConfig(
                folder, skip_tokenizer_init=True, max_model_len=settings.max_model_len,
                dtype="bfloat16", seed=settings.seed,
            ),
            cache_config=CacheConfig(
                block_size=settings.block_size,
                enable_prefix_caching=settings.enable_prefix_caching,
            ),
            scheduler_config=SchedulerConfig(
                max_num_batched_tokens=settings.max_num_batched_tokens,
                max_num_seqs=settings.max_num_seqs, max_model_len=settings.max_model_len,
                is_encoder_decoder=False, async_scheduling=settings.async_scheduling,
            ),
            parallel_config=ParallelConfig(worker_cls=OUR_WORKERS["cpu"] if hooked else "auto"),
            device_config=DeviceConfig("cpu"),
            additional_config={"vtoken": config.model_dump(exclude_defaults=True)} if hooked else {},
        )  # fmt: skip
    if hooked:
        plugin.finish_config(vllm_config)
    spec = FullAttentionSpec(
        block_size=settings.block_size, num_kv_heads=settings.num_kv_heads,
        head_size=settings.head_size, dtype=torch.bfloat16,
    )  # fmt: skip
    if hooked:
        spec = VTokenFullAttentionSpec.from_spec(spec)
    layers = [f"layers.{i}" for i in range(settings.num_layers)]
    kv_cache_config = KVCacheConfig(
        num_blocks=settings.num_kv_blocks + 1,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(layers, spec)],
    )
    vllm_config.cache_config.num_gpu_blocks = settings.num_kv_blocks + 1
    return vllm_config.scheduler_config.get_scheduler_cls()(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=settings.block_size,
        log_stats=False,
    )

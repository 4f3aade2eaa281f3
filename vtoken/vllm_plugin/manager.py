"""KV cache spec and block manager: block need counted in physical tokens, not logical ones.

vLLM picks a manager by the type of the spec that the workers announce. Ours asks vToken's step how
long a request really is; without one, and for requests that never evicted, it is vLLM's
FullAttentionManager.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

if TYPE_CHECKING:
    from vtoken.scheduling.step import Step


class VTokenManager(FullAttentionManager):
    """FullAttentionManager whose requests may hold fewer slots than they have tokens."""

    step: Step | None = None

    @property
    def has_positionally_stable_blocks(self) -> bool:
        return False  # a row position can come to hold other tokens

    def get_num_blocks_to_allocate(
        self,
        request_id,
        num_tokens,
        new_computed_blocks,
        total_computed_tokens,
        num_local_computed_tokens,
        num_tokens_main_model,
        apply_admission_cap=False,
        prefill_end=0,
    ):
        if self.step is not None:
            requests = self.step.requests
            reclaimed = requests.num_reclaimed.get(request_id)
            if reclaimed is not None and not apply_admission_cap:  # it runs, and has no new hits
                held = len(self.req_to_blocks[request_id])
                needed = (num_tokens - reclaimed + self.block_size - 1) // self.block_size
                return max(0, needed - held)
            num_tokens = requests.num_slots_needed(request_id, num_tokens)
            if apply_admission_cap:
                request = self.step.scheduler.requests[request_id]
                cap = self.step.budgets.admission_cap_tokens(request, num_tokens)
                num_tokens = min(num_tokens, cap)
        return super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            num_tokens_main_model,
            apply_admission_cap=apply_admission_cap,
            prefill_end=prefill_end,
        )

    def allocate_new_blocks(self, request_id, num_tokens, num_tokens_main_model):
        if self.step is not None:
            requests = self.step.requests
            reclaimed = requests.num_reclaimed.get(request_id)
            if reclaimed is None:
                num_tokens = requests.num_slots_needed(request_id, num_tokens)
            else:
                num_tokens -= reclaimed
                if num_tokens <= len(self.req_to_blocks[request_id]) * self.block_size:
                    return []
        return super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)

    def cache_blocks(self, request, num_tokens, retention_interval=None, *, replay_boundaries):
        # KV computed after an eviction saw truncated attention, and the row no longer holds
        # tokens in order: nothing of such a request may enter the prefix cache.
        if self.step is not None and self.step.requests.has_evicted(request.request_id):
            return
        super().cache_blocks(
            request, num_tokens, retention_interval, replay_boundaries=replay_boundaries
        )

    def pop_blocks_for_free(self, request_id):
        if self.step is not None:
            self.step.forget(request_id)
        return super().pop_blocks_for_free(request_id)


@dataclass(frozen=True, kw_only=True)
class VTokenFullAttentionSpec(FullAttentionSpec):
    """FullAttentionSpec that selects VTokenManager and sizes a request by its budget."""

    @classmethod
    def from_spec(cls, spec: FullAttentionSpec) -> VTokenFullAttentionSpec:
        return cls(**{f.name: getattr(spec, f.name) for f in fields(FullAttentionSpec) if f.init})

    def max_memory_usage_bytes(self, vllm_config) -> int:
        """KV bytes one request of max_model_len needs: what vLLM checks the pool against."""
        from vtoken.vllm_plugin.settings import peak_blocks_per_request

        full = super().max_memory_usage_bytes(vllm_config)
        blocks = peak_blocks_per_request(
            vllm_config, self.block_size, vllm_config.model_config.max_model_len
        )
        return full if blocks is None else min(full, blocks * self.page_size_bytes)


def register_spec() -> None:
    """Tell vLLM's registry about our spec; may be called again."""
    # register() on an empty registry would keep the built-in specs out for good.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(
        VTokenFullAttentionSpec, VTokenManager, uniform_type_base_spec=FullAttentionSpec
    )

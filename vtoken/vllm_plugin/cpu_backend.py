"""vLLM's CPU attention backend with our work in its forward, registered while layers are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from vllm.v1.attention import selector
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend


class LayerWork(Protocol):
    """What takes a layer's work over: `vtoken.vllm_plugin.cpu_attention.CPUAttention`."""

    work: object | None  # this step's; None: vLLM's kernel alone

    def run_layer(self, impl, work, query, kv, output) -> None:
        """Do a step's work for one layer."""


class VTokenCPUAttentionImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention, which a `CPUAttention` may replace or add to."""

    attention: LayerWork | None = None  # once the KV cache is set up

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *rest, **kwargs):
        work = None if self.attention is None or attn_metadata is None else self.attention.work
        if work is None or not work.replaces_stock:
            out = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *rest, **kwargs
            )
            if work is None:
                return out
        self.attention.run_layer(self, work, query, kv_cache, output)
        return output


class VTokenCPUAttentionBackend(CPUAttentionBackend):
    """vLLM's CPU backend with block sizes from 16 tokens (its "vec16" code takes them)."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(16)]

    @staticmethod
    def get_impl_cls():
        return VTokenCPUAttentionImpl


@contextmanager
def attention_backend() -> Iterator[None]:
    """Let the layers that are made in this context have our backend.

    Undone at the end: another engine of this process may run without vToken. vLLM remembers its
    choices of backends, those made before and in here.
    """
    path = f"{__name__}.{VTokenCPUAttentionBackend.__name__}"
    selector._cached_get_attn_backend.cache_clear()
    register_backend(AttentionBackendEnum.CPU_ATTN, path)
    try:
        yield
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()
        selector._cached_get_attn_backend.cache_clear()

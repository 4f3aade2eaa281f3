"""What an engine is built from, besides vToken's own settings; names are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from vtoken.errors import ConfigError
from vtoken.units import AUTO


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Attributes:
    model: embedded name, local path or Hugging Face id.
    block_size: tokens per KV block; None: 16, or the smallest the attention backend takes.
    num_kv_blocks: usable blocks; vLLM's null block is added to it.
    gpu_memory_utilization: share of the device's (on a CPU: the host's) memory.
    kv_cache_memory_bytes: KV pool size in bytes.
    max_model_len, max_num_seqs, max_num_batched_tokens, dtype, seed: as in vLLM; None: vLLM's.
        A max_model_len of AUTO is as long as memory holds.
    enable_prefix_caching: None is vLLM's default, on.
    async_scheduling: True forces it where vLLM turns it off (CPUs); None is vLLM's default.
    vllm_args: further keyword arguments of vLLM's EngineArgs, taken unchanged.
    """

    model: str = "smollm2-135m"
    block_size: int | None = None
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    dtype: str | None = None
    tensor_parallel_size: int = 1
    seed: int = 0
    enable_prefix_caching: bool | None = None
    async_scheduling: bool | None = None
    vllm_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, option in _POSITIVE.items():
            value = getattr(self, name)
            if value is not None and value < 1 and (name, value) != ("max_model_len", AUTO):
                raise ConfigError(option, value, "a whole number, 1 or more")
        share = self.gpu_memory_utilization
        if share is not None and not 0.0 < share <= 1.0:
            raise ConfigError("--gpu-mem-util", share, "a share of memory, above 0 and at most 1")
        if self.block_size is not None and self.block_size % 16:
            raise ConfigError("--block-size", self.block_size, "a multiple of 16 tokens")

    def vllm_settings(self) -> dict[str, Any]:
        """What was set, as keyword arguments of vLLM's EngineArgs; `vllm_args` apart."""
        own = ("num_kv_blocks", "async_scheduling", "vllm_args")
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own}
        if self.num_kv_blocks is not None:
            given["num_gpu_blocks_override"] = self.num_kv_blocks + 1  # block 0 is the null block
        return {name: value for name, value in given.items() if value is not None}


_POSITIVE = {
    "block_size": "--block-size",
    "num_kv_blocks": "--num-kv-blocks",
    "kv_cache_memory_bytes": "--kv-cache-memory-bytes",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "tensor_parallel_size": "--tensor-parallel-size",
}

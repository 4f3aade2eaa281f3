"""The block pools of a capacity scan: given, as vLLM would size them here, or a small one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vtoken.engine.settings import EngineSettings
from vtoken.errors import ConfigError
from vtoken.experiments.capacity.scan_options import NATIVE_PEAKS, ScanSettings
from vtoken.experiments.planning.model_shapes import ModelShape
from vtoken.experiments.report.environment import host_memory_bytes
from vtoken.units import cdiv

GIB = 2**30
VLLM_GPU_MEM_UTIL = 0.92  # vLLM's default


@dataclass(frozen=True, kw_only=True)
class Host:
    """What engines run on here.

    Attributes:
        process_bytes: resident memory of a process that has vLLM loaded, and no model.
        block_size: the smallest that all modes' attention takes, in tokens.
        dtype: of weights and KV where none was asked for; "auto" is the model's own.
        max_batched_tokens: tokens a step may compute where none was asked for.
    """

    is_cpu: bool
    memory_bytes: int
    process_bytes: int = 0
    block_size: int = 16
    dtype: str = "auto"
    max_batched_tokens: int = 8192


def detect_host(settings: ScanSettings) -> Host:
    """Find out what engines would run on. Imports vLLM."""
    from vtoken.engine.cpu import default_block_size, engine_runs_on_cpu

    if not engine_runs_on_cpu():
        return Host(is_cpu=False, memory_bytes=host_memory_bytes())

    configs = [line.config(settings.config) for line in settings.series]
    return Host(
        is_cpu=True,
        memory_bytes=host_memory_bytes(),
        process_bytes=_resident_bytes(),
        block_size=max(default_block_size(config) for config in configs),
        dtype="float32",  # as the engine chooses it: twice as fast as bfloat16 without AMX
        max_batched_tokens=2048,  # vLLM's own on CPUs
    )


def _resident_bytes() -> int:
    import os

    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Attributes:
    usable_blocks: for requests; vLLM's null block is not among them.
    how: where the number comes from, for people.
    details: further keys of the result's `pool`.
    """

    usable_blocks: int
    block_size: int
    how: str = ""
    details: Mapping[str, object] = field(default_factory=dict)

    def row(self) -> dict[str, object]:
        head = {"usable_blocks": self.usable_blocks, "block_size": self.block_size}
        return head | dict(self.details)

    def __str__(self) -> str:
        return f"{self.usable_blocks:,} blocks of {self.block_size} tokens"


def small_pool(num_tokens: int, block_size: int) -> Pool:
    """A bare scan's measured pool: so small that a CPU can fill it, native frontier 6."""
    blocks = math.ceil(NATIVE_PEAKS * cdiv(num_tokens, block_size))
    return Pool(
        usable_blocks=blocks,
        block_size=block_size,
        how=f"{NATIVE_PEAKS:g} requests of {num_tokens:,} tokens in full",
    )


def given_pool(engine: EngineSettings, shape: ModelShape, block_size: int) -> Pool | None:
    """The pool that `--num-kv-blocks` or `--kv-cache-memory-bytes` names; None without them.

    Raises:
        ConfigError: the bytes hold no block beside vLLM's null block.
    """
    if engine.num_kv_blocks is not None:
        return Pool(usable_blocks=engine.num_kv_blocks, block_size=block_size, how="as given")
    if engine.kv_cache_memory_bytes is None:
        return None
    block_bytes = _block_bytes(engine, shape, block_size)
    usable = engine.kv_cache_memory_bytes // block_bytes - 1
    if usable < 1:
        raise ConfigError(
            "--kv-cache-memory-bytes", engine.kv_cache_memory_bytes,
            f"at least {2 * block_bytes:,}: one block of {block_size} tokens and the null block",
        )  # fmt: skip
    return Pool(
        usable_blocks=usable,
        block_size=block_size,
        how=f"{engine.kv_cache_memory_bytes / GIB:.2f} GiB as given",
        details={"kv_bytes": engine.kv_cache_memory_bytes, "block_bytes": block_bytes},
    )


def host_pool(engine: EngineSettings, shape: ModelShape, block_size: int, host: Host) -> Pool:
    """The pool as vLLM sizes it on a CPU: a share of host memory, less what the process holds.

    Source: vllm/v1/worker/cpu_worker.py, `CPUWorker.determine_available_memory`. The process is
    taken to hold what it holds now and the weights.
    """
    share = engine.gpu_memory_utilization or VLLM_GPU_MEM_UTIL
    shape = shape.with_dtype(engine.dtype or host.dtype)
    taken = shape.weights_bytes + host.process_bytes
    kv_bytes = math.ceil(share * host.memory_bytes) - taken
    block_bytes = _block_bytes(engine, shape, block_size)
    if kv_bytes < 2 * block_bytes:
        raise ConfigError(
            "--gpu-mem-util", share,
            f"a larger share of {host.memory_bytes / GIB:.1f} GiB of host memory: weights and "
            f"program take {taken / GIB:.1f} GiB",
        )  # fmt: skip
    return Pool(
        usable_blocks=kv_bytes // block_bytes - 1,
        block_size=block_size,
        how=(
            f"{share:g} x {host.memory_bytes / GIB:.1f} GiB of host memory - "
            f"{shape.weights_bytes / GIB:.1f} GiB of weights - "
            f"{host.process_bytes / GIB:.1f} GiB of program"
        ),
        details={
            "gpu_mem_util": share,
            "host_memory_bytes": host.memory_bytes,
            "weights_bytes": shape.weights_bytes,
            "process_bytes": host.process_bytes,
            "kv_bytes": kv_bytes,
            "block_bytes": block_bytes,
        },
    )


def _block_bytes(engine: EngineSettings, shape: ModelShape, block_size: int) -> int:
    return block_size * shape.kv_bytes_per_token(tensor_parallel_size=engine.tensor_parallel_size)

"""Devices by name, and how many KV blocks a model leaves on one.

The memory model, the same form and constants for every device and model, per rank:

    KV bytes = utilisation x device memory - weights - overhead
    overhead = fixed + batched tokens x (2 x hidden + 3 x intermediate) x 2 bytes
                     + sequences x vocabulary x 8 bytes

The two terms of the overhead are the largest activations of vLLM's profiling run (an MLP's
input, output and its three intermediates for a full batch) and its sampler's (float32 logits and
one copy). vLLM takes them from a run on the device; we have only shapes. `fixed` was then chosen
to meet two published pools (5,427 and 11,519 blocks for Llama-3.1-8B on an H100 with 80 GB at
0.35 and 0.50), and lies in the range that logs show for memory outside of torch. On small devices
vLLM's default batch is smaller than ours, so that we are on the safe side by about 1 GiB there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources

import yaml

from vtoken.errors import ConfigError, nearest
from vtoken.experiments.planning.model_shapes import ModelShape
from vtoken.experiments.report.environment import host_memory_bytes

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator (or host); rates are data-sheet peaks, `*_frac` the share engines reach."""

    name: str
    kind: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    flops_per_s: float
    bandwidth_frac: float
    flops_frac: float
    step_overhead_s: float
    request_overhead_s: float
    link_bytes_per_s: float
    link_latency_s: float


@dataclass(frozen=True, kw_only=True)
class OverheadRule:
    """Memory that is neither weights nor KV cache; see the head of this file."""

    fixed_bytes: int = round(0.35 * GIB)
    num_batched_tokens: int = 8192
    num_seqs: int = 1024
    activation_bytes: int = 2
    logit_bytes: int = 8

    def overhead_bytes(self, model: ModelShape, tensor_parallel_size: int = 1) -> int:
        """Bytes on one rank. Logits are gathered, so each rank holds all of them."""
        per_token = 2 * model.hidden_size + 3 * model.intermediate_size // tensor_parallel_size
        activations = self.num_batched_tokens * per_token * self.activation_bytes
        return self.fixed_bytes + activations + self.num_seqs * model.vocab_size * self.logit_bytes

    def describe(self) -> str:
        """The rule with its constants, in one line."""
        return (
            f"overhead = {self.fixed_bytes / GIB:.2f} GiB + {self.num_batched_tokens:,} tokens x "
            f"(2 x hidden + 3 x intermediate) x {self.activation_bytes} B + {self.num_seqs:,} "
            f"sequences x vocabulary x {self.logit_bytes} B"
        )


DEFAULT_OVERHEAD = OverheadRule()


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Where a device's memory goes, in bytes on one rank.

    Attributes:
        gpu_mem_util: share of the device, None where the KV cache was given in bytes or blocks.
        num_usable_blocks: blocks for requests; vLLM's null block is already taken off.
    """

    device: Device
    model: ModelShape
    tensor_parallel_size: int
    block_size: int
    gpu_mem_util: float | None
    weights_bytes: int
    overhead_bytes: int
    kv_bytes: int
    block_bytes: int
    num_usable_blocks: int
    overhead_rule: OverheadRule

    @property
    def usable_kv_tokens(self) -> int:
        return self.num_usable_blocks * self.block_size

    def describe(self) -> list[str]:
        """The calculation with its constants, in lines for people."""
        gib = [f"{x / GIB:.2f}" for x in (self.weights_bytes, self.overhead_bytes, self.kv_bytes)]
        ranks = f" on each of {self.tensor_parallel_size}" * (self.tensor_parallel_size > 1)
        memory = f"{self.device.memory_bytes / GIB:.2f} GiB"
        if self.gpu_mem_util is None:
            head = f"{self.device.name} ({memory}): KV cache of {gib[2]} GiB as given{ranks}"
        else:
            head = (
                f"{self.device.name}: {self.gpu_mem_util:g} x {memory} - weights {gib[0]} GiB "
                f"- overhead {gib[1]} GiB = {gib[2]} GiB for the KV cache{ranks}"
            )
        pool = (
            f"{self.num_usable_blocks:,} usable blocks of {self.block_size} tokens, "
            f"{self.block_bytes / 2**20:g} MiB each ({self.usable_kv_tokens:,} tokens)"
        )
        return [head, self.overhead_rule.describe(), pool]

    def row(self) -> dict[str, object]:
        """A flat row for result files."""
        row = {f.name: getattr(self, f.name) for f in fields(self)}
        rule = row.pop("overhead_rule")
        row |= {"device": self.device.name, "model": self.model.name}
        row |= {"device_memory_bytes": self.device.memory_bytes, "modelled": True}
        return row | {f"overhead_{f.name}": getattr(rule, f.name) for f in fields(rule)}


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """What a number of blocks takes: bytes of KV cache, and the utilisation that leaves them.

    `gpu_mem_util` may exceed 1: then it does not fit, and `fits` is False.
    """

    num_usable_blocks: int
    kv_bytes: int
    total_bytes: int
    gpu_mem_util: float

    @property
    def kv_gib(self) -> float:
        return self.kv_bytes / GIB

    @property
    def fits(self) -> bool:
        return self.gpu_mem_util <= 1


@cache
def load_devices() -> tuple[dict[str, Device], dict[str, str]]:
    """(devices by name, aliases) of `data/devices.yaml`."""
    text = (resources.files("vtoken.experiments.planning") / "data" / "devices.yaml").read_text(
        "utf-8"
    )
    data = yaml.safe_load(text)
    devices = {}
    for name, values in data["devices"].items():
        gib = values.pop("memory_gib")
        memory_bytes = host_memory_bytes() if gib is None else round(gib * GIB)
        costs = data["kinds"][values["kind"]] | values
        devices[name] = Device(name=name, memory_bytes=memory_bytes, **costs)
    return devices, data["aliases"]


def get_device(name: str) -> Device:
    """Find a device by name, without regard to case."""
    devices, aliases = load_devices()
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    key = key.removesuffix("b") if key.endswith("gb") else key
    key = aliases.get(key, key)
    if key not in devices:
        hint = nearest(key, [*devices, *aliases])
        allowed = hint if hint.startswith("did") else nearest("", devices)
        raise ConfigError("--device", name, allowed)
    return devices[key]


def plan_memory(
    device: Device,
    model: ModelShape,
    *,
    gpu_mem_util: float = 0.92,
    block_size: int = 16,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: str = "auto",
    kv_cache_memory_bytes: int | None = None,
    num_kv_blocks: int | None = None,
    overhead: OverheadRule = DEFAULT_OVERHEAD,
) -> MemoryPlan:
    """Work out the pool of KV blocks, per rank.

    Args:
        gpu_mem_util: share of the device's memory (vLLM's default).
        kv_cache_memory_bytes: size of the KV cache; takes the place of the calculation.
        num_kv_blocks: usable blocks; takes the place of both. vLLM's null block is added to it.

    Raises:
        ConfigError: a share outside (0, 1], weights that do not fit (with the numbers), or a KV
            cache too small for one block or larger than what the weights leave.
    """
    ranks = tensor_parallel_size
    block_bytes = _block_bytes(model, block_size, ranks, kv_cache_dtype)
    weights_bytes = -(-model.weights_bytes // ranks)
    overhead_bytes = overhead.overhead_bytes(model, ranks)
    given = None
    if num_kv_blocks is not None:
        given = ("--num-kv-blocks", num_kv_blocks, (num_kv_blocks + 1) * block_bytes)
    elif kv_cache_memory_bytes is not None:
        given = ("--kv-cache-memory-bytes", kv_cache_memory_bytes, kv_cache_memory_bytes)
    if given is None:
        if not 0 < gpu_mem_util <= 1:
            raise ConfigError("--gpu-mem-util", gpu_mem_util, "a share above 0 and up to 1")
        kv_bytes = int(gpu_mem_util * device.memory_bytes) - weights_bytes - overhead_bytes
        if kv_bytes < 2 * block_bytes:  # vLLM's null block and one more
            raise _too_small(device, model, gpu_mem_util, ranks, block_size, overhead)
    else:
        option, value, kv_bytes = given
        room_bytes = device.memory_bytes - weights_bytes
        if not 2 * block_bytes <= kv_bytes <= room_bytes:
            raise ConfigError(
                option,
                value,
                f"a KV cache from {2 * block_bytes:,} bytes (one block and vLLM's null block) to "
                f"{max(0, room_bytes):,}, what {weights_bytes / GIB:.2f} GiB of weights leave of "
                f"{device.memory_bytes / GIB:.2f} GiB on {device.name}",
            )
    return MemoryPlan(
        device=device,
        model=model,
        tensor_parallel_size=ranks,
        block_size=block_size,
        gpu_mem_util=gpu_mem_util if given is None else None,
        weights_bytes=weights_bytes,
        overhead_bytes=overhead_bytes,
        kv_bytes=kv_bytes,
        block_bytes=block_bytes,
        num_usable_blocks=kv_bytes // block_bytes - 1,
        overhead_rule=overhead,
    )


def need_memory(
    device: Device,
    model: ModelShape,
    num_usable_blocks: int,
    *,
    block_size: int = 16,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: str = "auto",
    overhead: OverheadRule = DEFAULT_OVERHEAD,
) -> MemoryNeed:
    """Invert `plan_memory`: what a number of usable blocks takes, per rank.

    The utilisation is rounded up to four digits, so that asking for it gives the blocks.
    """
    block_bytes = _block_bytes(model, block_size, tensor_parallel_size, kv_cache_dtype)
    kv_bytes = (num_usable_blocks + 1) * block_bytes
    total_bytes = (
        -(-model.weights_bytes // tensor_parallel_size)
        + overhead.overhead_bytes(model, tensor_parallel_size)
        + kv_bytes
    )
    return MemoryNeed(
        num_usable_blocks=num_usable_blocks,
        kv_bytes=kv_bytes,
        total_bytes=total_bytes,
        gpu_mem_util=math.ceil(total_bytes / device.memory_bytes * 10_000) / 10_000,
    )


def _block_bytes(model: ModelShape, block_size: int, ranks: int, kv_cache_dtype: str) -> int:
    if block_size < 1:
        raise ConfigError("--block-size", block_size, "a whole number of at least 1")
    per_token = model.kv_bytes_per_token(tensor_parallel_size=ranks, kv_cache_dtype=kv_cache_dtype)
    return block_size * per_token


def _too_small(
    device: Device,
    model: ModelShape,
    gpu_mem_util: float,
    ranks: int,
    block_size: int,
    overhead: OverheadRule,
) -> ConfigError:
    """Make the error for weights that do not fit: what would do, and the numbers."""
    options = {"block_size": block_size, "overhead": overhead}
    need = need_memory(device, model, 1, tensor_parallel_size=ranks, **options)
    weights_bytes = -(-model.weights_bytes // ranks)
    numbers = (
        f"{model.name} has {weights_bytes / GIB:.2f} GiB of weights and "
        f"{overhead.overhead_bytes(model, ranks) / GIB:.2f} GiB of overhead a rank, and "
        f"{gpu_mem_util:g} x {device.memory_bytes / GIB:.2f} GiB is "
        f"{gpu_mem_util * device.memory_bytes / GIB:.2f} GiB"
    )
    if need.fits:
        least = math.ceil(need.gpu_mem_util * 100) / 100
        return ConfigError("--gpu-mem-util", gpu_mem_util, f"at least {least:g}, since {numbers}")
    allowed = f"a device of at least {need.total_bytes / GIB:.1f} GiB"
    for more in (2 * ranks, 4 * ranks, 8 * ranks):
        if model.num_heads % more == 0 and (
            need_memory(device, model, 1, tensor_parallel_size=more, **options).gpu_mem_util
            <= gpu_mem_util
        ):
            allowed += f", or --tensor-parallel-size {more}"
            break
    return ConfigError("--device", device.name, f"{allowed}, since {numbers}")

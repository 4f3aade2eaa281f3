"""How long a step would take: a model, not a measurement.

    step = max(bytes / bandwidth, flops / rate) + all-reduces + step overhead
           + running requests x request overhead

Bytes are the weights (once a step), the KV entries that attention reads, the new ones it writes,
and twice the bytes that relocation moves. FLOPs are two per weight and token, two per output
weight and sampled request, and four per head element for each (query, KV entry) pair. Reading and
computing overlap (hence the maximum); nothing else does.

Every figure from here must be marked `modelled`, and must not be put in one table with measured
times. What it leaves out: kernels' fixed sizes and tails, caches, clocks, the eviction policy and
the planner (host time), scores, CUDA graph padding. Rates and shares come from a profile: a
device's own (`CostProfile.from_device`) or a YAML file (`load_profile`) with keys

    name, bandwidth_bytes_per_s, flops_per_s, bandwidth_frac, flops_frac,
    step_overhead_s, request_overhead_s, link_bytes_per_s, link_latency_s

All functions are pure and work elementwise on arrays over steps (S steps).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import yaml

from vtoken.errors import ConfigError, nearest
from vtoken.experiments.planning.devices import Device, get_device
from vtoken.experiments.planning.model_shapes import ModelShape
from vtoken.units import read_text

OPTION = "--cost-profile"


@dataclass(frozen=True, kw_only=True)
class CostProfile:
    """Rates of one device, and what share of them an engine reaches.

    Attributes:
        bandwidth_bytes_per_s, flops_per_s: peaks of the data sheet (or measured ones, with
            shares of 1).
        bandwidth_frac, flops_frac: reached shares, above 0 and up to 1.
        step_overhead_s: fixed cost of a step; request_overhead_s: per running request and step.
        link_bytes_per_s, link_latency_s: all-reduce under tensor parallelism.
    """

    name: str
    bandwidth_bytes_per_s: float
    flops_per_s: float
    bandwidth_frac: float = 1.0
    flops_frac: float = 1.0
    step_overhead_s: float = 0.0
    request_overhead_s: float = 0.0
    link_bytes_per_s: float = 2e11
    link_latency_s: float = 1e-5

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(OPTION, f"{field.name}: {value!r}", "a number")
            may_be_0 = field.name.endswith("_s") and not field.name.endswith("per_s")
            if not (value > 0 or (may_be_0 and value == 0)) or not np.isfinite(value):
                least = "of at least 0" if may_be_0 else "above 0"
                raise ConfigError(OPTION, f"{field.name}: {value!r}", f"a number {least}")
            if field.name.endswith("_frac") and value > 1:
                raise ConfigError(OPTION, f"{field.name}: {value!r}", "a share of at most 1")

    @classmethod
    def from_device(cls, device: Device) -> CostProfile:
        """The profile that comes with a device."""
        return cls(**{f.name: getattr(device, f.name) for f in fields(cls)})


def load_profile(path_or_device: str | Path) -> CostProfile:
    """Read a profile from a YAML file, or take a device's own by its name.

    A file may start from a device with `device: NAME` and change single keys.

    Raises:
        ConfigError: no such file or device, not YAML, an unknown or missing key, or a value out
            of range.
    """
    path = Path(path_or_device)
    if path.suffix not in (".yaml", ".yml"):
        return CostProfile.from_device(get_device(str(path_or_device)))
    written = read_text(path, OPTION)
    try:
        data = yaml.safe_load(written)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        where = str(error).replace("\n", " ")
        raise ConfigError(OPTION, str(path), f"a YAML file ({where})") from error
    if not isinstance(data, dict):
        raise ConfigError(OPTION, str(path), "a YAML file of keys and values")
    known = [f.name for f in fields(CostProfile)]
    for key in data:
        if key != "device" and key not in known:
            raise ConfigError(OPTION, f"{path}: {key}", nearest(str(key), [*known, "device"]))
    values = {"name": path.stem}
    if "device" in data:
        base = CostProfile.from_device(get_device(str(data.pop("device"))))
        values = {name: getattr(base, name) for name in known} | values
    values |= {key: _number(value) for key, value in data.items()}
    missing = [key for key in ("bandwidth_bytes_per_s", "flops_per_s") if key not in values]
    if missing:
        raise ConfigError(OPTION, str(path), f"a profile with {' and '.join(missing)}")
    return CostProfile(**values)


def _number(value: object) -> object:
    """Read "3e12", which YAML takes for a string because it has no point in it."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What a step (or each of S steps) has to do; numbers or arrays of one shape.

    Attributes:
        num_seqs: running requests in the step that get a token sampled.
        num_new_tokens: tokens computed, decode and prefill together.
        kv_read_tokens: KV entries read, summed over requests; for a prefill chunk each entry
            counts once, since its queries read it together.
        attn_pairs: (query, KV entry) pairs; equal to `kv_read_tokens` for decodes.
        moved_tokens: tokens that relocation copies.
    """

    num_seqs: np.ndarray | float
    num_new_tokens: np.ndarray | float
    kv_read_tokens: np.ndarray | float
    attn_pairs: np.ndarray | float
    moved_tokens: np.ndarray | float = 0.0


def decode_work(
    num_seqs: np.ndarray | float,
    kv_tokens: np.ndarray | float,
    moved_tokens: np.ndarray | float = 0.0,
) -> StepWork:
    """Work of pure decode steps: one new token a request.

    Args:
        kv_tokens: KV entries attended to, summed over requests. A kernel that skips holes reads
            live tokens; one that reads whole blocks, physical ones.
    """
    return StepWork(
        num_seqs=num_seqs,
        num_new_tokens=num_seqs,
        kv_read_tokens=kv_tokens,
        attn_pairs=kv_tokens,
        moved_tokens=moved_tokens,
    )


def step_bytes(
    model: ModelShape,
    work: StepWork,
    *,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: str = "auto",
) -> np.ndarray:
    """float64[S], bytes that cross the memory bus of one rank in each step."""
    per_token = model.kv_bytes_per_token(
        tensor_parallel_size=tensor_parallel_size, kv_cache_dtype=kv_cache_dtype
    )
    # The input table is looked up, not read, unless it is the output table as well.
    tables = 0 if model.tied_embeddings else model.embedding_params
    read_params = model.num_params - tables
    weights = model.weights_bytes * (read_params / model.num_params) / tensor_parallel_size
    entries = np.asarray(work.kv_read_tokens) + work.num_new_tokens + 2.0 * work.moved_tokens
    return weights + per_token * entries


def step_flops(model: ModelShape, work: StepWork, *, tensor_parallel_size: int = 1) -> np.ndarray:
    """float64[S], floating-point operations of one rank in each step."""
    linear = 2.0 * model.body_params * np.asarray(work.num_new_tokens)
    output = 2.0 * model.embedding_params * np.asarray(work.num_seqs)
    heads = model.num_layers * model.num_heads * model.head_size
    return (linear + output + 4.0 * heads * np.asarray(work.attn_pairs)) / tensor_parallel_size


def step_time_s(
    profile: CostProfile,
    model: ModelShape,
    work: StepWork,
    *,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: str = "auto",
) -> np.ndarray:
    """float64[S], modelled seconds of each step.

    Raises:
        ConfigError: ranks that do not divide the model's heads, or an unknown KV dtype.
    """
    ranks = tensor_parallel_size
    num_bytes = step_bytes(model, work, tensor_parallel_size=ranks, kv_cache_dtype=kv_cache_dtype)
    memory_s = num_bytes / (profile.bandwidth_bytes_per_s * profile.bandwidth_frac)
    compute_s = step_flops(model, work, tensor_parallel_size=ranks) / (
        profile.flops_per_s * profile.flops_frac
    )
    overhead_s = profile.step_overhead_s + profile.request_overhead_s * np.asarray(work.num_seqs)
    return np.maximum(memory_s, compute_s) + _all_reduce_s(profile, model, work, ranks) + overhead_s


def _all_reduce_s(
    profile: CostProfile, model: ModelShape, work: StepWork, ranks: int
) -> np.ndarray | float:
    """Two ring all-reduces of the hidden states in each layer."""
    if ranks == 1:
        return 0.0
    num_bytes = np.asarray(work.num_new_tokens) * model.hidden_size * model.dtype_bytes
    once_s = profile.link_latency_s + 2 * (ranks - 1) / ranks * num_bytes / profile.link_bytes_per_s
    return 2 * model.num_layers * once_s

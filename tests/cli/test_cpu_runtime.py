"""A CPU engine gets Intel's OpenMP, huge pages and all cores, unless the user says otherwise."""

from __future__ import annotations

import json
import os
import sys

import pytest

from vtoken_cli import cpu_runtime

COMMAND = """
import os, sys
names = (
    "LD_PRELOAD", "GLIBC_TUNABLES", "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND",
    "KMP_BLOCKTIME",
)
mapped = "libiomp5" in open("/proc/self/maps").read()
run.out.result({**{n: os.environ.get(n) for n in names}, "mapped": mapped, "pid": os.getpid()})
"""
CLEAN = dict.fromkeys(
    ("VTOKEN_NO_REEXEC", "LD_PRELOAD", "GLIBC_TUNABLES", "OMP_NUM_THREADS",
     "VLLM_CPU_OMP_THREADS_BIND", "KMP_BLOCKTIME")
)  # fmt: skip

needs_intel_openmp = pytest.mark.skipif(
    not (cpu_runtime.runs_on_cpu() and cpu_runtime.find_intel_openmp()),
    reason="no CPU build of vLLM with intel-openmp in this environment",
)


@pytest.fixture
def engine_cli(cli):
    cli.add("probe", COMMAND, "@command(starts_engine=True)")
    return cli


@needs_intel_openmp
def test_starts_over_with_intel_openmp_and_says_so(engine_cli):
    done = engine_cli("probe", "--json", **CLEAN)
    seen = json.loads(done.stdout)
    cores = cpu_runtime.thread_settings({})["OMP_NUM_THREADS"]
    assert seen["mapped"] and seen["LD_PRELOAD"] == str(cpu_runtime.find_intel_openmp())
    assert seen["OMP_NUM_THREADS"] == cores and seen["KMP_BLOCKTIME"] == "5"
    huge = cpu_runtime.huge_pages_on_request()
    assert seen["GLIBC_TUNABLES"] == ("glibc.malloc.hugetlb=1" if huge else None)
    pages = ", huge pages asked for" if huge else ""
    assert done.stderr == f"CPU engine: {cores} threads, Intel OpenMP preloaded{pages}\n"


@needs_intel_openmp
def test_the_users_settings_stay(engine_cli):
    own = {
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0", "KMP_BLOCKTIME": "1",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0",
    }  # fmt: skip
    seen = json.loads(engine_cli("probe", "--json", **{**CLEAN, **own}).stdout)
    assert {name: seen[name] for name in own} == own and seen["mapped"]


@pytest.mark.parametrize("switch_off", [{"VTOKEN_NO_REEXEC": "1"}, {"LD_PRELOAD": "libgomp.so.1"}])
def test_does_not_start_over_when_told_so_or_already_done(engine_cli, switch_off):
    done = engine_cli("probe", "--json", **{**CLEAN, **switch_off})
    seen = json.loads(done.stdout)
    assert not seen["mapped"] and seen["LD_PRELOAD"] == switch_off.get("LD_PRELOAD")


def test_nothing_happens_on_a_gpu_build(monkeypatch):
    monkeypatch.delenv("VTOKEN_NO_REEXEC")
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    monkeypatch.setattr(cpu_runtime.metadata, "version", {"vllm": "0.32.0"}.__getitem__)
    monkeypatch.setattr(os, "execve", lambda *a: pytest.fail("started over"))
    before = dict(os.environ)
    cpu_runtime.ensure_cpu_runtime(lambda line: pytest.fail(line))
    assert dict(os.environ) == before


def test_which_builds_run_on_a_cpu(monkeypatch):
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)

    def installed(**versions):
        def version(name):
            if name not in versions:
                raise cpu_runtime.metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(cpu_runtime.metadata, "version", version)
        return cpu_runtime.runs_on_cpu()

    assert installed(**{"vllm-cpu": "0.32.0"})
    assert installed(vllm="0.32.0+cpu")
    assert not installed(vllm="0.32.0")
    assert not installed()


def test_restart_keeps_interpreter_options_and_arguments(monkeypatch, tmp_path):
    monkeypatch.delenv("VTOKEN_NO_REEXEC")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr(cpu_runtime, "runs_on_cpu", lambda: True)
    monkeypatch.setattr(cpu_runtime, "find_intel_openmp", lambda: tmp_path / "libiomp5.so")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "-m", "vtoken_cli.app", "a b"])
    calls = []

    def execve(*args):
        calls.append(args)
        raise SystemExit

    monkeypatch.setattr(os, "execve", execve)
    with pytest.raises(SystemExit):
        cpu_runtime.ensure_cpu_runtime(lambda line: None)
    ((program, arguments, environment),) = calls
    assert program == sys.executable
    assert arguments == [sys.executable, "-X", "dev", "-m", "vtoken_cli.app", "a b"]
    assert environment["LD_PRELOAD"] == str(tmp_path / "libiomp5.so")


def test_never_starts_over_twice(monkeypatch):
    """Not even where what was set did not stay, as in a program with capabilities."""
    monkeypatch.delenv("VTOKEN_NO_REEXEC")
    monkeypatch.setattr(cpu_runtime, "runs_on_cpu", lambda: True)
    monkeypatch.setattr(cpu_runtime, "start_settings", lambda environment: {"LD_PRELOAD": "gone"})
    environments = []

    def execve(program, arguments, environment):
        environments.append(environment)
        raise SystemExit

    monkeypatch.setattr(os, "execve", execve)
    with pytest.raises(SystemExit):
        cpu_runtime.ensure_cpu_runtime(lambda line: None)
    (environment,) = environments
    said = []
    for name in environment.keys() - os.environ.keys() - {"LD_PRELOAD"}:
        monkeypatch.setenv(name, environment[name])
    cpu_runtime.ensure_cpu_runtime(said.append)
    assert len(environments) == 1 and len(said) == 1


@pytest.mark.parametrize(
    ("modes", "libc", "asked_for"),
    [("always [madvise] never", ("glibc", "2.36"), True),
     ("always [madvise] never", ("glibc", "2.34"), False),
     ("always [madvise] never", ("glibc", "2.36+git"), True),
     ("always [madvise] never", ("", ""), False),
     ("[always] madvise never", ("glibc", "2.36"), False),
     (None, ("glibc", "2.36"), False)],
)  # fmt: skip
def test_huge_pages_are_asked_for_where_that_helps(monkeypatch, tmp_path, modes, libc, asked_for):
    file = tmp_path / "enabled"
    if modes:
        file.write_text(modes)
    monkeypatch.setattr(cpu_runtime, "_HUGE_PAGE_MODES", file)
    monkeypatch.setattr(cpu_runtime.platform, "libc_ver", lambda: libc)
    monkeypatch.setattr(cpu_runtime, "find_intel_openmp", lambda: None)
    other = {"GLIBC_TUNABLES": "glibc.malloc.check=1"}
    expected = {"GLIBC_TUNABLES": "glibc.malloc.check=1:glibc.malloc.hugetlb=1"}
    assert cpu_runtime.start_settings(other) == (expected if asked_for else {})
    # What the process starts with the second time needs no third.
    assert cpu_runtime.start_settings({**other, **(expected if asked_for else {})}) == {}


def test_several_memory_nodes_keep_vllms_binding(monkeypatch):
    monkeypatch.setattr(cpu_runtime, "_num_memory_nodes", lambda: 2)
    assert "VLLM_CPU_OMP_THREADS_BIND" not in cpu_runtime.thread_settings({})
    monkeypatch.setattr(cpu_runtime, "_num_memory_nodes", lambda: 1)
    assert cpu_runtime.thread_settings({})["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def control_groups(monkeypatch, tmp_path, own: str, files: dict[str, str]) -> None:
    """A process in control groups of its own: lines of /proc/self/cgroup, and their files."""
    root = tmp_path / "cgroup"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(cpu_runtime, "_CONTROL_GROUPS", tmp_path / "own")
    monkeypatch.setattr(cpu_runtime, "_CONTROL_GROUP_ROOT", root)


V1 = ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/", {"cpu.max": "max 100000"}, float("inf")),
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b", {"a/cpu.max": "100000 50000", "a/b/cpu.max": "max 100000"}, 2.0),
        ("0::/on/the/host", {"cpu.max": "50000 100000"}, 0.5),
        ("3:memory:/x\n1:cpuacct,cpu:/x\n", dict(zip(V1, ("300000", "100000"), strict=True)), 3.0),
        ("1:cpu:/\n0::/", dict(zip(V1, ("-1", "100000"), strict=True)), float("inf")),
        ("", {}, float("inf")),
    ],
)
def test_no_more_threads_than_the_control_group_has_time_for(
    monkeypatch, tmp_path, own, files, quota
):
    control_groups(monkeypatch, tmp_path, own, files)
    monkeypatch.setattr(cpu_runtime, "num_physical_cores", lambda: 64)
    assert cpu_runtime.cpu_quota() == quota
    threads = int(cpu_runtime.thread_settings({})["OMP_NUM_THREADS"])
    assert threads == max(1, int(min(64, quota)))
    assert "OMP_NUM_THREADS" not in cpu_runtime.thread_settings({"OMP_NUM_THREADS": "64"})


def test_threads_above_the_quota_are_said(monkeypatch, tmp_path):
    control_groups(monkeypatch, tmp_path, "0::/", {"cpu.max": "150000 100000"})
    monkeypatch.delenv("VTOKEN_NO_REEXEC")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setenv(cpu_runtime._STARTED_OVER, "1")
    monkeypatch.setattr(cpu_runtime, "runs_on_cpu", lambda: True)
    said = []
    cpu_runtime.ensure_cpu_runtime(said.append)
    assert "8 threads" in said[0] and "more threads than the 1.5 cores" in said[0]


@pytest.mark.parametrize("folder", ["with space", "with:colon"])
def test_a_path_that_cannot_be_preloaded(monkeypatch, tmp_path, folder):
    """The linker would take it for two, and say so in every process."""
    library = tmp_path / folder / "libiomp5.so"
    monkeypatch.setattr(cpu_runtime, "find_intel_openmp", lambda: library)
    assert "LD_PRELOAD" not in cpu_runtime.start_settings({})
    monkeypatch.setattr(cpu_runtime, "_read", lambda file: "")
    told = cpu_runtime._openmp_name("")
    assert told.startswith("torch's own OpenMP, slower") and folder in told

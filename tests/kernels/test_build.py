"""Building, caching and choosing the kernels."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_problems import needs_cpp

import vtoken.kernels as package
from vtoken.errors import ConfigError, UnsupportedError
from vtoken.kernels import build, cpp, selfcheck, tables
from vtoken.models import store

REPO = Path(build.__file__).parents[2]


def source() -> Path:
    return build.source_of("avx2")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of its own, a tiny source, and no kernels remembered by this process."""
    monkeypatch.setenv("VTOKEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "SOURCE_DIR", tmp_path / "csrc")
    source().parent.mkdir(parents=True)
    source().write_text(
        'extern "C" __attribute__((visibility("default")))'
        ' const char* vt_describe() { return "variant avx2\\ngroup 16"; }'
    )
    monkeypatch.setattr(package, "_loaded", {})
    monkeypatch.setattr(build, "_said", set())
    return tmp_path / "cache" / "kernels"


@needs_cpp
def test_built_once(cache, monkeypatch):
    path = build.build("avx2")
    assert path.parent == cache and path.exists()
    stamp = path.stat().st_mtime_ns
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build.build("avx2") == path and path.stat().st_mtime_ns == stamp
    assert not list(cache.glob(".build-*"))


@needs_cpp
@pytest.mark.parametrize("damage", [b"", b"\x7fELF", None])
def test_a_corrupt_build_is_built_again(cache, damage):
    path = build.build("avx2")
    good = path.read_bytes()
    path.write_bytes(good[: len(good) // 2] if damage is None else damage)
    assert build._told(build.load_library("avx2"))["variant"] == ["avx2"]
    assert build._intact(path)


@needs_cpp
def test_a_build_without_its_digest_is_built_again(cache):
    path = build.build("avx2")
    path.with_suffix(".sha256").unlink()
    assert build.build("avx2") == path and build._intact(path)


@needs_cpp
def test_a_foreign_library_under_the_right_name_is_built_again(cache):
    path = build.build("avx2")
    good = source().read_text()
    source().write_text(good.replace("variant avx2", "variant other"))
    other = build.build("avx2")
    path.unlink()  # the loader may have mapped it: a new file, not new contents
    path.write_bytes(other.read_bytes())
    path.with_suffix(".sha256").write_text(other.with_suffix(".sha256").read_text())
    source().write_text(good)
    assert build._told(build.load_library("avx2"))["variant"] == ["avx2"]


@needs_cpp
def test_source_flags_and_compiler_select_the_build(cache, monkeypatch):
    key = build.build_key("g++", "avx2")
    assert key != build.build_key("g++", "avx512")
    monkeypatch.setattr(build, "compiler_version", lambda _: "another compiler 1.0")
    assert build.build_key("g++", "avx2") != key
    monkeypatch.undo()
    monkeypatch.setattr(build, "COMMON_FLAGS", ("-O1",))
    assert build.build_key("g++", "avx2") != key


@needs_cpp
def test_a_stale_build_is_not_used(cache):
    path = build.build("avx2")
    source().write_text(source().read_text() + "\n// changed")
    changed = build.build("avx2")
    (build.SOURCE_DIR / "describe.h").write_text("// changed too")
    assert len({path, changed, build.build("avx2")}) == 3


def _build_in_child(_):
    return str(build.build("avx2"))


@needs_cpp
def test_processes_that_build_at_once_agree(cache):
    with multiprocessing.get_context("fork").Pool(3) as pool:
        paths = pool.map(_build_in_child, range(6))
    assert len(set(paths)) == 1 and build._intact(Path(paths[0]))


@needs_cpp
def test_a_failing_compiler_falls_back_to_torch(cache, caplog):
    source().write_text("not C++")
    kernels = package.load()
    assert kernels.name == "torch" and "error" in kernels.why
    with pytest.raises(UnsupportedError, match="torch works"):
        package.load("cpp")


@needs_cpp
def test_a_cache_that_cannot_be_written(cache, tmp_path, monkeypatch):
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("VTOKEN_CACHE", str(blocker))
    assert build._told(build.load_library("avx2"))["variant"] == ["avx2"]


@needs_cpp
@pytest.mark.parametrize("what", ["cache", "kernels", "library"])
@pytest.mark.parametrize("damage", ["others may write", "another user's"])
def test_what_another_user_could_change_is_not_loaded(cache, what, damage):
    good = build.build("avx2")
    path = {"cache": cache.parent, "kernels": cache, "library": good}[what]
    if damage == "others may write":
        path.chmod(0o777)
    elif os.geteuid():
        pytest.skip("only root can give a file away")
    else:
        os.chown(path, 4242, -1)
    loaded = build.load_library("avx2")
    assert build._told(loaded)["variant"] == ["avx2"]
    used = Path(loaded._name)
    if what == "library":
        assert used == good and store.is_trusted(good)  # a sound folder: compiled again there
    else:
        assert used.parent not in (cache, cache.parent)


@needs_cpp
@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_every_umask_makes_a_cache_that_is_used_again(cache, monkeypatch, umask):
    before = os.umask(umask)
    try:
        path = build.build("avx2")
    finally:
        os.umask(before)
    assert path.parent == cache
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build.build("avx2") == path


@needs_cpp
def test_a_network_folder_without_locks(cache, monkeypatch):
    def flock(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    assert build.build("avx2").parent == cache


@needs_cpp
def test_a_full_disk_is_said_in_one_line(cache, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build.tempfile, "mkstemp", full)
    with pytest.raises(build.BuildError, match="cannot be built in .*: No space left on device"):
        build.build("avx2")


def test_without_a_compiler(cache, monkeypatch, caplog):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    ok, reason = package.available()
    assert not ok
    kernels = package.load()
    assert kernels.name == "torch" and reason in kernels.why
    assert len([r for r in caplog.records if r.name == "vtoken.kernels"]) == 1
    package.load()
    monkeypatch.setattr(tables, "_library", None)
    monkeypatch.setattr(tables, "_why_not", None)
    assert tables.load_ops().name == "scalar"
    assert len([r for r in caplog.records if r.name == "vtoken.kernels"]) == 1


def test_without_avx2(cache, monkeypatch):
    monkeypatch.setattr(build, "cpu_flags", lambda: {"sse2"})
    ok, reason = package.available()
    assert not ok and "AVX2" in reason
    assert package.load().name == "torch"


def test_avx512_only_where_the_processor_has_it(monkeypatch):
    full = set(build.NEEDED_CPU_FLAGS["avx512"])
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build.platform, "system", lambda: "Linux")
    monkeypatch.setattr(build, "cpu_flags", lambda: full)
    assert build.usable_variants() == ["avx512", "avx2"]
    monkeypatch.setattr(build, "cpu_flags", lambda: full - {"avx512bw"})
    assert build.usable_variants() == ["avx2"]


@needs_cpp
def test_avx512_compiles(tmp_path, monkeypatch):
    """The real sources, for a processor this machine may not be."""
    monkeypatch.setenv("VTOKEN_CACHE", str(tmp_path))
    assert build.build("avx512").stat().st_size > 0


@needs_cpp
@pytest.mark.parametrize(
    ("ours", "told"),
    [
        ({"group": ["16"]}, None),
        ({"group": ["32"]}, "group: C++ has 16 where Python has 32"),
        ({"group": ["16", "x:i8"]}, "group: C++ has None where Python has x:i8"),
        ({"group": []}, "group: C++ has 16 where Python has None"),
        ({"Args": ["plan:p8"]}, "Args: C++ has None where Python has plan:p8"),
    ],
)
def test_shared_names_are_compared(cache, ours, told):
    library = build.load_library("avx2")
    if told is None:
        return build.check_shared(library, ours)
    with pytest.raises(build.BuildError, match=re.escape(told)):
        build.check_shared(library, ours)


@needs_cpp
def test_kernels_with_other_fields_are_not_used(monkeypatch):
    """Two fields change places on one side: torch runs instead, and says why."""
    plan, query, *rest = cpp.Args._fields_

    class Args(ctypes.Structure):
        _fields_ = (query, plan, *rest)

    monkeypatch.setattr(package, "_loaded", {})
    monkeypatch.setattr(cpp, "Args", Args)
    assert package.load().name == "torch"
    assert "Args: C++ has plan:p8 where Python has query:p8" in package.load().why


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("NUMBERS", ("block_base", "token_base"), "numbers: C++ has token_base"),
        ("SPAN_TOKENS", 32, "span_tokens: C++ has 64 where Python has 32"),
    ],
)
@needs_cpp
def test_tables_with_other_names_are_not_used(monkeypatch, name, value, told):
    monkeypatch.setattr(tables, "_library", None)
    monkeypatch.setattr(tables, "_why_not", None)
    monkeypatch.setattr(tables, name, value)
    assert tables.load_ops().name == "scalar"
    assert told in tables._why_not


@needs_cpp
def test_a_miscomputing_build_is_not_used(monkeypatch):
    def wrong(self, kv, slots, scores, layout):
        scores[slots] += 1.0

    monkeypatch.setattr(package, "_loaded", {})
    monkeypatch.setattr(cpp.CppKernels, "_key_norms", wrong)
    assert "key norms" in selfcheck.differs(cpp.CppKernels("avx2"))
    assert package.load().name == "torch"


def test_environment_chooses(monkeypatch):
    monkeypatch.setenv("VTOKEN_KERNELS", "torch")
    assert package.load().name == "torch"
    monkeypatch.setenv("VTOKEN_KERNELS", "troch")
    with pytest.raises(ConfigError, match="torch"):
        package.load()


# What each imports at once, and then does.
LIGHT_IMPORTS = {
    "import vtoken.kernels; vtoken.kernels.load('torch')": {"vllm"},
    "from vtoken.kernels.tables import load_ops; load_ops()": {"vllm", "torch"},
    "import vtoken.kernels": {"vllm", "torch"},
}


@pytest.mark.parametrize("code", LIGHT_IMPORTS)
def test_what_is_not_imported(code):
    """No kernel needs vLLM, and the scheduler's bookkeeping needs no torch either."""
    done = subprocess.run(
        [sys.executable, "-c", code + "\nimport sys; print(*sys.modules)"],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(REPO)},
    )  # fmt: skip
    assert "vtoken.kernels" in done.stdout.split()
    assert not LIGHT_IMPORTS[code] & set(done.stdout.split())

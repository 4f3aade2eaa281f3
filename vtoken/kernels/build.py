"""Compile the C++ kernels at first use, once per source, compiler, flags and instruction set.

The build lands in vToken's cache folder, written under a temporary name and renamed, behind a file
lock, with its digest beside it: what does not match is built again. A cache that cannot be written,
or that another user could write to, is left alone: the process builds for itself.
"""

from __future__ import annotations

import _ctypes
import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import zip_longest
from pathlib import Path

from vtoken.errors import ConfigError
from vtoken.models.store import is_trusted, open_cache

SOURCE_DIR = Path(__file__).parent / "csrc"
COMMON_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden")
_AVX2 = ("avx2", "fma", "f16c")
NEEDED_CPU_FLAGS = {
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl", *_AVX2),
    "avx2": _AVX2,
    "tables": (),  # the scheduler's bookkeeping: integers, for any processor
}  # the attention's variants, fastest first
COMPILE_TIMEOUT_S = 300
logger = logging.getLogger("vtoken.kernels")
_said: set[str] = set()
NO_COMPILER = "no C++ compiler found (set CXX, or install g++)"


class BuildError(Exception):
    """The kernels cannot be built or loaded here; the message says why in one line."""


def cpu_flags() -> set[str]:
    """Instruction sets that the processor and the system offer, in Linux's spelling."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    match = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return set(match[1].split()) if match else set()


def usable_variants() -> list[str]:
    """Variants of the attention that this processor runs, the fastest first."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        return []
    flags = cpu_flags()
    return [name for name in ("avx512", "avx2") if flags.issuperset(NEEDED_CPU_FLAGS[name])]


def find_compiler() -> str | None:
    """Path of a C++ compiler: $CXX, g++, c++ or clang++."""
    names = (os.environ.get("CXX"), "g++", "c++", "clang++")
    return next(filter(None, (shutil.which(name) for name in names if name)), None)


def available() -> tuple[bool, str]:
    """Whether the C++ kernels can be built and run here, and why or why not.

    Compiles nothing.
    """
    variants = usable_variants()
    if not variants:
        return False, f"needs x86-64 Linux with AVX2, FMA and F16C; this is {platform.machine()}"
    compiler = find_compiler()
    if compiler is None:
        return False, NO_COMPILER
    return True, f"{variants[0]}, {compiler}"


def say_once(reason: str, message: str) -> None:
    """Warn of what does not run compiled; once for a reason, however much it concerns."""
    if reason not in _said:
        _said.add(reason)
        logger.warning("%s: %s", message, reason)


def _flags(variant: str) -> list[str]:
    flags = [*COMMON_FLAGS, *(f"-m{name}" for name in NEEDED_CPU_FLAGS[variant])]
    return [*flags, "-DVT_AVX512"] if variant == "avx512" else flags


def source_of(variant: str) -> Path:
    """The file that is compiled."""
    return SOURCE_DIR / ("tables/tables.cpp" if variant == "tables" else "attention/kernels.cpp")


def build_key(compiler: str, variant: str) -> str:
    """Hash of everything that shapes the result: sources, compiler version, flags."""
    digest = hashlib.sha256()
    for path in sorted([*SOURCE_DIR.glob("*.h"), *source_of(variant).parent.glob("*.[hc]*")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(" ".join(_flags(variant)).encode())
    digest.update(compiler_version(compiler).encode())
    return digest.hexdigest()[:24]


def compiler_version(compiler: str) -> str:
    """First line of `compiler --version`.

    Raises:
        BuildError: the compiler does not run.
    """
    try:
        done = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler} does not run: {error}") from error
    return done.stdout.splitlines()[0] if done.stdout else compiler


def build(variant: str, *, rebuild: bool = False) -> Path:
    """Return the compiled library of a variant, compiling it where the cache has none.

    Args:
        rebuild: ignore what is cached (it loaded badly).

    Raises:
        BuildError: no compiler, or it failed.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError(NO_COMPILER)
    folder = _folder()
    target = folder / f"kernels-{variant}-{build_key(compiler, variant)}.so"
    if not rebuild and _intact(target):
        return target
    try:
        with _locked(target.with_suffix(".lock")):
            # Another process may have built it while this one waited.
            if rebuild or not _intact(target):
                _compile(compiler, variant, target)
    except OSError as error:  # such as a full disk
        raise BuildError(f"the kernels cannot be built in {folder}: {error.strerror}") from error
    return target


def load_library(variant: str) -> ctypes.CDLL:
    """Load a variant; a cached build that does not load or answers wrongly is built again.

    Raises:
        BuildError: it does not work even when freshly built.
    """
    error: Exception | None = None
    for rebuild in (False, True):
        path = build(variant, rebuild=rebuild)
        try:
            library = ctypes.CDLL(str(path))
            if _told(library)["variant"] == [variant]:
                return library
            error = BuildError(f"{path.name} is another variant")
            _ctypes.dlclose(library._handle)  # or the loader answers with it again, by name
        except (OSError, AttributeError, KeyError) as caught:
            error = caught
    raise BuildError(f"the compiled kernels do not load: {error}")


def _told(library: ctypes.CDLL) -> dict[str, list[str]]:
    """What a library tells of itself (csrc/describe.h): names, by what they are names of."""
    library.vt_describe.restype = ctypes.c_char_p
    lines = library.vt_describe().decode().splitlines()
    return {name: items for name, *items in map(str.split, lines)}


def fields_of(*structures: type[ctypes.Structure]) -> dict[str, list[str]]:
    """Fields of structures as a library tells them: name, kind and bytes of each."""
    kinds = {ctypes.c_void_p: "p", ctypes.c_float: "f"}
    return {
        structure.__name__.lstrip("_"): [
            f"{name}:{kinds.get(kind, 'i')}{ctypes.sizeof(kind)}"
            for name, kind in structure._fields_
        ]
        for structure in structures
    }


def check_shared(library: ctypes.CDLL, expected: Mapping[str, Sequence[str]]) -> None:
    """Compare names, orders and sizes that Python and a library share.

    Raises:
        BuildError: the first that differs: one side would read what the other did not write.
    """
    told = _told(library)
    for what, ours in expected.items():
        for here, there in zip_longest(ours, told.get(what, [])):
            if here != there:
                raise BuildError(f"{what}: C++ has {there} where Python has {here}")


def _compile(compiler: str, variant: str, target: Path) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".build-", suffix=".so")
    os.close(handle)
    temporary = Path(name)
    command = [compiler, *_flags(variant), str(source_of(variant)), "-o", name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
        )
        if done.returncode:
            lines = (done.stderr.strip() or "no message").splitlines()
            told = next((line for line in lines if "error" in line), lines[0])
            raise BuildError(f"{Path(compiler).name} failed: {told}")
        digest = _digest(temporary)
        temporary.chmod(0o755)  # whatever the umask: `is_trusted`
        # The library first: a reader that sees a new library with an old digest rebuilds, no more.
        os.replace(temporary, target)
        target.with_suffix(".sha256").write_text(digest)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{Path(compiler).name} failed: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _intact(target: Path) -> bool:
    # A truncated library would not fail to load, it would kill the process (SIGBUS).
    try:
        told = target.with_suffix(".sha256").read_text()
        return is_trusted(target) and told == _digest(target)
    except OSError:
        return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _folder() -> Path:
    """The cache's folder of kernels, or a private temporary one where that cannot be used."""
    try:
        return open_cache("kernels")
    except ConfigError as error:
        say_once(str(error), "the kernels are compiled for this process alone")
        return Path(_private_folder().name)


@cache
def _private_folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="vtoken-kernels-")


@contextmanager
def _locked(path: Path):
    import fcntl  # not on Windows, where nothing gets this far

    with open(path, "w") as file:
        with suppress(OSError):  # a network folder without locks: two may build the same
            fcntl.flock(file, fcntl.LOCK_EX)
        yield

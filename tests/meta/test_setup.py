"""The lock file, the project file and the Makefile fit together."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = [
    Requirement(line)
    for line in (ROOT / "requirements" / "cpu.lock").read_text().splitlines()
    if line and not line.startswith("#")
]
LOCKED = {canonicalize_name(req.name): req for req in LOCK}


def test_every_version_is_exact():
    assert len(LOCKED) == len(LOCK) > 100
    for req in LOCK:
        assert re.fullmatch(r"==[\w.]+", str(req.specifier)), req
        assert not req.url


def test_what_breaks_beside_the_cpu_torch_is_left_out():
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(LOCKED)
    assert str(LOCKED["torch"].specifier) == "==2.13.0"


@pytest.mark.parametrize("extra", ["", "cpu", "models", "plots", "verify", "test"])
def test_the_lock_file_holds_what_the_project_asks_for(extra):
    optional = PROJECT["optional-dependencies"]
    wanted = [Requirement(text) for text in (optional[extra] if extra else PROJECT["dependencies"])]
    assert wanted
    for req in wanted:
        locked = LOCKED[canonicalize_name(req.name)]
        version = str(locked.specifier).removeprefix("==")
        assert req.specifier.contains(version, prereleases=True), (str(req), str(locked))


def test_the_lock_file_is_closed():
    """What a locked package needs is locked too, those that are left out on purpose apart."""
    left_out = {"torchvision", "torchaudio", "torchcodec"}
    for name, locked in LOCKED.items():
        if locked.marker is not None and not locked.marker.evaluate():
            continue
        for text in metadata.requires(name) or []:
            req = Requirement(text)
            needed = canonicalize_name(req.name)
            if req.marker is None or req.marker.evaluate({"extra": ""}):
                assert needed in LOCKED or needed in left_out, f"{name} needs {needed}"


def test_addresses_of_package_indexes_are_nowhere():
    for name in ("pyproject.toml", "Makefile", "requirements/cpu.lock", ".ci/run"):
        assert "://" not in (ROOT / name).read_text(), name


def test_entry_points_can_be_imported():
    for text in PROJECT["scripts"].values():
        module, _, attribute = text.partition(":")
        assert callable(getattr(__import__(module, fromlist=[attribute]), attribute))


@pytest.mark.vllm
def test_plugin_entry_points_can_be_imported():
    for group, points in PROJECT["entry-points"].items():
        assert group.startswith(("vllm.", "vtoken."))
        for text in points.values():
            module, _, attribute = text.partition(":")
            assert callable(getattr(__import__(module, fromlist=[attribute]), attribute))


def test_ci_runs_the_tests_a_newcomer_runs():
    makefile = (ROOT / "Makefile").read_text()
    # What is fast comes first: a style or type error is told in seconds.
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("lint types test")
    for target in ("venv", "demo", "test", "stress", "bench", "lint", "types"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_commits_are_checked_with_what_make_checks():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    entries = " ".join(hook["entry"] for hook in hooks)
    for command in ("ruff check", "ruff format", "make --no-print-directory types"):
        assert command in entries
    # Nothing is downloaded: versions are those of the lock file.
    assert {hook["language"] for hook in hooks} == {"system"}


def test_types_are_shipped():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "py.typed" in data["package-data"]["*"] and (ROOT / "vtoken" / "py.typed").exists()

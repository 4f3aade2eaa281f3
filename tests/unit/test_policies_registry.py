"""Policies by name, built-in or installed; the example package among the latter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from vtoken.errors import ConfigError
from vtoken.policies import registry
from vtoken.policies.registry import BUILT_IN, make_policy, policy_class, policy_names

REPO = Path(__file__).resolve().parents[2]
EXAMPLE = REPO / "examples" / "my_policy"


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_policies_are_found_under_their_own_name(name):
    assert policy_class(name).name == name
    assert make_policy(name, block_size=32).block_size == 32


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(ConfigError, match=r"--policy 'streaming': did you mean 'streaming-llm'"):
        policy_class("streaming")


@pytest.mark.parametrize("value", [-1, 2.5, True])
@pytest.mark.parametrize("key", ["sink_tokens", "recent_tokens"])
def test_windows_must_be_whole_numbers_of_tokens(key, value):
    option = f"--{key.replace('_', '-')}"
    with pytest.raises(ConfigError, match=f"{option} {value}: a whole number of tokens"):
        make_policy("random", block_size=16, **{key: value})


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("no_such_module:Policy", "must load, but raises ModuleNotFoundError"),
        ("vtoken.errors:ConfigError", "must be a subclass of"),
    ],
)
def test_an_installed_policy_that_does_not_load_is_a_config_error(monkeypatch, target, why):
    entry = EntryPoint("theirs", target, registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "_installed", lambda: {"theirs": entry})
    assert policy_names()[-1] == "theirs"
    with pytest.raises(ConfigError, match=f"--policy 'theirs': {target} {why}"):
        policy_class("theirs")


def test_the_example_is_short_and_its_readme_shows_it():
    code = (EXAMPLE / "my_policy.py").read_text()
    assert len(code.splitlines()) <= 30
    shown = (EXAMPLE / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert all(line in code.splitlines() for line in shown.splitlines())


def test_the_example_installs_and_is_found_by_name(tmp_path):
    """Offline, into a folder of its own; another process finds, checks and runs it."""
    source, target = tmp_path / "source", tmp_path / "site"
    shutil.copytree(EXAMPLE, source)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    pip += ["--no-index", "--quiet", "--disable-pip-version-check", "--target", target, source]
    subprocess.run(pip, check=True, capture_output=True, text=True, timeout=120)

    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), str(REPO)])}

    def python(*args: str) -> str:
        done = subprocess.run(
            [sys.executable, *args], check=False, env=env, cwd=tmp_path, capture_output=True, text=True,
            timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    use = (
        "from vtoken.policies.registry import make_policy, policy_names\n"
        "policy = make_policy('my-policy', block_size=16, stride_tokens=8)\n"
        "print('my-policy' in policy_names(), type(policy).__module__, policy.stride_tokens)"
    )
    assert python("-c", use).split() == ["True", "my_policy", "8"]
    assert "keeps the contract" in python("-m", "vtoken.testing.policies", "my-policy")

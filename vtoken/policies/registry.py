"""Policies by name: the built-in ones, and any package's under the entry points `vtoken.policies`."""

from __future__ import annotations

import importlib
from dataclasses import fields
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from vtoken.errors import ConfigError, nearest
from vtoken.policies.base import Policy

ENTRY_POINT_GROUP = "vtoken.policies"

# name -> module under vtoken.policies and class; imported on first use.
BUILT_IN = {
    "streaming-llm": ("streaming_llm", "StreamingLLM"),
    "sliding-window": ("sliding_window", "SlidingWindow"),
    "random": ("random", "Random"),
    "h2o": ("h2o", "H2O"),
    "scissorhands": ("scissorhands", "Scissorhands"),
    "fastgen": ("fastgen", "FastGen"),
    "snapkv": ("snapkv", "SnapKV"),
    "tova": ("tova", "TOVA"),
    "knorm": ("knorm", "KNorm"),
}


@cache
def _installed() -> dict[str, EntryPoint]:
    return {ep.name: ep for ep in entry_points(group=ENTRY_POINT_GROUP)}


def policy_names() -> list[str]:
    """Names of all policies, built-in ones first."""
    return [*BUILT_IN, *(n for n in sorted(_installed()) if n not in BUILT_IN)]


def policy_class(name: str) -> type[Policy]:
    """Find a policy class by name.

    Raises:
        ConfigError: no such policy (names the nearest one), or an installed one does not load.
    """
    if name in BUILT_IN:
        module, cls = BUILT_IN[name]
        return getattr(importlib.import_module(f"vtoken.policies.{module}"), cls)
    if name in _installed():
        return _load(name)
    raise ConfigError("--policy", name, nearest(name, policy_names()))


def _load(name: str) -> type[Policy]:
    """Load another package's policy; a failure there is a configuration error, not our bug."""
    entry_point = _installed()[name]
    try:
        cls = entry_point.load()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(
            "--policy", name, f"{entry_point.value} must load, but raises {why}"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise ConfigError(
            "--policy", name, f"{entry_point.value} must be a subclass of vtoken.policies.Policy"
        )
    return cls


def make_policy(
    name: str,
    *,
    block_size: int,
    sink_tokens: int | None = None,
    recent_tokens: int | None = None,
    **parameters: Any,
) -> Policy:
    """Build a policy; None for a parameter takes the policy's own default.

    Raises:
        ConfigError: unknown policy or parameter, or a negative window.
    """
    cls = policy_class(name)
    given = {"sink_tokens": sink_tokens, "recent_tokens": recent_tokens, **parameters}
    given = {k: v for k, v in given.items() if v is not None}
    known = {f.name for f in fields(cls)}
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"policy_args of {name}", key, nearest(key, known - {"block_size"}))
        if key in ("sink_tokens", "recent_tokens") and (
            not isinstance(value, int) or isinstance(value, bool) or value < 0
        ):
            raise ConfigError(
                f"--{key.replace('_', '-')}", value, "a whole number of tokens, 0 or more"
            )
    return cls(block_size=block_size, **given)

"""Test helpers that users may import. Names are loaded on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# name -> module under vtoken.testing
_EXPORTS = {
    "check_policy": "policies",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)

"""The models vToken brings along, and how a user's `--model` becomes a path.

`smollm2-135m` is downloaded once and converted (`smollm2.py`); the `tiny-*` models are generated
from a fixed seed for tests (`tiny.py`). Both land in `$VTOKEN_CACHE/models/<name>` as an ordinary
Hugging Face folder, which vLLM and transformers load alike. Nothing here imports torch or vLLM.

    vtoken models prepare smollm2-135m      # prepare one and print its path
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from vtoken.errors import ConfigError, nearest
from vtoken.models.store import cache_dir, model_dir, publish, stored_format

__all__ = ["MODEL_NAMES", "cache_dir", "is_prepared", "prepare", "resolve_model"]

_TINY_NAMES = ("tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-gemma")
MODEL_NAMES: tuple[str, ...] = ("smollm2-135m", *_TINY_NAMES)
"""Names that `prepare` knows; everything else is a path or a Hugging Face id."""

# Raised whenever a converter or generator writes something different: older copies are rebuilt.
_FORMAT = {"smollm2-135m": 1, **{name: 2 for name in _TINY_NAMES}}

_HF_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def prepare(name: str, progress: Callable[[str], None] | None = None) -> Path:
    """Make an embedded model present in the cache and return its folder.

    Args:
        name: one of `MODEL_NAMES`.
        progress: called with one line of text per stage; silent without it.

    Raises:
        ConfigError: `name` is not an embedded model.
        EngineError: the download failed, or what came down is not what was pinned.
    """
    if name not in MODEL_NAMES:
        raise ConfigError("--model", name, nearest(name, MODEL_NAMES))
    say = progress or (lambda line: None)
    if is_prepared(name):
        return model_dir(name)
    if name == "smollm2-135m":
        from vtoken.models.smollm2 import build
    else:
        from vtoken.models import tiny

        # The tiny models borrow the real tokenizer, so that text prompts work with every model.
        build = partial(tiny.build, name, prepare("smollm2-135m", progress))
    return publish(name, _FORMAT[name], partial(build, say=say))


def is_prepared(name: str) -> bool:
    """Tell whether the cache holds `name` in the form this version writes."""
    return stored_format(model_dir(name)) == _FORMAT[name]


def resolve_model(model: str, progress: Callable[[str], None] | None = None) -> str:
    """Turn `--model` into what vLLM loads: a folder, or a Hugging Face id left as it is.

    Embedded models are prepared on demand. A name that can only be a path must exist.

    Raises:
        ConfigError: the path does not exist, or the text is neither a path nor an id.
    """
    if model in MODEL_NAMES:
        return str(prepare(model, progress))
    path = Path(model).expanduser()
    if path.exists():
        return str(path)
    if model.startswith((".", "/", "~")) or not _HF_ID.fullmatch(model):
        raise ConfigError("--model", model, "no such path; " + _ALLOWED)
    if "/" not in model:
        # A bare word is far more often a typing error than one of the hub's few bare ids.
        hint = nearest(model, MODEL_NAMES)
        hint = f"{hint} Else " if hint.endswith("?") else ""
        raise ConfigError("--model", model, hint + _ALLOWED)
    return model


_ALLOWED = "give a local folder, a Hugging Face id such as org/name, or " + ", ".join(MODEL_NAMES)

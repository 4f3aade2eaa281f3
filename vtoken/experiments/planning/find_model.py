"""A user's model: its shape, what vLLM loads for it, its tokenizer."""

from __future__ import annotations

from pathlib import Path

from vtoken.errors import ConfigError
from vtoken.experiments.planning.model_shapes import ModelShape, get_model_shape


def find_shape(model: str, *, needs_weights: bool) -> tuple[ModelShape, str]:
    """A model's shape, and the path or id that vLLM loads.

    Args:
        needs_weights: the model will be loaded; else a known name is enough.

    Raises:
        ConfigError: no such model or path, or a config.json that cannot be planned for.
    """
    from vtoken.models import MODEL_NAMES, resolve_model

    if not needs_weights and model not in MODEL_NAMES and not Path(model).expanduser().exists():
        return get_model_shape(model), model
    resolved = resolve_model(model)
    if Path(resolved).is_dir():
        return get_model_shape(resolved), resolved
    try:
        return get_model_shape(resolved), resolved
    except ConfigError:
        return get_model_shape(_downloaded_config(resolved)), resolved


def load_tokenizer(model: str, path: str):
    """A model's tokenizer.

    Args:
        model: as the user named it; path: as `find_shape` found it.

    Raises:
        ConfigError: it has none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        why = str(error).strip().split("\n")[0]
        raise ConfigError("--model", model, f"a model with a tokenizer ({why})") from None


def _downloaded_config(model: str) -> str:
    """Path of a Hugging Face model's config.json, fetched if need be."""
    from huggingface_hub import hf_hub_download

    try:
        return hf_hub_download(model, "config.json")
    except (OSError, ValueError) as error:  # network, name, access: all the same to the user
        why = str(error).strip().split("\n")[0]
        raise ConfigError("--model", model, f"a model that can be found ({why})") from None

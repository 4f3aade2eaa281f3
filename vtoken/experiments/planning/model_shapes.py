"""The shape of a model: what its weights and its KV cache weigh, and what a token costs.

Shapes come from `data/models.yaml` or from any local config.json of a supported architecture.
No weights are read and nothing is downloaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path

import yaml

from vtoken.errors import ConfigError, UnsupportedError, nearest

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4, "fp8": 1}

# Architectures whose parameters `derived_num_params` counts, and what each adds to the plain
# decoder (gated MLP, two norms a layer): biases of Q, K, V and norms of Q and K.
_QKV_BIAS = {"Qwen2ForCausalLM"}
_QK_NORM = {"Qwen3ForCausalLM"}
_TIED_BY_DEFAULT = {"GemmaForCausalLM"}
ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "GemmaForCausalLM",
    "GraniteForCausalLM",
)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A dense decoder with full attention in every layer.

    Attributes:
        dtype: of the weights; `dtype_bytes` a parameter.
        num_params: all parameters, tied embeddings once.
        weights_file_bytes: bytes of the weight files where they are known, None otherwise.
    """

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool
    num_params: int
    max_model_len: int
    dtype: str = "bfloat16"
    weights_file_bytes: int | None = None

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights, over all tensor-parallel ranks."""
        if self.weights_file_bytes is not None:
            return self.weights_file_bytes
        return self.num_params * self.dtype_bytes

    @property
    def embedding_params(self) -> int:
        """Parameters of one embedding table (input or output), vocabulary x hidden size."""
        return self.vocab_size * self.hidden_size

    @property
    def body_params(self) -> int:
        """Parameters that every token is multiplied with: all but the embedding tables."""
        return self.num_params - self.embedding_params * (1 if self.tied_embeddings else 2)

    def kv_bytes_per_token(
        self, *, tensor_parallel_size: int = 1, kv_cache_dtype: str = "auto"
    ) -> int:
        """K and V of one token in all layers, on one rank, in bytes."""
        heads = self.kv_heads_per_rank(tensor_parallel_size)
        dtype = self.dtype if kv_cache_dtype == "auto" else kv_cache_dtype
        if dtype not in DTYPE_BYTES:
            raise ConfigError("--kv-cache-dtype", dtype, nearest(dtype, [*DTYPE_BYTES, "auto"]))
        return 2 * self.num_layers * heads * self.head_size * DTYPE_BYTES[dtype]

    def kv_heads_per_rank(self, tensor_parallel_size: int) -> int:
        """KV heads on each rank; with more ranks than heads, heads are replicated."""
        ranks = tensor_parallel_size
        fits = ranks >= 1 and self.num_heads % ranks == 0
        if not fits or (self.num_kv_heads % ranks and ranks % self.num_kv_heads):
            raise ConfigError(
                "--tensor-parallel-size",
                ranks,
                f"a divisor of the {self.num_heads} heads of {self.name} that divides its "
                f"{self.num_kv_heads} KV heads or is a multiple of them",
            )
        return max(1, self.num_kv_heads // ranks)

    def with_dtype(self, dtype: str) -> ModelShape:
        """The same model with its weights (and KV cache) in another dtype; "auto" changes nothing."""
        if dtype == "auto":
            return self
        if dtype not in DTYPE_BYTES:
            raise ConfigError("--dtype", dtype, nearest(dtype, [*DTYPE_BYTES, "auto"]))
        if dtype == self.dtype:
            return self
        return replace(self, dtype=dtype, weights_file_bytes=None)


def derived_num_params(fields: Mapping[str, object], *, attention_bias: bool = False) -> int:
    """Count the parameters of a supported architecture from its shape."""
    hidden, layers = fields["hidden_size"], fields["num_layers"]
    q_size = fields["num_heads"] * fields["head_size"]
    kv_size = fields["num_kv_heads"] * fields["head_size"]
    attention = 2 * hidden * (q_size + kv_size)
    if attention_bias:
        attention += q_size + 2 * kv_size + hidden
    elif fields["architecture"] in _QKV_BIAS:
        attention += q_size + 2 * kv_size
    if fields["architecture"] in _QK_NORM:
        attention += 2 * fields["head_size"]
    layer = attention + 3 * hidden * fields["intermediate_size"] + 2 * hidden
    tables = 1 if fields["tied_embeddings"] else 2
    return layers * layer + hidden + tables * fields["vocab_size"] * hidden


@cache
def load_models() -> dict[str, tuple[ModelShape, tuple[str, ...]]]:
    """(shape, aliases) of `data/models.yaml`, by full name."""
    text = (resources.files("vtoken.experiments.planning") / "data" / "models.yaml").read_text(
        "utf-8"
    )
    models = {}
    for name, fields in yaml.safe_load(text).items():
        aliases = tuple(fields.pop("aliases", ()))
        models[name] = (ModelShape(name=name, **fields), aliases)
    return models


def get_model_shape(model: str | Path) -> ModelShape:
    """Find a model's shape by name, or read it from a folder or a config.json.

    Raises:
        ConfigError: an unknown name (the nearest is named) or an unreadable config.json.
        UnsupportedError: an architecture that vToken cannot run or this module cannot count.
    """
    path = Path(model).expanduser()
    if path.is_dir() or path.suffix == ".json":
        return shape_from_config(path / "config.json" if path.is_dir() else path)
    wanted = _short(str(model))
    names: dict[str, ModelShape] = {}
    for name, (shape, aliases) in load_models().items():
        names |= {_short(alias): shape for alias in (name, *aliases)}
    if wanted in names:
        return names[wanted]
    hint = nearest(wanted, names)
    if hint.startswith("did"):
        found = names[hint.split("'")[1]].name
        hint = f"did you mean {found!r}?"
    else:
        hint = "one of " + ", ".join(load_models())
    raise ConfigError("--model", str(model), f"{hint} (or a folder with a config.json)")


def _short(name: str) -> str:
    name = name.lower().rsplit("/", 1)[-1].removeprefix("meta-")
    return re.sub(r"-(instruct|it|base)(?=$|-)", "", name)


def shape_from_config(path: str | Path) -> ModelShape:
    """Read a Hugging Face config.json.

    Weight files beside it are not opened; where `model.safetensors.index.json` states their total
    size, that is taken, which is also what makes quantised weights countable.

    Raises:
        ConfigError: unreadable, not JSON, or fields missing.
        UnsupportedError: an architecture that vToken cannot run or this module cannot count.
    """
    path = Path(path)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            "--model", str(path), f"a readable config.json ({error.strerror})"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError("--model", str(path), f"a config.json that is JSON ({error})") from error
    if not isinstance(config, dict):
        raise ConfigError("--model", str(path), "a config.json that holds an object")
    file_bytes = _index_bytes(path.parent)
    if reason := refusal(config, weights_known=file_bytes is not None):
        raise UnsupportedError("--model", str(path), reason)
    return _shape(path, config, file_bytes)


def _shape(path: Path, config: dict, file_bytes: int | None) -> ModelShape:
    def number(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise ConfigError("--model", str(path), f"a config.json with a whole number in {key!r}")
        return value

    architecture = config["architectures"][0]
    heads, hidden = number("num_attention_heads"), number("hidden_size")
    tied = config.get("tie_word_embeddings")
    fields = {
        "architecture": architecture,
        "num_layers": number("num_hidden_layers"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": number("num_key_value_heads", heads),
        "head_size": number("head_dim", max(1, hidden // heads)),
        "intermediate_size": number("intermediate_size"),
        "vocab_size": number("vocab_size"),
        "tied_embeddings": architecture in _TIED_BY_DEFAULT if tied is None else bool(tied),
    }
    if heads % fields["num_kv_heads"]:
        allowed = "a config.json whose KV heads divide its attention heads"
        raise ConfigError("--model", str(path), allowed)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    dtype = dtype.removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ConfigError("--model", str(path), f"a dtype among {', '.join(DTYPE_BYTES)}")
    return ModelShape(
        name=str(config.get("_name_or_path") or path.resolve().parent.name),
        num_params=derived_num_params(fields, attention_bias=bool(config.get("attention_bias"))),
        max_model_len=number("max_position_embeddings", 2048),
        dtype=dtype,
        weights_file_bytes=file_bytes,
        **fields,
    )


def refusal(config: Mapping[str, object], *, weights_known: bool = False) -> str:
    """Say why a config.json cannot be planned for, or "" if it can."""
    architectures = config.get("architectures") or ["none"]
    name = architectures[0] if isinstance(architectures, list) else str(architectures)
    full = "vToken needs full attention with one KV cache in every layer"
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    prefixes = ("mamba", "ssm_", "linear_", "hybrid_", "attn_layer_", "full_attention_interval")
    # transformers fills in 4,096 where a Mistral config says nothing; models without say null.
    window = config.get("sliding_window", 4096 if name == "MistralForCausalLM" else None)
    if config.get("is_encoder_decoder"):
        return f"a decoder-only model; {name} is an encoder-decoder"
    if config.get("kv_lora_rank"):
        return f"another model: {name} has latent attention (MLA), which has no K and V per head"
    if config.get("text_config") or config.get("vision_config"):
        return f"a text model; {name} is multimodal"
    if any(key.startswith(prefixes) for key in config):
        return f"another model: {name} is a hybrid with state-space or linear layers; {full}"
    if kinds:
        return f"another model: {name} has layers of type {', '.join(sorted(kinds))}; {full}"
    if window and config.get("use_sliding_window", name != "Qwen2ForCausalLM"):
        return f"another model: {name} has a sliding window of {window} tokens; {full}"
    if config.get("attention_chunk_size"):
        return f"another model: {name} has chunked attention; {full}"
    if config.get("alibi") or config.get("position_embedding_type") == "alibi":
        return f"another model: {name} has ALiBi, which needs a token's physical distance"
    if config.get("num_kv_shared_layers"):
        return f"another model: {name} shares KV between layers; {full}"
    if any(config.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts")):
        return f"a dense model; the weights of a mixture of experts ({name}) are not counted here"
    if name not in ARCHITECTURES:
        return f"one of the architectures {', '.join(ARCHITECTURES)}, not {name}"
    if config.get("quantization_config") and not weights_known:
        return "quantised weights only with a model.safetensors.index.json that states their size"
    return ""


def _index_bytes(folder: Path) -> int | None:
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        total = index["metadata"]["total_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return int(total) if isinstance(total, (int, float)) and total > 0 else None

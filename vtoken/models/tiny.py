"""Tiny models with generated weights, for tests that must notice a misplaced KV entry.

Weights drawn as for training attend almost evenly: every token gets 1/L of every head, so a lost
or swapped KV entry moves the logits by less than the distance between the two best tokens and no
test of ours could see it. Three choices make these models sensitive (`tests/unit/test_models_tiny`
is the control):

* Q and K are scaled so that attention scores have a standard deviation of `_SCORE_STD`. A handful
  of tokens then share most of a head, differently in each head.
* Every block's output outweighs what the residual held before by `_OUTWEIGH`. Attention, not the
  token's own embedding, then decides what is next, and the gated MLP, which multiplies two inputs,
  enlarges a relative change instead of burying it.
* The last norm brings logits to a standard deviation of `_LOGIT_STD`: the next token does not
  depend on that scale, the float32 noise in log-probabilities does (measured: 2e-5 at most).

Swapping the K and V of two live tokens *together*, in every layer, changes nothing by design: keys
are cached after RoPE, so attention does not depend on where an entry lies. What must be seen is a
swap of one without the other, across requests, or an entry copied over another one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vtoken.models.tokenizer import TOKENIZER_FILES

_SEED = 20_250_207
_NUM_LAYERS, _NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM = 2, 8, 4, 32
_HIDDEN, _INTERMEDIATE = _NUM_HEADS * _HEAD_DIM, 512

_SCORE_STD = 3.0
_OUTWEIGH = 4.0
_BIAS_STD = 0.3
_LOGIT_STD = 1.0  # 3 would be a trained model's; float32 noise would then reach 6e-5
_PLAIN_STD = 0.02  # the usual initialisation, for the control test

_FAMILIES: dict[str, dict[str, Any]] = {
    "tiny-llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "tiny-mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": None,
    },
    "tiny-qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": False,
        "sliding_window": None,
    },
    "tiny-gemma": {
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
    },
}


def build(
    name: str,
    folder: Path,
    tokenizer_from: Path,
    say: Callable[[str], None],
    *,
    plain: bool = False,
) -> dict[str, Any]:
    """Write one tiny model into `folder`; return where it came from.

    Args:
        tokenizer_from: a model folder whose tokenizer and special token ids are taken over.
        plain: draw ordinary unscaled weights instead, which hide misplaced entries.
    """
    from safetensors.numpy import save_file

    say(f"generating {name}")
    for file in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_from / file, folder / file)
    donor = json.loads((tokenizer_from / "config.json").read_text())
    config = tiny_config(name, donor)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")
    weights = plain_weights(config) if plain else sharp_weights(config)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return {"source": f"generated from seed {_SEED}", "weights": "plain" if plain else "sharp"}


def tiny_config(name: str, donor: dict[str, Any]) -> dict[str, Any]:
    """Return the Hugging Face config of a tiny model; vocabulary and special ids from `donor`."""
    special = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    return {
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _NUM_LAYERS,
        "num_attention_heads": _NUM_HEADS,
        "num_key_value_heads": _NUM_KV_HEADS,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": 8192,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        **{key: donor[key] for key in special},
        **_FAMILIES[name],
    }


def sharp_weights(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Draw weights whose attention is selective and decides the next token."""
    draw = _Draw(config["model_type"])
    score_gain = np.sqrt(_SCORE_STD)  # on Q and on K each: scores then have _SCORE_STD
    weights = {"model.embed_tokens.weight": _embedding(config, draw, _embedding_std(config))}
    for layer in range(config["num_hidden_layers"]):
        gains = {
            "self_attn.q_proj": score_gain,
            "self_attn.k_proj": score_gain,
            "self_attn.v_proj": 1.0,
            "self_attn.o_proj": _OUTWEIGH ** (2 * layer + 1),
            "mlp.gate_proj": 1.0,
            "mlp.up_proj": 1.0,
            "mlp.down_proj": _OUTWEIGH ** (2 * layer + 2),
        }
        weights |= _layer(config, layer, draw, gains, bias_std=_BIAS_STD)
    # A state of H unit entries against embedding rows of entries e gives logits of e * sqrt(H).
    per_unit = _embedding_std(config) * np.sqrt(config["hidden_size"])
    weights["model.norm.weight"] = _norm(config, _LOGIT_STD / per_unit)
    return weights


def plain_weights(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Draw weights as for training: the control that shows why `sharp_weights` exist."""
    draw = _Draw(config["model_type"])
    weights = {"model.embed_tokens.weight": _embedding(config, draw, _PLAIN_STD)}
    for layer in range(config["num_hidden_layers"]):
        gains = {
            kind: _PLAIN_STD * np.sqrt(shape[1]) for kind, shape in _linear_shapes(config).items()
        }
        weights |= _layer(config, layer, draw, gains, bias_std=_PLAIN_STD)
    weights["model.norm.weight"] = _norm(config, 1.0)
    return weights


class _Draw:
    """Normal draws that stay the same for ever, which NumPy promises for RandomState only."""

    def __init__(self, family: str) -> None:
        self._rng = np.random.RandomState([_SEED, *family.encode()])

    def normal(self, shape: tuple[int, ...], std: float) -> np.ndarray:
        return (self._rng.standard_normal(shape) * std).astype(np.float32)


def _embedding(config: dict[str, Any], draw: _Draw, std: float) -> np.ndarray:
    return draw.normal((config["vocab_size"], config["hidden_size"]), std)


def _embedding_std(config: dict[str, Any]) -> float:
    """Return the embedding's spread that gives the first layer unit inputs."""
    # Gemma multiplies embeddings by sqrt(hidden_size) on the way in.
    return config["hidden_size"] ** -0.5 if config["model_type"] == "gemma" else 1.0


def _linear_shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    return {
        "self_attn.q_proj": (q_rows, hidden),
        "self_attn.k_proj": (kv_rows, hidden),
        "self_attn.v_proj": (kv_rows, hidden),
        "self_attn.o_proj": (hidden, q_rows),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }


def _layer(
    config: dict[str, Any], layer: int, draw: _Draw, gains: dict[str, float], bias_std: float
) -> dict[str, np.ndarray]:
    """Draw one decoder layer. A gain of 1 maps unit inputs to unit outputs."""
    prefix, weights = f"model.layers.{layer}.", {}
    for kind, shape in _linear_shapes(config).items():
        weights[f"{prefix}{kind}.weight"] = draw.normal(shape, gains[kind] / np.sqrt(shape[1]))
        if config["model_type"] == "qwen2" and kind.endswith(("q_proj", "k_proj", "v_proj")):
            weights[f"{prefix}{kind}.bias"] = draw.normal(shape[:1], bias_std)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{prefix}{norm}.weight"] = _norm(config, 1.0)
    return weights


def _norm(config: dict[str, Any], gain: float) -> np.ndarray:
    # Gemma multiplies by (1 + weight).
    stored = gain - 1.0 if config["model_type"] == "gemma" else gain
    return np.full(config["hidden_size"], stored, np.float32)

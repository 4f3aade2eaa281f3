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

from vtoken.models.store import write_model
from vtoken.models.tokenizer import TOKENIZER_FILES

_SEED = 20_250_207
_NUM_LAYERS, _NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM = 2, 8, 4, 32
_HIDDEN, _INTERMEDIATE = _NUM_HEADS * _HEAD_DIM, 512

_SCORE_STD = 3.0
_OUTWEIGH = 4.0
_BIAS_STD = 0.3
_LOGIT_STD = 1.0  # 3 would be a trained model's; float32 noise would then reach 6e-5

_FAMILIES: dict[str, dict[str, Any]] = {
    "tiny-llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "tiny-mistral": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None,
    },
    "tiny-qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
        "use_sliding_window": False, "sliding_window": None,
    },
    "tiny-gemma": {
        "architectures": ["GemmaForCausalLM"], "model_type": "gemma", "rms_norm_eps": 1e-6,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
    },
}  # fmt: skip


def build(
    name: str, tokenizer_from: Path, folder: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Write one tiny model into `folder`; return where it came from.

    Args:
        tokenizer_from: a model folder whose tokenizer and special token ids are taken over.
    """
    say(f"generating {name}")
    for file in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_from / file, folder / file)
    config = tiny_config(name, json.loads((tokenizer_from / "config.json").read_text()))
    write_model(folder, config, sharp_weights(config))
    return {"source": f"generated from seed {_SEED}"}


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
    is_gemma = config["model_type"] == "gemma"
    # The first layer's inputs get unit entries; Gemma multiplies embeddings by sqrt(hidden_size).
    embedding_std = config["hidden_size"] ** -0.5 if is_gemma else 1.0
    score_gain = np.sqrt(_SCORE_STD)  # on Q and on K each: scores then have _SCORE_STD

    def std(kind: str, layer: int, num_inputs: int) -> float:
        gains = {
            "q_proj": score_gain, "o_proj": _OUTWEIGH ** (2 * layer + 1),
            "k_proj": score_gain, "down_proj": _OUTWEIGH ** (2 * layer + 2),
        }  # fmt: skip
        # A gain of 1 maps unit inputs to unit outputs.
        return gains.get(kind, 1.0) / np.sqrt(num_inputs)

    # A state of H unit entries against embedding rows of entries e gives logits of e * sqrt(H).
    last_norm = _LOGIT_STD / (embedding_std * np.sqrt(config["hidden_size"]))
    return draw_weights(config, embedding_std, std, _BIAS_STD, last_norm)


def draw_weights(
    config: dict[str, Any],
    embedding_std: float,
    std: Callable[[str, int, int], float],
    bias_std: float,
    last_norm: float,
) -> dict[str, np.ndarray]:
    """Draw normal weights, the same for ever: NumPy promises that for RandomState only.

    Args:
        std: spread of a projection's weights, from its kind, layer and number of inputs.
        last_norm: what the last norm multiplies by.
    """
    rng = np.random.RandomState([_SEED, *config["model_type"].encode()])
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "self_attn.q_proj": (q_rows, hidden), "self_attn.k_proj": (kv_rows, hidden),
        "self_attn.v_proj": (kv_rows, hidden), "self_attn.o_proj": (hidden, q_rows),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip

    def normal(shape: tuple[int, ...], spread: float) -> np.ndarray:
        return (rng.standard_normal(shape) * spread).astype(np.float32)

    def norm(gain: float) -> np.ndarray:
        stored = gain - 1.0 if config["model_type"] == "gemma" else gain  # it adds 1
        return np.full(hidden, stored, np.float32)

    weights = {"model.embed_tokens.weight": normal((config["vocab_size"], hidden), embedding_std)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, shape in shapes.items():
            kind = name.split(".")[1]
            weights[f"{prefix}{name}.weight"] = normal(shape, std(kind, layer, shape[1]))
            if config["model_type"] == "qwen2" and kind in ("q_proj", "k_proj", "v_proj"):
                weights[f"{prefix}{name}.bias"] = normal(shape[:1], bias_std)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = norm(1.0)
    weights["model.norm.weight"] = norm(last_norm)
    return weights

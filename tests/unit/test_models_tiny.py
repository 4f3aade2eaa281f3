"""Control test: the tiny models notice a misplaced KV entry, ordinary random weights do not.

Every test that compares generated tokens of a tiny model leans on this one.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from vtoken.models import tiny

NAMES = ("tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-gemma")
NUM_TOKENS, NUM_PROMPTS, PAIRS_PER_PROMPT, CONTINUATION = 64, 8, 6, 6


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def plain_weights(config):
    """Weights drawn as for training: the control that shows why `sharp_weights` exist."""
    return tiny.draw_weights(config, 0.02, lambda kind, layer, num_inputs: 0.02, 0.02, 1.0)


@pytest.fixture(scope="module")
def plain_llama(tmp_path_factory, model_path):
    folder = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "sharp_weights", plain_weights)
        tiny.build("tiny-llama", model_path("smollm2-135m"), folder, lambda line: None)
    return load(folder)


def swap_both(k, v, i, j, other):
    k[:, [i, j]] = k[:, [j, i]]
    v[:, [i, j]] = v[:, [j, i]]


def swap_values(k, v, i, j, other):
    v[:, [i, j]] = v[:, [j, i]]


def overwrite(k, v, i, j, other):
    k[:, i], v[:, i] = k[:, j], v[:, j]


def take_from_other_request(k, v, i, j, other):
    k[:, i], v[:, i] = other.keys[0, :, j], other.values[0, :, j]


MISPLACEMENTS = (swap_values, overwrite, take_from_other_request)


@torch.no_grad()
def changed_fracs(model, misplacements):
    """For each misplacement: share of cases where the next token, and any of 6, changes.

    A case is a prompt and a pair of its positions. All cases of a prompt run as one batch, whose
    row 0 is left intact.
    """
    generator = torch.Generator().manual_seed(0)

    def prefilled():
        ids = torch.randint(100, 49_000, (1, NUM_TOKENS), generator=generator)
        return ids, model(ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values

    outcomes = {misplace: [] for misplace in misplacements}
    for _ in range(NUM_PROMPTS):
        (ids, cache), (_, other) = prefilled(), prefilled()
        pairs = [
            torch.randperm(NUM_TOKENS - 1, generator=generator)[:2].tolist()
            for _ in range(PAIRS_PER_PROMPT)
        ]
        cases = [(misplace, pair) for misplace in misplacements for pair in pairs]
        cache.batch_repeat_interleave(1 + len(cases))
        for layer, other_layer in zip(cache.layers, other.layers, strict=True):
            for row, (misplace, (i, j)) in enumerate(cases, start=1):
                misplace(layer.keys[row], layer.values[row], i, j, other_layer)
        intact, *broken = continuations(model, cache, ids[:, -1:].repeat(1 + len(cases), 1))
        for (misplace, _), tokens in zip(cases, broken, strict=True):
            outcomes[misplace].append((tokens[0] != intact[0], tokens != intact))
    return {misplace.__name__: np.mean(pairs, axis=0) for misplace, pairs in outcomes.items()}


def continuations(model, cache, token):
    tokens = []
    for _ in range(CONTINUATION):
        token = model(token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(token)
    return torch.cat(tokens, dim=1).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_misplaced_entries_change_the_output_and_moved_ones_do_not(model_path, name):
    changed = changed_fracs(load(model_path(name)), (*MISPLACEMENTS, swap_both))
    # Why relocation is legal: keys are stored rotated, so attention does not see where they lie.
    assert changed.pop("swap_both").tolist() == [0.0, 0.0]
    for misplacement, (_, any_of_six) in changed.items():
        assert any_of_six >= 0.85, (misplacement, any_of_six)
    next_token, _ = changed["swap_values"]
    assert next_token > 0.45


def test_ordinary_random_weights_hide_misplaced_entries(plain_llama):
    changed = changed_fracs(plain_llama, (swap_values, take_from_other_request))
    for misplacement, (_, any_of_six) in changed.items():
        assert any_of_six <= 0.2, (misplacement, any_of_six)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_float32_noise_is_below_the_tolerance_of_reference_tests(model_path, name):
    model = load(model_path(name))
    ids = torch.randint(100, 49_000, (1, 200), generator=torch.Generator().manual_seed(3))
    single = model(ids).logits.double().log_softmax(-1)
    double = model.double()(ids).logits.log_softmax(-1)
    best = double.argmax(-1, keepdim=True)
    assert (single - double).gather(-1, best).abs().max() < 3e-5


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_greedy_text_does_not_run_in_circles(model_path, name):
    model = load(model_path(name))
    ids = torch.randint(100, 49_000, (1, 8), generator=torch.Generator().manual_seed(1))
    output = model.generate(ids, max_new_tokens=48, do_sample=False, eos_token_id=None)
    assert len(set(output[0, 8:].tolist())) > 40


@pytest.mark.parametrize("name", NAMES)
def test_shape_and_attention(model_path, name):
    config = json.loads((model_path(name) / "config.json").read_text())
    keys = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    assert [config[key] for key in keys] == [2, 8, 4, 32]
    assert config["vocab_size"] == 49152
    assert config.get("sliding_window") is None
    model = load(model_path(name))
    assert type(model).__name__ == config["architectures"][0]
    if name == "tiny-qwen2":
        assert model.model.layers[1].self_attn.k_proj.bias.abs().min() > 0


def test_weights_are_fixed(model_path):
    """The same for ever: NumPy freezes RandomState's stream."""
    config = tiny.tiny_config(
        "tiny-llama", json.loads((model_path("smollm2-135m") / "config.json").read_text())
    )
    first, second = (tiny.sharp_weights({**config, "vocab_size": 8}) for _ in range(2))
    assert all(np.array_equal(first[key], second[key]) for key in first)
    embedding = first["model.embed_tokens.weight"]
    assert embedding[0, :3] == pytest.approx([-0.0988804, -0.7487063, -0.4865783], abs=1e-6)

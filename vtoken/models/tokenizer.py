"""Write a Hugging Face tokenizer from the tokenizer inside a GGUF file.

SmolLM2 uses a byte-level BPE in GPT-2's style with one difference: every digit is its own token
(llama.cpp calls this pre-tokenizer `smollm`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_CONTROL = 3  # llama.cpp's token type for special tokens
_NORMAL = 1

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Write `TOKENIZER_FILES` from GGUF metadata (name -> contents)."""
    assert fields["tokenizer.ggml.model"] == "gpt2", fields["tokenizer.ggml.model"]
    assert fields["tokenizer.ggml.pre"] == "smollm", fields["tokenizer.ggml.pre"]
    template = fields["tokenizer.chat_template"]
    files = {
        "tokenizer.json": json.dumps(_fast_tokenizer(fields), ensure_ascii=False),
        "tokenizer_config.json": json.dumps(_tokenizer_config(fields, template), indent=2),
        "chat_template.jinja": template,
    }
    for name in TOKENIZER_FILES:
        (folder / name).write_text(files[name], encoding="utf-8")


def _fast_tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert set(types) <= {_NORMAL, _CONTROL}, sorted(set(types))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [
        {"id": token_id, "content": tokens[token_id], **flags, "special": True}
        for token_id, kind in enumerate(types)
        if kind == _CONTROL
    ]
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True,
    }  # fmt: skip
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None,
            "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }  # fmt: skip


def _tokenizer_config(fields: dict[str, Any], template: str) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]

    def token(kind: str) -> str:
        return tokens[fields[f"tokenizer.ggml.{kind}_token_id"]]

    return {
        # Not GPT2Tokenizer: transformers 5 would rebuild GPT-2's own splitting, digits in groups.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "unk_token": token("unknown"),
        "add_bos_token": fields["tokenizer.ggml.add_bos_token"],
        "add_prefix_space": fields["tokenizer.ggml.add_space_prefix"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": template,
    }

"""The few things asked of a tokenizer, for any object with Hugging Face's encode and decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """What is needed of a tokenizer: a `transformers` one, or `tokenizers.Tokenizer`."""

    def encode(self, text: str, add_special_tokens: bool = True): ...

    def decode(self, ids: Sequence[int]) -> str: ...


def encode(tokenizer: Tokenizer, text: str, *, special: bool) -> list[int]:
    """Encode text, with or without the tokenizer's own special tokens (such as BOS)."""
    ids = tokenizer.encode(text, add_special_tokens=special)
    return list(getattr(ids, "ids", ids))


def leading_ids(tokenizer: Tokenizer) -> list[int]:
    """Special tokens that the tokenizer puts before a prompt: usually BOS or nothing."""
    plain = encode(tokenizer, "a", special=False)
    full = encode(tokenizer, "a", special=True)
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start]
    return []

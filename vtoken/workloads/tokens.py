"""The few things asked of a tokenizer, for any object with Hugging Face's encode and decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vtoken.errors import ConfigError


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


def chat_frame(tokenizer: Tokenizer) -> tuple[str, str]:
    """What the chat template puts before and after a single user turn.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """
    mark = "USER_TURN_GOES_HERE"
    rendered = render_chat(tokenizer, [{"role": "user", "content": mark}])
    before, _, after = rendered.partition(mark)
    return before, after


def render_chat(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> str:
    """Render a conversation with the tokenizer's chat template, ready for the next answer.

    The text already holds the special tokens: encode it with `special=False`.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("--chat-template", True, "off: this tokenizer has no chat template")
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

"""KV without a model: numbers that tell which token was computed from what.

A real key or value depends on the token, its position and everything the token attended to. Here
that dependence is a 64-bit number:

    content(token, position, attended) = mix(token, position, sum of the attended contents)

so two slots hold the same number exactly when a real cache would hold the same KV, in whatever
order the entries lie. A misplaced, stale or foreign entry changes every number computed from it.
The next token of a request is drawn from its newest content, so wrong KV also changes the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_BITS = (1 << 64) - 1
FIRST_TOKEN = 5  # sampled tokens are FIRST_TOKEN .. FIRST_TOKEN + VOCABULARY_SIZE - 1
VOCABULARY_SIZE = 11


def mix(token: int, position: int, attended_sum: int) -> int:
    """The KV of a token that attended to contents of this sum (modulo 2^64)."""
    x = (
        attended_sum + (token + 1) * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03
    ) & _BITS
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _BITS
    return x ^ (x >> 31)


def sample(content: int) -> int:
    """The token that a model would generate from the newest token's KV."""
    return FIRST_TOKEN + (content >> 17) % VOCABULARY_SIZE


def chunk_contents(tokens: Sequence[int], first_id: int, attended_sum: int) -> list[int]:
    """Contents of tokens computed together: each attends to the given sum and its predecessors."""
    contents = []
    for j, token in enumerate(tokens):
        content = mix(token, first_id + j, attended_sum)
        contents.append(content)
        attended_sum = (attended_sum + content) & _BITS
    return contents


def clean_contents(tokens: Sequence[int]) -> list[int]:
    """Contents of a sequence from which nothing was ever evicted: what a prefix hit must hold."""
    return chunk_contents(tokens, 0, 0)


def sum_of(contents: np.ndarray) -> int:
    """Sum modulo 2^64 of uint64 contents."""
    return int(contents.sum(dtype=np.uint64)) if len(contents) else 0


@dataclass(slots=True)
class Read:
    """What a request's attention saw in one step, before its own new tokens.

    Attributes:
        first_id, num_new_tokens: the step computed ids first_id .. first_id + num_new_tokens - 1.
        slots: int64[K], slots read; contents: uint64[K], what they held.
        sampled: the token drawn, None where more of the prompt is to come.
    """

    first_id: int
    num_new_tokens: int
    slots: np.ndarray
    contents: np.ndarray
    sampled: int | None = None

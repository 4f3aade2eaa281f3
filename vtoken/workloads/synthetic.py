"""Made-up workloads: random tokens, shared prefixes, needles in a haystack.

All are functions of their arguments: the same seed gives the same prompts on every machine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain

import numpy as np

from vtoken.errors import ConfigError
from vtoken.workloads.request import WorkloadRequest
from vtoken.workloads.texts import TextCorpus, check_lengths, cut_prompts, shipped_texts
from vtoken.workloads.tokens import Tokenizer, encode, leading_ids


def random_prompts(
    num: int,
    prompt_len: int,
    output_len: int,
    *,
    vocab_size: int,
    seed: int = 0,
    repeat: int = 0,
) -> list[WorkloadRequest]:
    """Prompts of random token ids; the first ones spell (repeat, index), so that no two agree.

    Raises:
        ConfigError: the vocabulary or the prompt is too small.
    """
    check_lengths(prompt_len, output_len)
    if vocab_size < 2:
        raise ConfigError("--vocab-size", vocab_size, "at least 2 ids")
    requests = []
    for index in range(num):
        rng = np.random.default_rng([seed, repeat, index])
        ids = rng.integers(vocab_size, size=prompt_len)
        name = _digits(repeat, vocab_size) + _digits(index, vocab_size)
        if len(name) > prompt_len:
            raise ConfigError("--prompt-len", prompt_len, f"at least {len(name)} tokens")
        ids[: len(name)] = name
        requests.append(
            WorkloadRequest(
                request_id=f"random-{repeat}-{index}", prompt_token_ids=ids.tolist(),
                prompt_len=prompt_len, output_len=output_len, dataset="random",
            )
        )  # fmt: skip
    return requests


def _digits(number: int, base: int) -> list[int]:
    """A self-delimiting spelling of a number: no spelling is the beginning of another."""
    digits = []
    while number:
        number, digit = divmod(number, base)
        digits.append(digit)
    # The count of digits, spelled in unary as 1...1 0, makes it self-delimiting in base 2 too.
    return [1] * len(digits) + [0] + digits


def shared_prefix_prompts(
    num: int,
    output_len: int,
    *,
    degree: int,
    prefix_len: int,
    suffix_len: int,
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
    seed: int = 0,
    repeat: int = 0,
) -> list[WorkloadRequest]:
    """Prompts in groups of `degree` that share their first `prefix_len` tokens and no more.

    Text with a tokenizer, random ids with a vocabulary size. Groups differ from the first block
    on, and so do the suffixes inside a group. Metadata: `group`, `prefix_len`.

    Raises:
        ConfigError: a degree below 1, lengths below 16 tokens, neither tokenizer nor vocabulary.
    """
    if degree < 1:
        raise ConfigError("--sharing-degree", degree, "at least 1 request per prefix")
    num_groups = -(-num // degree)

    def part(kind: str, count: int, length: int, salt: int) -> list[list[int]]:
        if tokenizer is not None:
            heads = [f"{kind} {repeat}.{i}, series {seed}.\n\n" for i in range(count)]
            cut = cut_prompts(
                tokenizer, TextCorpus(tokenizer, shipped_texts()), heads, length,
                output_len=output_len, order_seed=(seed, repeat, salt),
                request_ids=[str(i) for i in range(count)],
            )  # fmt: skip
        elif vocab_size is not None:
            cut = random_prompts(
                count, length, output_len, vocab_size=vocab_size, seed=2 * seed + salt,
                repeat=repeat,
            )  # fmt: skip
        else:
            raise ConfigError("--model", None, "a tokenizer or a vocabulary size")
        return [request.prompt_token_ids for request in cut]

    prefixes = part("Source", num_groups, prefix_len, 0)
    suffixes = part("Question", num, suffix_len, 1)
    requests = []
    for index in range(num):
        ids = prefixes[index // degree] + suffixes[index]
        requests.append(
            WorkloadRequest(
                request_id=f"shared-{repeat}-{index}", prompt_token_ids=ids, prompt_len=len(ids),
                prompt=None if tokenizer is None else tokenizer.decode(ids),
                output_len=output_len, dataset=f"shared-prefix-{degree}",
                metadata={"group": index // degree, "prefix_len": prefix_len},
            )
        )  # fmt: skip
    return requests


_KEYS = (
    "amber", "basalt", "cobalt", "coral", "ebony", "flint", "garnet", "indigo", "ivory", "jade",
    "lapis", "marble", "ochre", "onyx", "opal", "pearl", "quartz", "ruby", "saffron", "topaz",
)  # fmt: skip
DEPTHS_FRAC = (0.0, 0.25, 0.5, 0.75, 1.0)


def needle_prompts(
    tokenizer: Tokenizer,
    num: int,
    prompt_len: int,
    *,
    output_len: int = 16,
    seed: int = 0,
    repeat: int = 0,
) -> list[WorkloadRequest]:
    """Hide one fact in a long text and ask for it: exactly `prompt_len` tokens a prompt.

    Request i hides its needle between two sentences at depth `DEPTHS_FRAC[i % len]` (0 is the start
    of the text, 1 its end). `answers` holds the right number; metadata: `depth_frac`, `key`.

    Raises:
        ConfigError: a prompt too short for the question and the needle.
    """
    check_lengths(prompt_len, output_len)
    sentences, head = _Sentences(tokenizer, shipped_texts()), leading_ids(tokenizer)
    requests = []
    for index in range(num):
        rng = np.random.default_rng([seed, repeat, index])
        key = str(rng.permutation(_KEYS)[0])
        code = str(1_000_000 + int(rng.choice(9_000_000, 1, replace=False)[0]))
        opening, fact, question = (
            encode(tokenizer, text, special=False)
            for text in (
                f"Text {repeat}.{index}, series {seed}.\n\n",
                f" The secret code for {key} is {code}.",
                f"\n\nWhat is the secret code for {key}? Answer with the number.\nAnswer:",
            )
        )
        fixed = len(head) + len(opening) + len(question) + len(fact)
        if fixed > prompt_len:
            raise ConfigError("--prompt-len", prompt_len, f"at least {fixed} tokens for a needle")
        depth = DEPTHS_FRAC[index % len(DEPTHS_FRAC)]
        ids = head + opening + sentences.hide(rng, prompt_len - fixed, fact, depth) + question
        requests.append(
            WorkloadRequest(
                request_id=f"needle-{repeat}-{index}", prompt=tokenizer.decode(ids),
                prompt_token_ids=ids, prompt_len=prompt_len, output_len=output_len,
                answers=(code,), dataset="needle", metadata={"depth_frac": depth, "key": key},
            )
        )  # fmt: skip
    return requests


class _Sentences:
    """Texts as token lists of sentences, to build haystacks of an exact length from."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        # At the ends of sentences and of lines (a program has no sentences); the white space
        # stays with what follows it, which is how most vocabularies want it.
        parts = [s for text in texts for s in re.split(r"(?<=[.!?])(?=\s)|(?<=\n)", text)]
        ids = [encode(tokenizer, part, special=False) for part in parts]
        self._ids = [sentence for sentence in ids if sentence]
        if not self._ids:
            raise ConfigError("--dataset-path", f"{len(texts)} texts", "texts that are not empty")

    def hide(
        self, rng: np.random.Generator, num_tokens: int, fact: list[int], depth_frac: float
    ) -> list[int]:
        """Lay out `num_tokens` of haystack with the fact at the nearest sentence boundary."""
        # From the end backwards, so that the sentence that must be cut short is the first one.
        pieces, length, at = [], 0, int(rng.integers(len(self._ids)))
        while length < num_tokens:
            pieces.append(self._ids[at][-(num_tokens - length) :])
            length, at = length + len(pieces[-1]), (at - 1) % len(self._ids)
        pieces.reverse()
        bounds = np.cumsum([0] + [len(piece) for piece in pieces])
        place = int(np.abs(bounds - depth_frac * num_tokens).argmin())
        return [*chain(*pieces[:place]), *fact, *chain(*pieces[place:])]

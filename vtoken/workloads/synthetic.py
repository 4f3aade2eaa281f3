"""Made-up workloads: random tokens, shared prefixes, needles in a haystack.

All are functions of their arguments: the same seed gives the same prompts on every machine.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import numpy as np

from vtoken.errors import ConfigError
from vtoken.workloads.request import WorkloadRequest
from vtoken.workloads.texts import TextCorpus, check_lengths, cut_prompts, shipped_texts
from vtoken.workloads.tokens import Tokenizer, chat_frame, encode, leading_ids


def random_prompts(
    num: int,
    prompt_len: int,
    output_len: int,
    *,
    vocab_size: int,
    seed: int = 0,
    repeat: int = 0,
    forbidden_ids: Collection[int] = (),
) -> list[WorkloadRequest]:
    """Prompts of random token ids; the first ones spell (repeat, index), so that no two agree.

    Args:
        forbidden_ids: ids never used, such as the special tokens.

    Raises:
        ConfigError: the vocabulary or the prompt is too small.
    """
    check_lengths(prompt_len, output_len)
    allowed = np.setdiff1d(np.arange(vocab_size), np.fromiter(forbidden_ids, np.int64))
    if len(allowed) < 2:
        raise ConfigError("--vocab-size", vocab_size, "at least 2 ids that are not forbidden")
    requests = []
    for index in range(num):
        rng = np.random.default_rng([seed, repeat, index])
        ids = allowed[rng.integers(len(allowed), size=prompt_len)]
        name = _digits(repeat, len(allowed)) + _digits(index, len(allowed))
        if len(name) > prompt_len:
            raise ConfigError("--prompt-len", prompt_len, f"at least {len(name)} tokens")
        ids[: len(name)] = allowed[name]
        requests.append(
            WorkloadRequest(
                request_id=f"random-{repeat}-{index}",
                prompt_token_ids=ids.tolist(),
                prompt_len=prompt_len,
                output_len=output_len,
                dataset="random",
            )
        )
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
    texts: Sequence[str] | None = None,
    forbidden_ids: Collection[int] = (),
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
            corpus = TextCorpus(tokenizer, shipped_texts() if texts is None else texts)
            heads = [f"{kind} {repeat}.{i}, series {seed}.\n\n" for i in range(count)]
            cut = cut_prompts(
                tokenizer,
                corpus,
                heads,
                length,
                output_len=output_len,
                order_seed=(seed, repeat, salt),
                request_ids=[str(i) for i in range(count)],
            )
        elif vocab_size is not None:
            cut = random_prompts(
                count,
                length,
                output_len,
                vocab_size=vocab_size,
                seed=2 * seed + salt,
                repeat=repeat,
                forbidden_ids=forbidden_ids,
            )
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
                request_id=f"shared-{repeat}-{index}",
                prompt_token_ids=ids,
                prompt_len=len(ids),
                prompt=None if tokenizer is None else tokenizer.decode(ids),
                output_len=output_len,
                dataset=f"shared-prefix-{degree}",
                metadata={"group": index // degree, "prefix_len": prefix_len},
            )
        )
    return requests


_KEYS = (
    "amber", "basalt", "cobalt", "coral", "ebony", "flint", "garnet", "indigo", "ivory", "jade",
    "lapis", "marble", "ochre", "onyx", "opal", "pearl", "quartz", "ruby", "saffron", "topaz",
)  # fmt: skip


def needle_prompts(
    tokenizer: Tokenizer,
    num: int,
    prompt_len: int,
    *,
    output_len: int = 16,
    depths_frac: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    num_distractors: int = 0,
    seed: int = 0,
    repeat: int = 0,
    texts: Sequence[str] | None = None,
    chat_template: bool = False,
) -> list[WorkloadRequest]:
    """Hide one fact in a long text and ask for it: exactly `prompt_len` tokens a prompt.

    Request i hides its needle at depth `depths_frac[i % len]` (0 is the start of the text, 1 its
    end), between two sentences. Distractors are facts of the same form about other keys, spread
    evenly. `answers` holds the one right number; metadata: `depth_frac`, `key`. With a chat
    template, prompts share whatever the template puts first (a system message, often).

    Raises:
        ConfigError: a depth outside [0, 1], too many distractors, or a prompt too short for the
            question and the needles.
    """
    check_lengths(prompt_len, output_len)
    for depth in depths_frac:
        if not 0 <= depth <= 1:
            raise ConfigError("--needle-depth", depth, "a fraction from 0 to 1")
    if not 0 <= num_distractors < len(_KEYS):
        raise ConfigError("--num-distractors", num_distractors, f"from 0 to {len(_KEYS) - 1}")
    sentences = _Sentences(tokenizer, shipped_texts() if texts is None else texts)
    before, after = chat_frame(tokenizer) if chat_template else ("", "")
    head = encode(tokenizer, before, special=False) if before else leading_ids(tokenizer)
    requests = []
    for index in range(num):
        rng = np.random.default_rng([seed, repeat, index])
        keys, codes, facts = _draw_facts(tokenizer, rng, num_distractors + 1)
        opening = encode(tokenizer, f"Text {repeat}.{index}, series {seed}.\n\n", special=False)
        tail = encode(
            tokenizer, f"\n\nWhat is the secret code for {keys[0]}? Answer with the number.{after}"
            + ("" if chat_template else "\nAnswer:"), special=False,
        )  # fmt: skip
        fixed = len(head) + len(opening) + len(tail) + sum(map(len, facts))
        if fixed > prompt_len:
            raise ConfigError("--prompt-len", prompt_len, f"at least {fixed} tokens for a needle")
        depth = float(depths_frac[index % len(depths_frac)])
        depths = [depth] + [(i + 0.5) / num_distractors for i in range(num_distractors)]
        body = sentences.hide(rng, prompt_len - fixed, facts, depths)
        ids = head + opening + body + tail
        requests.append(
            WorkloadRequest(
                request_id=f"needle-{repeat}-{index}",
                prompt=tokenizer.decode(ids),
                prompt_token_ids=ids,
                prompt_len=prompt_len,
                output_len=output_len,
                answers=(codes[0],),
                dataset="needle" if not num_distractors else "needle-multikey",
                metadata={"depth_frac": depth, "key": keys[0]},
            )
        )
    return requests


def _draw_facts(
    tokenizer: Tokenizer, rng: np.random.Generator, count: int
) -> tuple[list[str], list[str], list[list[int]]]:
    """Draw `count` different (key, code) pairs and the token ids of the facts about them."""
    keys = rng.permutation(_KEYS)[:count].tolist()
    codes = [str(1_000_000 + code) for code in rng.choice(9_000_000, count, replace=False)]
    facts = [
        encode(tokenizer, f" The secret code for {key} is {code}.", special=False)
        for key, code in zip(keys, codes, strict=True)
    ]
    return keys, codes, facts


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
        self,
        rng: np.random.Generator,
        num_tokens: int,
        facts: list[list[int]],
        depths_frac: list[float],
    ) -> list[int]:
        """Lay out `num_tokens` of haystack with each fact at the nearest sentence boundary."""
        # From the end backwards, so that the sentence that must be cut short is the first one.
        pieces, length, at = [], 0, int(rng.integers(len(self._ids)))
        while length < num_tokens:
            pieces.append(self._ids[at][-(num_tokens - length) :])
            length, at = length + len(pieces[-1]), (at - 1) % len(self._ids)
        pieces.reverse()
        bounds = np.cumsum([0] + [len(piece) for piece in pieces])
        wanted = [int(np.abs(bounds - depth * num_tokens).argmin()) for depth in depths_frac]
        out: list[int] = []
        for place in range(len(pieces) + 1):
            for fact, where in zip(facts, wanted, strict=True):
                if where == place:
                    out += fact
            if place < len(pieces):
                out += pieces[place]
        return out

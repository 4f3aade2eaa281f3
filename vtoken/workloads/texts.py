"""Exact-length prompts cut from real text, no two of which share a first block.

Token ids are authoritative here: `prompt_len` is exact for `prompt_token_ids`, while the text is
their decoding and may encode to a different number.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

import numpy as np

from vtoken.errors import ConfigError
from vtoken.workloads.request import WorkloadRequest
from vtoken.workloads.tokens import Tokenizer, encode, leading_ids

MIN_PROMPT_TOKENS = 16


def shipped_texts() -> list[str]:
    """The original texts that come with the package, in the order of their names."""
    folder = resources.files("vtoken.workloads") / "prompts"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".txt"))
    assert names, "the package was installed without its prompt texts"
    return [(folder / name).read_text(encoding="utf-8") for name in names]


class TextCorpus:
    """Texts as one ring of token ids, with the places where a paragraph begins.

    Attributes:
        token_ids: int64[T], all texts, one after the other.
        starts: int64[P], index of the first token of each paragraph.

    Raises:
        ConfigError: the texts hold no tokens.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        pieces, starts, length = [], [], 0
        for text in texts:
            # Paragraph by paragraph: encoding a whole book at once trips tokenizers' warnings
            # about model lengths, and every slice shall begin where a reader would begin.
            for paragraph in text.replace("\r\n", "\n").split("\n\n"):
                if ids := paragraph.strip() and encode(
                    tokenizer, paragraph.strip("\n") + "\n\n", special=False
                ):
                    pieces.append(np.asarray(ids, dtype=np.int64))
                    starts.append(length)
                    length += len(ids)
        if not pieces:
            raise ConfigError("--dataset-path", f"{len(texts)} texts", "texts that are not empty")
        self.token_ids = np.concatenate(pieces)
        self.starts = np.asarray(starts, dtype=np.int64)

    def cut(self, paragraph: int, num_tokens: int) -> list[int]:
        """Take `num_tokens` from the beginning of a paragraph, going round at the end."""
        at = self.starts[paragraph % len(self.starts)] + np.arange(num_tokens)
        return self.token_ids[at % len(self.token_ids)].tolist()


def text_prompts(
    tokenizer: Tokenizer,
    num: int,
    prompt_len: int,
    *,
    output_len: int = 128,
    seed: int = 0,
    repeat: int = 0,
    texts: Sequence[str] | None = None,
) -> list[WorkloadRequest]:
    """Cut `num` prompts of exactly `prompt_len` tokens from texts.

    Each is an opening line that names (repeat, index) and a slice from the start of a paragraph
    drawn by (seed, repeat). The opening makes the first block of 16 tokens differ between any two
    prompts, of one repeat or of two, so no prompt hits the prefix cache of another.

    Args:
        prompt_len: tokens, the tokenizer's own BOS included.
        texts: what to cut from; the shipped texts if None.

    Raises:
        ConfigError: `prompt_len` leaves no room for prompts to differ, or the texts are empty.
    """
    corpus = TextCorpus(tokenizer, shipped_texts() if texts is None else texts)
    openings = [f"Text {repeat}.{index}, series {seed}.\n\n" for index in range(num)]
    return cut_prompts(
        tokenizer, corpus, openings, prompt_len, output_len=output_len, order_seed=(seed, repeat),
        request_ids=[f"text-{repeat}-{index}" for index in range(num)],
    )  # fmt: skip


def cut_prompts(
    tokenizer: Tokenizer,
    corpus: TextCorpus,
    openings: Sequence[str],
    prompt_len: int,
    *,
    output_len: int,
    order_seed: tuple[int, ...],
    request_ids: Sequence[str],
) -> list[WorkloadRequest]:
    """Cut one prompt of exactly `prompt_len` tokens behind each opening."""
    check_lengths(prompt_len, output_len)
    bos = leading_ids(tokenizer)
    order = np.random.default_rng(list(order_seed)).permutation(len(corpus.starts))
    requests, first_blocks = [], set()
    for index, (opening, request_id) in enumerate(zip(openings, request_ids, strict=True)):
        head = bos + encode(tokenizer, opening, special=False)
        body = corpus.cut(int(order[index % len(order)]), max(0, prompt_len - len(head)))
        ids = (head + body)[:prompt_len]
        first_blocks.add(tuple(ids[:MIN_PROMPT_TOKENS]))
        requests.append(
            WorkloadRequest(
                request_id=request_id, prompt=tokenizer.decode(ids), prompt_token_ids=ids,
                prompt_len=prompt_len, output_len=output_len, dataset="text",
            )
        )  # fmt: skip
    if len(first_blocks) < len(requests):
        raise ConfigError(
            "--model", type(tokenizer).__name__,
            "a tokenizer that tells numbers apart: some prompts begin with the same 16 tokens",
        )  # fmt: skip
    return requests


def check_lengths(prompt_len: int, output_len: int) -> None:
    """Refuse lengths that no distinct prompt can have.

    Raises:
        ConfigError: too short.
    """
    if prompt_len < MIN_PROMPT_TOKENS:
        allowed = f"at least {MIN_PROMPT_TOKENS} tokens, so that prompts can differ"
        raise ConfigError("--prompt-len", prompt_len, allowed)
    if output_len < 1:
        raise ConfigError("--output-len", output_len, "at least 1 token")

"""Prompts that are cut or made up: exact lengths, no shared first block, same on every machine."""

from __future__ import annotations

import pytest

from vtoken.errors import ConfigError
from vtoken.workloads import (
    needle_prompts,
    random_prompts,
    shared_prefix_prompts,
    shipped_texts,
    text_prompts,
)
from vtoken.workloads.synthetic import _digits
from vtoken.workloads.texts import TextCorpus

BLOCK = 16


@pytest.fixture(scope="module")
def bpe():
    """A byte-level BPE, as the tokenizers of Llama, Qwen and SmolLM2 are."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False, special_tokens=["<s>"],
    )  # fmt: skip
    tokenizer.train_from_iterator(shipped_texts()[:3], trainer)
    return tokenizer


class Bytes:
    """One token a byte, after a BOS."""

    BOS = 256

    def encode(self, text, add_special_tokens=True):
        return [self.BOS] * add_special_tokens + list(text.encode())

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")


def first_blocks(requests) -> set[tuple[int, ...]]:
    return {tuple(r.prompt_token_ids[:BLOCK]) for r in requests}


def test_shipped_texts_are_many_and_long():
    texts = shipped_texts()
    assert len(texts) >= 8
    assert all(500 < len(text.split()) < 2500 for text in texts)
    assert all(text.isascii() for text in texts)


@pytest.mark.parametrize("prompt_len", [16, 17, 256, 1000, 40_000])
def test_text_prompts_have_exactly_the_length(bpe, prompt_len):
    for request in text_prompts(bpe, 3, prompt_len):
        assert request.prompt_len == len(request.prompt_token_ids) == prompt_len
    assert len(text_prompts(Bytes(), 2, prompt_len)[1].prompt_token_ids) == prompt_len


def test_no_two_prompts_share_a_first_block(bpe):
    requests = [r for repeat in range(4) for r in text_prompts(bpe, 150, 64, repeat=repeat)]
    assert len(first_blocks(requests)) == len({r.request_id for r in requests}) == 600


def test_text_prompts_depend_on_their_arguments_alone(bpe):
    again = text_prompts(bpe, 4, 100, seed=5, repeat=2)
    assert text_prompts(bpe, 4, 100, seed=5, repeat=2) == again
    # A larger batch begins with the smaller one: raising the concurrency keeps the prompts.
    assert text_prompts(bpe, 9, 100, seed=5, repeat=2)[:4] == again
    assert not first_blocks(again) & first_blocks(text_prompts(bpe, 4, 100, seed=6, repeat=2))
    bodies = {r.prompt.split("\n\n", 1)[1] for r in again}
    other = {r.prompt.split("\n\n", 1)[1] for r in text_prompts(bpe, 4, 100, seed=5, repeat=3)}
    assert len(bodies) == 4 and bodies != other


def test_text_prompts_start_with_bos_where_the_model_does():
    request = text_prompts(Bytes(), 1, 40)[0]
    assert request.prompt_token_ids[0] == Bytes.BOS
    assert request.prompt_token_ids.count(Bytes.BOS) == 1


def test_text_prompts_are_cut_from_the_users_texts(bpe):
    request = text_prompts(bpe, 1, 60, texts=["only this sentence here.\n\n\n  \n\n"])[0]
    assert request.prompt.count("only this sentence here.") > 2  # goes round
    corpus = TextCorpus(Bytes(), ["ab\n\ncd"])  # 8 tokens: each paragraph and its blank line
    assert bytes(corpus.cut(0, 18)) == b"ab\n\ncd\n\nab\n\ncd\n\nab"
    assert bytes(corpus.cut(1, 9)) == b"cd\n\nab\n\nc" == bytes(corpus.cut(3, 9))
    with pytest.raises(ConfigError, match="texts that are not empty"):
        text_prompts(bpe, 1, 60, texts=["", " \n\n "])


def test_impossible_prompts_are_refused(bpe):
    with pytest.raises(ConfigError, match="--prompt-len 15: at least 16"):
        text_prompts(bpe, 1, 15)
    with pytest.raises(ConfigError, match="--output-len 0"):
        text_prompts(bpe, 1, 20, output_len=0)

    class Deaf(Bytes):
        def encode(self, text, add_special_tokens=True):
            return [7] * len(text)

    with pytest.raises(ConfigError, match="tells numbers apart"):
        text_prompts(Deaf(), 2, 64)


def test_random_prompts():
    requests = [
        r for repeat in range(3)
        for r in random_prompts(50, 32, 8, vocab_size=100, repeat=repeat)
    ]  # fmt: skip
    assert {len(r.prompt_token_ids) for r in requests} == {32}
    used = {i for r in requests for i in r.prompt_token_ids}
    assert used == set(range(100))
    assert len(first_blocks(requests)) == 150
    # By construction, not by luck: even in a tiny vocabulary they spell (repeat, index).
    tiny = [r for k in range(4) for r in random_prompts(64, 16, 1, vocab_size=4, repeat=k)]
    assert len(first_blocks(tiny)) == 256
    for base in (2, 3, 10):
        spelled = [tuple(_digits(number, base)) for number in range(40)]
        assert max(max(s) for s in spelled) < base
        for i, one in enumerate(spelled):
            assert not any(other[: len(one)] == one for other in spelled[i + 1 :] + spelled[:i])
    with pytest.raises(ConfigError, match="--vocab-size 1"):
        random_prompts(1, 32, 1, vocab_size=1)


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("kind", ["text", "random"])
def test_shared_prefixes(bpe, degree, kind):
    source = {"tokenizer": bpe} if kind == "text" else {"vocab_size": 1000}
    requests = shared_prefix_prompts(8, 4, degree=degree, prefix_len=48, suffix_len=32, **source)
    assert len(requests) == 8
    prefixes = [tuple(r.prompt_token_ids[:48]) for r in requests]
    for i in range(8):
        assert requests[i].metadata["group"] == i // degree
        for j in range(i):
            assert (prefixes[i] == prefixes[j]) == (i // degree == j // degree)
    assert len({p[:BLOCK] for p in prefixes}) == 8 // degree
    assert len({tuple(r.prompt_token_ids[48 : 48 + BLOCK]) for r in requests}) == 8
    assert {r.prompt_len for r in requests} == {80}
    # A suffix is not the prefix over again.
    assert all(r.prompt_token_ids[48:] != r.prompt_token_ids[:32] for r in requests)


def test_shared_prefix_refusals(bpe):
    with pytest.raises(ConfigError, match="--sharing-degree 0"):
        shared_prefix_prompts(2, 1, degree=0, prefix_len=32, suffix_len=32, tokenizer=bpe)
    with pytest.raises(ConfigError, match="a tokenizer or a vocabulary size"):
        shared_prefix_prompts(2, 1, degree=1, prefix_len=32, suffix_len=32)


def test_needles_sit_where_they_should(bpe):
    requests = needle_prompts(bpe, 10, 1500)
    assert len(first_blocks(requests)) == 10
    for request in requests:
        assert len(request.prompt_token_ids) == 1500
        fact = f"The secret code for {request.metadata['key']} is {request.answers[0]}."
        assert request.prompt.count(fact) == 1
        assert request.prompt.count(request.answers[0]) == 1  # no other place gives it away
        assert request.prompt.endswith("Answer with the number.\nAnswer:")
        place = request.prompt.index(fact) / len(request.prompt)
        assert place == pytest.approx(request.metadata["depth_frac"], abs=0.07)


def test_needle_refusals(bpe):
    with pytest.raises(ConfigError, match="--prompt-len 20: at least [0-9]+ tokens for a needle"):
        needle_prompts(bpe, 1, 20)
    # Exactly the least length works: a needle and no haystack.
    with pytest.raises(ConfigError) as error:
        needle_prompts(bpe, 1, 20)
    least = int(error.value.allowed.split()[2])
    assert len(needle_prompts(bpe, 1, least)[0].prompt_token_ids) == least

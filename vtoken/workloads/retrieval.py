"""Made-up questions with known answers about long contexts: key-value pairs, lines, documents.

Forms after Liu et al. (Lost in the Middle: key-value retrieval, multi-document questions) and Li
et al. (LongChat: line retrieval), in plain words that small models can follow, and with as many
items as fit into the prompt. All are functions of their arguments. `needle_prompts`, the fourth
task, is in synthetic.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vtoken.errors import ConfigError
from vtoken.workloads.request import WorkloadRequest
from vtoken.workloads.texts import check_lengths
from vtoken.workloads.tokens import Tokenizer, encode, leading_ids

_ADJECTIVES = (
    "amber", "brave", "calm", "dusty", "early", "faint", "gentle", "hollow", "icy", "jolly",
    "keen", "lucky", "mellow", "narrow", "old", "plain", "quiet", "rusty", "silent", "tall",
)  # fmt: skip
_NOUNS = (
    "anchor", "barrel", "candle", "drawer", "engine", "fiddle", "garden", "hammer", "island",
    "jacket", "kettle", "ladder", "mirror", "needle", "orchard", "pillow", "quarry", "ribbon",
    "saddle", "turnip",
)  # fmt: skip
_NAMES = (
    "Alda", "Bruno", "Celia", "Dario", "Edith", "Felix", "Greta", "Hugo", "Irma", "Jonas",
    "Klara", "Linus", "Magda", "Nils", "Olga", "Paul", "Rosa", "Sven", "Thea", "Viktor",
)  # fmt: skip
_TRADES = (
    "baker", "carpenter", "doctor", "farmer", "gardener", "painter", "printer", "sailor",
    "tailor", "teacher", "weaver", "potter",
)  # fmt: skip
_TOWNS = (
    "Arnfeld", "Bellmoor", "Corvale", "Dunwick", "Elmstead", "Farlow", "Glenby", "Harrowgate",
    "Ilverton", "Kestrel", "Lindale", "Marbrook", "Northam", "Oakhurst", "Penrow", "Ravenby",
)  # fmt: skip
_HABITS = (
    "{he} gets up before the sun and walks along the river.",
    "On market days {he} sells apples from the old tree behind the house.",
    "In winter {he} mends nets and tells stories to the children.",
    "{he} keeps two dogs, and both of them are afraid of geese.",
    "Every spring {he} paints the gate, always in another colour.",
)


def key_value_prompts(
    tokenizer: Tokenizer,
    num: int,
    prompt_len: int,
    *,
    output_len: int = 12,
    seed: int = 0,
    repeat: int = 0,
) -> list[WorkloadRequest]:
    """Pairs of a two-word key and a number; the value of one key is asked for.

    Raises:
        ConfigError: the prompt is too short for one pair and the question.
    """  # fmt: skip

    def item(rng: np.random.Generator, taken: set) -> tuple[str, str, str]:
        key = _draw(rng, taken, lambda: f"{rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}")
        value = str(rng.integers(10_000, 100_000))
        return f"{key}: {value}\n", key, value

    return _prompts(
        "key-value", "Look up the value of a key in this list.\n\n", item,
        lambda key: f"\nThe value of {key} is\n{key}:", tokenizer, num, prompt_len,
        output_len, seed, repeat,
    )  # fmt: skip


def line_prompts(
    tokenizer: Tokenizer,
    num: int,
    prompt_len: int,
    *,
    output_len: int = 12,
    seed: int = 0,
    repeat: int = 0,
) -> list[WorkloadRequest]:
    """Numbered registers, each with a content; the content of one line is asked for.

    Raises:
        ConfigError: the prompt is too short for one line and the question.
    """  # fmt: skip

    def item(rng: np.random.Generator, taken: set) -> tuple[str, str, str]:
        line = _draw(rng, taken, lambda: str(rng.integers(100, 1000)))
        value = str(rng.integers(10_000, 100_000))
        return f"line {line}: REGISTER_CONTENT is <{value}>\n", line, value

    return _prompts(
        "lines", "Below is a record of lines. Remember the content of each line.\n\n", item,
        lambda line: f"\nTell the content again.\nline {line}: REGISTER_CONTENT is <", tokenizer,
        num, prompt_len, output_len, seed, repeat,
    )  # fmt: skip


def multidoc_prompts(
    tokenizer: Tokenizer,
    num: int,
    prompt_len: int,
    *,
    output_len: int = 12,
    seed: int = 0,
    repeat: int = 0,
) -> list[WorkloadRequest]:
    """Short documents about people, each with a town; where one of them lives is asked for.

    Raises:
        ConfigError: the prompt is too short for one document and the question.
    """  # fmt: skip

    def item(rng: np.random.Generator, taken: set) -> tuple[str, str, str]:
        name = _draw(rng, taken, lambda: f"{rng.choice(_NAMES)} the {rng.choice(_TRADES)}")
        town = str(rng.choice(_TOWNS))
        habits = " ".join(str(h).format(he=name.split()[0]) for h in rng.permutation(_HABITS)[:2])
        return f"Document: {name}\n{name} lives in {town}. {habits}\n\n", name, town

    return _prompts(
        "multidoc", "Answer the question from the documents.\n\n", item,
        lambda name: f"Question: Where does {name} live?\nAnswer: {name} lives in", tokenizer, num,
        prompt_len, output_len, seed, repeat,
    )  # fmt: skip


def _draw(rng: np.random.Generator, taken: set, make: Callable[[], str]) -> str:
    """A name that has not been drawn yet."""
    for _ in range(1000):
        name = make()
        if name not in taken:
            taken.add(name)
            return name
    raise ConfigError("--prompt-len", len(taken), "fewer items: there are no further names")


def _prompts(
    dataset: str,
    head: str,
    item: Callable[[np.random.Generator, set], tuple[str, str, str]],
    question: Callable[[str], str],
    tokenizer: Tokenizer,
    num: int,
    prompt_len: int,
    output_len: int,
    seed: int,
    repeat: int,
) -> list[WorkloadRequest]:
    """Prompts of at most `prompt_len` tokens with as many items as fit; the asked one by turns."""
    check_lengths(prompt_len, output_len)
    requests = []
    for index in range(num):
        rng = np.random.default_rng([seed, repeat, index])
        requests.append(
            _one(
                dataset, f"Series {seed}.{repeat}.{index}. {head}", item, question, tokenizer,
                prompt_len, output_len, rng, index, f"{dataset}-{repeat}-{index}",
            )
        )  # fmt: skip
    return requests


_PLACES_FRAC = (0.0, 0.25, 0.5, 0.75, 1.0)


def _one(
    dataset, head, item, question, tokenizer, prompt_len, output_len, rng, index, request_id
) -> WorkloadRequest:  # fmt: skip
    taken: set[str] = set()
    items: list[tuple[str, str, str]] = []
    start = leading_ids(tokenizer) + encode(tokenizer, head, special=False)
    # All questions are about as long: the first item's is measured, with a little room.
    first = item(rng, taken)
    room = prompt_len - len(start) - len(encode(tokenizer, question(first[1]), special=False)) - 4
    used, candidate = 0, first
    while True:
        length = len(encode(tokenizer, candidate[0], special=False))
        if used + length > room:
            break
        items.append(candidate)
        used += length
        candidate = item(rng, taken)
    if not items:
        raise ConfigError("--prompt-len", prompt_len, f"more tokens for one item of {dataset}")
    place = _PLACES_FRAC[index % len(_PLACES_FRAC)]
    _, key, value = items[round(place * (len(items) - 1))]
    body: list[int] = []
    for text, _, _ in items:
        body += encode(tokenizer, text, special=False)
    ids = start + body + encode(tokenizer, question(key), special=False)
    return WorkloadRequest(
        request_id=request_id, prompt=tokenizer.decode(ids), prompt_token_ids=ids,
        prompt_len=len(ids), output_len=output_len, answers=(value,), dataset=dataset,
        metadata={"key": key, "num_items": len(items), "depth_frac": place},
    )  # fmt: skip


def answered(output: str, answers: Sequence[str]) -> bool:
    """Whether an output contains one of the answers, case and spacing apart.

    The measure of Lost in the Middle ("best subspan exact match"), without dropping articles.
    """
    said = " ".join(output.casefold().split())
    return any(" ".join(answer.casefold().split()) in said for answer in answers)

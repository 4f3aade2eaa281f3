"""Made-up questions with known answers about long contexts: key-value pairs, lines, documents.

Forms after Liu et al. (Lost in the Middle: key-value retrieval, multi-document questions) and Li
et al. (LongChat: line retrieval), in plain words that small models can follow, and with as many
items as fit into the prompt. All are functions of their arguments. `needle_prompts`, the fourth
task, is in synthetic.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from vtoken.errors import ConfigError
from vtoken.workloads.request import WorkloadRequest
from vtoken.workloads.synthetic import DEPTHS_FRAC
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


Item = tuple[str, str, str]  # what stands in the prompt, the key that is asked for, the answer


@dataclass(frozen=True, kw_only=True)
class _Form:
    """A task: what its prompts begin with, one item of it, the question about a key."""

    head: str
    item: Callable[[np.random.Generator, set], Item]
    question: Callable[[str], str]


def _draw(rng: np.random.Generator, taken: set, make: Callable[[], str]) -> str:
    """A name that has not been drawn yet."""
    for _ in range(1000):
        name = make()
        if name not in taken:
            taken.add(name)
            return name
    raise ConfigError("--prompt-len", len(taken), "fewer items: there are no further names")


def _pair(rng: np.random.Generator, taken: set) -> Item:
    key = _draw(rng, taken, lambda: f"{rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}")
    value = str(rng.integers(10_000, 100_000))
    return f"{key}: {value}\n", key, value


def _line(rng: np.random.Generator, taken: set) -> Item:
    line = _draw(rng, taken, lambda: str(rng.integers(100, 1000)))
    value = str(rng.integers(10_000, 100_000))
    return f"line {line}: REGISTER_CONTENT is <{value}>\n", line, value


def _document(rng: np.random.Generator, taken: set) -> Item:
    name = _draw(rng, taken, lambda: f"{rng.choice(_NAMES)} the {rng.choice(_TRADES)}")
    town = str(rng.choice(_TOWNS))
    habits = " ".join(str(h).format(he=name.split()[0]) for h in rng.permutation(_HABITS)[:2])
    return f"Document: {name}\n{name} lives in {town}. {habits}\n\n", name, town


_FORMS = {
    "key-value": _Form(
        head="Look up the value of a key in this list.\n\n", item=_pair,
        question=lambda key: f"\nThe value of {key} is\n{key}:",
    ),
    "lines": _Form(
        head="Below is a record of lines. Remember the content of each line.\n\n", item=_line,
        question=lambda line: f"\nTell the content again.\nline {line}: REGISTER_CONTENT is <",
    ),
    "multidoc": _Form(
        head="Answer the question from the documents.\n\n", item=_document,
        question=lambda name: f"Question: Where does {name} live?\nAnswer: {name} lives in",
    ),
}  # fmt: skip


def retrieval_prompts(
    task: str,
    tokenizer: Tokenizer,
    num: int,
    prompt_len: int,
    *,
    output_len: int = 12,
    seed: int = 0,
    repeat: int = 0,
) -> list[WorkloadRequest]:
    """Prompts of at most `prompt_len` tokens with as many items as fit; the asked one by turns.

    Args:
        task: `key-value` (two words and a number), `lines` (numbered registers and a content) or
            `multidoc` (short documents about people, each with a town).

    Raises:
        ConfigError: the prompt is too short for one item and the question.
    """
    check_lengths(prompt_len, output_len)
    requests = []
    for index in range(num):
        rng = np.random.default_rng([seed, repeat, index])
        opening = f"Series {seed}.{repeat}.{index}. {_FORMS[task].head}"
        place = DEPTHS_FRAC[index % len(DEPTHS_FRAC)]
        ids, key, value, num_items = _one(tokenizer, task, opening, prompt_len, rng, place)
        requests.append(
            WorkloadRequest(
                request_id=f"{task}-{repeat}-{index}", prompt=tokenizer.decode(ids),
                prompt_token_ids=ids, prompt_len=len(ids), output_len=output_len,
                answers=(value,), dataset=task,
                metadata={"key": key, "num_items": num_items, "depth_frac": place},
            )
        )  # fmt: skip
    return requests


key_value_prompts = partial(retrieval_prompts, "key-value")
line_prompts = partial(retrieval_prompts, "lines")
multidoc_prompts = partial(retrieval_prompts, "multidoc")


def _one(
    tokenizer: Tokenizer, task: str, opening: str, prompt_len: int, rng, place: float
) -> tuple[list[int], str, str, int]:
    """(token ids, key asked for, answer, number of items) of one prompt."""
    form, taken = _FORMS[task], set()

    def ids_of(text: str) -> list[int]:
        return encode(tokenizer, text, special=False)

    start, body = leading_ids(tokenizer) + ids_of(opening), []
    items: list[Item] = []
    candidate = form.item(rng, taken)
    # All questions are about as long: the first item's is measured, with a little room.
    room = prompt_len - len(start) - len(ids_of(form.question(candidate[1]))) - 4
    while len(body) + len(ids := ids_of(candidate[0])) <= room:
        items.append(candidate)
        body += ids
        candidate = form.item(rng, taken)
    if not items:
        raise ConfigError("--prompt-len", prompt_len, f"more tokens for one item of {task}")
    _, key, value = items[round(place * (len(items) - 1))]
    return start + body + ids_of(form.question(key)), key, value, len(items)


def answered(output: str, answers: Sequence[str]) -> bool:
    """Whether an output contains one of the answers, case and spacing apart.

    The measure of Lost in the Middle ("best subspan exact match"), without dropping articles.
    """
    said = " ".join(output.casefold().split())
    return any(" ".join(answer.casefold().split()) in said for answer in answers)

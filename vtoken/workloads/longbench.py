"""Questions about long contexts (LongBench-style JSONL), and plain JSONL prompts.

LongBench rows: {"_id", "dataset", "input", "context", "answers": [...], ...}; further fields are
kept as metadata (a `context_id`, say, that marks rows with the same context). Prompt rows are
those of vLLM's custom dataset: {"prompt": text, "output_tokens": n}; a list "turns" counts as its
first entry (MT-Bench).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from vtoken.workloads.chat import NO_BOUNDS, LengthBounds, no_usable_rows, shuffled_rows, unique_ids
from vtoken.workloads.files import bad_row, read_json_rows
from vtoken.workloads.request import WorkloadRequest, take
from vtoken.workloads.tokens import Tokenizer, encode


def load_longbench(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    num: int | None = None,
    seed: int | None = None,
    output_len: int = 64,
    bounds: LengthBounds = NO_BOUNDS,
) -> list[WorkloadRequest]:
    """Read questions about long contexts as requests with known answers.

    The context comes first, so rows with the same context share a prefix. Rows outside `bounds`
    are left out, never truncated: a cut could remove the answer.

    Raises:
        ConfigError: a row lacks a field, no row is usable, or fewer than `num` are.
    """
    path = Path(path)

    def fill(line: int, row: dict) -> tuple[str, int, tuple[str, ...], dict]:
        context, question, answers = (row.get(key) for key in ("context", "input", "answers"))
        if not isinstance(context, str) or not isinstance(question, str):
            raise bad_row(path, line, 'an object with texts "context" and "input"')
        if not isinstance(answers, list) or not all(isinstance(a, str) for a in answers):
            raise bad_row(path, line, 'an object with "answers", a list of texts')
        rest = {k: v for k, v in row.items() if k not in ("context", "input", "answers")}
        text = f"{context}\n\n{question}\nAnswer:"
        return text, output_len, tuple(answers), rest | {"question": question}

    return _load(path, tokenizer, fill, num, seed, bounds)


def load_prompts(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    num: int | None = None,
    seed: int | None = None,
    output_len: int | None = None,
    bounds: LengthBounds = NO_BOUNDS,
) -> list[WorkloadRequest]:
    """Read JSONL rows with a "prompt" (or "turns") as requests.

    Args:
        output_len: tokens to generate; None takes the row's "output_tokens", or 128.

    Raises:
        ConfigError: a row lacks a prompt, no row is usable, or fewer than `num` are.
    """
    path = Path(path)

    def fill(line: int, row: dict) -> tuple[str, int, tuple[str, ...], dict]:
        turns = row.get("turns")
        text = row.get("prompt", turns[0] if isinstance(turns, list) and turns else None)
        if not isinstance(text, str):
            raise bad_row(path, line, 'an object with a text "prompt" or a list "turns"')
        length = row.get("output_tokens", 128) if output_len is None else output_len
        if type(length) is not int or length < 1:
            raise bad_row(path, line, '"output_tokens" of at least 1, a whole number')
        rest = {k: v for k, v in row.items() if k not in ("prompt", "output_tokens")}
        return text, length, (), rest

    return _load(path, tokenizer, fill, num, seed, bounds)


def context_texts(path: str | Path) -> list[str]:
    """The distinct contexts or prompts of a file, as text to cut prompts from.

    Raises:
        ConfigError: a line is not JSON, or a row has neither field.
    """
    path = Path(path)
    texts: dict[str, None] = {}
    for line, row in read_json_rows(path):
        turns = row.get("turns")
        text = row.get("context", row.get("prompt", turns[0] if turns else None))
        if not isinstance(text, str):
            raise bad_row(path, line, 'an object with a text "context" or "prompt"')
        texts[text] = None
    return list(texts)


def _load(
    path: Path,
    tokenizer: Tokenizer,
    fill: Callable[[int, dict], tuple[str, int, tuple[str, ...], dict]],
    num: int | None,
    seed: int | None,
    bounds: LengthBounds,
) -> list[WorkloadRequest]:
    rows = shuffled_rows(path, seed)
    rejected: Counter[str] = Counter()

    def usable() -> Iterator[WorkloadRequest]:
        for line, row in rows:
            text, length, answers, rest = fill(line, row)
            ids = encode(tokenizer, text, special=True)
            if why := bounds.reject(len(ids), length):
                rejected[why] += 1
                continue
            name = row.get("_id", row.get("task_id", row.get("question_id", f"{path.stem}-{line}")))
            yield WorkloadRequest(
                request_id=str(name), prompt=text, prompt_token_ids=ids, prompt_len=len(ids),
                output_len=length, answers=answers, dataset=str(row.get("dataset", path.stem)),
                metadata=rest,
            )  # fmt: skip

    requests = take(unique_ids(usable()), num, str(path))
    if not requests:
        raise no_usable_rows(path, len(rows), rejected)
    return requests

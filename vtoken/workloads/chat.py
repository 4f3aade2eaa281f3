"""Conversations in ShareGPT form: a JSON list of {"conversations": [{"from", "value"}, ...]}.

The rule is that of vLLM's ShareGPT benchmark: the first human turn is the prompt and the length
of the answer to it is the output length. Source: vllm/benchmarks/datasets/datasets.py,
`ShareGPTDataset.sample` and `is_valid_sequence`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from vtoken.errors import ConfigError
from vtoken.workloads.files import OPTION, bad_row, read_json_rows
from vtoken.workloads.request import WorkloadRequest, take
from vtoken.workloads.tokens import Tokenizer, encode

_HUMAN = {"human", "user"}
_MODEL = {"gpt", "assistant", "chatgpt", "bing", "bard", "bot", "model"}


@dataclass(frozen=True, kw_only=True)
class LengthBounds:
    """Which rows of a dataset are used, in tokens; None is no limit. Defaults are vLLM's."""

    min_prompt_tokens: int = 4
    min_output_tokens: int = 4
    max_prompt_tokens: int | None = 1024
    max_total_tokens: int | None = 2048

    def reject(self, prompt_len: int, output_len: int) -> str:
        """Say why a row is not used, or "" if it is."""
        if prompt_len < self.min_prompt_tokens:
            return f"prompt below {self.min_prompt_tokens} tokens"
        if output_len < self.min_output_tokens:
            return f"output below {self.min_output_tokens} tokens"
        if self.max_prompt_tokens is not None and prompt_len > self.max_prompt_tokens:
            return f"prompt above {self.max_prompt_tokens:,} tokens"
        if self.max_total_tokens is not None and prompt_len + output_len > self.max_total_tokens:
            return f"prompt and output above {self.max_total_tokens:,} tokens"
        return ""


NO_BOUNDS = LengthBounds(
    min_prompt_tokens=1, min_output_tokens=1, max_prompt_tokens=None, max_total_tokens=None
)


def load_sharegpt(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    num: int | None = None,
    seed: int | None = None,
    turns: Literal["first", "all"] = "first",
    output_len: int | None = None,
    bounds: LengthBounds = LengthBounds(),
) -> list[WorkloadRequest]:
    """Read conversations as requests.

    Args:
        num: how many usable rows to take; None takes all.
        seed: shuffles the rows first; None keeps the order of the file.
        turns: "first" prompts with the first human turn; "all" with everything up to the last
            human turn, so that prompts are as long as conversations get.
        output_len: tokens to generate; None takes the length of the recorded answer.

    Raises:
        ConfigError: the file is not ShareGPT JSON, no row is usable (with the reasons), or fewer
            than `num` are.
    """
    path = Path(path)
    rows = shuffled_rows(path, seed)
    rejected: Counter[str] = Counter()

    def usable() -> Iterator[WorkloadRequest]:
        for line, row in rows:
            conversation = _turns(path, line, row)
            split = _split(conversation, turns)
            if split is None:
                rejected["no answered human turn"] += 1
                continue
            ids, text = _prompt(tokenizer, split[0])
            if output_len is None:
                length = len(encode(tokenizer, split[1], special=True))
                why = bounds.reject(len(ids), length)
            else:  # the user's choice is not held against the minimum, as in vLLM
                length = output_len
                why = replace(bounds, min_output_tokens=1).reject(len(ids), length)
            if why:
                rejected[why] += 1
                continue
            yield WorkloadRequest(
                request_id=str(row.get("id", f"{path.stem}-{line}")), prompt=text,
                prompt_token_ids=ids, prompt_len=len(ids), output_len=length, dataset=path.stem,
                metadata={"num_turns": len(conversation), "line": line},
            )  # fmt: skip

    requests = take(unique_ids(usable()), num, str(path)) if rows else []
    if not requests:
        raise no_usable_rows(path, len(rows), rejected)
    return requests


def shuffled_rows(path: Path, seed: int | None) -> list[tuple[int, dict]]:
    """(line number, object) of a dataset; None keeps the order of the file."""
    rows = list(read_json_rows(path))
    if seed is None:
        return rows
    return [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))]


def unique_ids(requests: Iterator[WorkloadRequest]) -> Iterator[WorkloadRequest]:
    """Number the repeats of a request id, since engines refuse an id twice."""
    seen: Counter[str] = Counter()
    for request in requests:
        count = seen[request.request_id]
        seen[request.request_id] += 1
        yield replace(request, request_id=f"{request.request_id}#{count}") if count else request


def no_usable_rows(path: Path, num_rows: int, rejected: Counter[str]) -> ConfigError:
    """Make the error for a dataset of which nothing is left, with the reasons counted."""
    why = ", ".join(f"{count} with {reason}" for reason, count in rejected.most_common())
    found = f"{num_rows} rows: {why}" if why else f"{num_rows} rows"
    return ConfigError(OPTION, str(path), f"a dataset with usable rows ({found})")


def conversation_texts(path: str | Path) -> list[str]:
    """All turns of each conversation joined, as text to cut prompts from.

    Raises:
        ConfigError: the file is not ShareGPT JSON.
    """
    path = Path(path)
    return ["\n\n".join(v for _, v in _turns(path, n, row)) for n, row in read_json_rows(path)]


def _turns(path: Path, line: int, row: dict) -> list[tuple[str, str]]:
    """[(role, text), ...] of one row, role "user" or "assistant"; other roles are left out."""
    allowed = 'a "conversations" list of {"from": "human" or "gpt", "value": text}'
    conversation = row.get("conversations", row.get("conversation"))
    if not isinstance(conversation, list):
        raise bad_row(path, line, allowed)
    turns = []
    for turn in conversation:
        role = turn.get("from", turn.get("role")) if isinstance(turn, dict) else None
        text = turn.get("value", turn.get("content")) if isinstance(turn, dict) else None
        if not isinstance(role, str) or not isinstance(text, str):
            raise bad_row(path, line, allowed)
        if role in _HUMAN or role in _MODEL:
            turns.append(("user" if role in _HUMAN else "assistant", text))
    return turns


def _split(turns: list[tuple[str, str]], which: str) -> tuple[list[tuple[str, str]], str] | None:
    """Split into (turns of the prompt, answer), or None where no human turn has an answer."""
    answered = [
        i for i in range(len(turns) - 1)
        if turns[i][0] == "user" and turns[i + 1][0] == "assistant"
    ]  # fmt: skip
    if not answered:
        return None
    if which == "first":
        at = answered[0]
        return [turns[at]], turns[at + 1][1]
    at = answered[-1]
    return turns[: at + 1], turns[at + 1][1]


def _prompt(tokenizer: Tokenizer, turns: list[tuple[str, str]]) -> tuple[list[int], str]:
    if len(turns) == 1:
        text = turns[0][1]
    else:
        names = {"user": "User", "assistant": "Assistant"}
        text = "\n\n".join(f"{names[role]}: {value}" for role, value in turns) + "\n\nAssistant:"
    return encode(tokenizer, text, special=True), text

"""Requests of a benchmark, by a short name or from a file; every repeat has prompts of its own.

text            prompts cut from the texts that come with vToken
random          random token ids
FILE            a dataset: ShareGPT, LongBench-style JSONL, JSONL prompts, a trace
NAME:256+96     the same, cut or made to 256 prompt and 96 output tokens
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from vtoken.errors import ConfigError, nearest
from vtoken.workloads import (
    WorkloadRequest,
    dataset_texts,
    detect_format,
    load_workload,
    random_prompts,
    shipped_texts,
    text_prompts,
    with_arrivals,
    with_token_ids,
)
from vtoken.workloads.files import OPTION
from vtoken.workloads.load import TRACE_LOADERS

NAMES = ("text", "random")
WARM_UP_REPEAT = 1_000_000  # a repeat whose prompts no measured repeat has


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Attributes:
    name: as the user gave it.
    make: (number, repeat) -> requests.
    max_tokens: prompt and output of the longest request.
    max_requests: how many all repeats together have; None: as many as are asked for.
    note: what was left out of it, in a sentence, or "".
    """

    name: str
    make: Callable[[int, int], Sequence[WorkloadRequest]]
    max_tokens: int
    max_requests: int | None = None
    note: str = ""

    def check_rows(self, num: int, repeats: int) -> None:
        """Refuse more requests than there are.

        Args:
            num: requests of the largest run, each of whose repeats takes rows of its own.
        """
        if self.max_requests is not None and num * repeats > self.max_requests:
            raise ConfigError(
                "--num-prompts and --repeats", f"{num} x {repeats}",
                f"at most {self.max_requests} together: {self.name} has {self.max_requests} "
                "usable rows",
            )  # fmt: skip

    def arriving(self, rate_per_s: float, burstiness: float, seed: int) -> Workload:
        """The same requests, arriving at a rate."""
        make = self.make
        return replace(
            self,
            make=lambda num, repeat: with_arrivals(
                make(num, repeat), rate_per_s, burstiness=burstiness, seed=seed + repeat
            ),
        )


def make_workload(
    text: str,
    *,
    prompt_len: int,
    output_len: int,
    get_tokenizer: Callable[[], object],
    vocab_size: int,
    seed: int = 0,
    is_text_needed: bool = True,
    max_len: int | None = None,
) -> Workload:
    """Read a workload's name.

    Args:
        prompt_len, output_len: tokens, where the name does not say and the file has no lengths.
        get_tokenizer: called where there is text.
        is_text_needed: False: lengths alone count, and `text` is made of random ids.
        max_len: prompt and output tokens of the longest row that is taken from a dataset; None:
            any.
    """
    match = re.fullmatch(r"(.+?)(?::(\d+)\+(\d+))?", text)
    name = match[1]
    is_sized = match[2] is not None
    if is_sized:
        prompt_len, output_len = int(match[2]), int(match[3])
    is_file = "/" in name or "." in name or Path(name).exists()
    if name not in NAMES and not is_file:
        raise ConfigError("--workload", text, f"{nearest(name, NAMES)} or the path of a dataset")
    if is_file:
        with files_called_workloads():
            detect_format(name)  # a path that leads nowhere is said first
            if not is_sized:
                return _dataset(text, name, get_tokenizer, vocab_size, max_len)
    if name == "random" or not (is_text_needed or is_file):

        def make(num: int, repeat: int) -> list[WorkloadRequest]:
            return random_prompts(
                num, prompt_len, output_len, vocab_size=vocab_size, seed=seed, repeat=repeat
            )

    else:
        with files_called_workloads():
            texts = dataset_texts(name) if is_file else shipped_texts()
        tokenizer = get_tokenizer()

        def make(num: int, repeat: int) -> list[WorkloadRequest]:
            return text_prompts(
                tokenizer, num, prompt_len, output_len=output_len, seed=seed, repeat=repeat,
                texts=texts,
            )  # fmt: skip

    make(1, 0)  # lengths that no prompt can have are refused now
    return Workload(name=text, make=lru_cache(64)(make), max_tokens=prompt_len + output_len)


@contextmanager
def files_called_workloads() -> Iterator[None]:
    """Name `--workload` in what is wrong with a file: that is where the user gave it."""
    try:
        yield
    except ConfigError as error:
        if error.option != OPTION:
            raise
        raise ConfigError("--workload", error.value, error.allowed) from error.__cause__


def _dataset(text: str, path: str, get_tokenizer, vocab_size: int, max_len: int | None) -> Workload:
    """A dataset's own requests; repeats take other rows, the warm-up made-up ones."""
    form = detect_format(path)
    if form == "text":
        raise ConfigError("--workload", text, f"lengths to cut prompts to, as in {path}:256+96")
    rows = load_workload(path) if form in TRACE_LOADERS else load_workload(path, get_tokenizer())
    rows, note = leave_out_long(rows, text, max_len)

    def make(num: int, repeat: int) -> list[WorkloadRequest]:
        if repeat >= WARM_UP_REPEAT:
            first = rows[0]
            length = max(16, min(64, first.prompt_len))
            return random_prompts(num, length, 16, vocab_size=vocab_size, repeat=repeat)
        workload.check_rows(num, repeat + 1)
        first, last = repeat * num, (repeat + 1) * num
        return [with_token_ids(rows[i], vocab_size=vocab_size, index=i) for i in range(first, last)]

    workload = Workload(
        name=text, make=lru_cache(64)(make), max_tokens=max(r.prompt_len + r.output_len for r in rows),
        max_requests=len(rows), note=note,
    )  # fmt: skip
    return workload


def leave_out_long(
    rows: Sequence[WorkloadRequest], text: str, max_len: int | None
) -> tuple[list[WorkloadRequest], str]:
    """Leave out rows of a dataset that are too long for the model, as vLLM's benchmark does.

    Source: vllm/benchmarks/datasets/datasets.py, `is_valid_sequence`.

    Args:
        text: the workload, as the user gave it.
        max_len: prompt and output tokens of the longest row; None: any.

    Returns:
        The rows that stay, and a sentence on the others, "" where there are none.
    """
    lengths = [row.prompt_len + row.output_len for row in rows]
    if max_len is None or max(lengths) <= max_len:
        return list(rows), ""
    short = [row for row, length in zip(rows, lengths, strict=True) if length <= max_len]
    if not short:
        raise ConfigError(
            "--workload", text,
            f"rows of at most {max_len:,} tokens with their output, which is what the model or "
            f"--max-model-len takes; the shortest of its {len(rows)} has {min(lengths):,}",
        )  # fmt: skip
    return short, (
        f"{text}: {len(rows) - len(short)} of {len(rows)} usable rows are left out, being longer "
        f"than {max_len:,} tokens with their output."
    )

"""Where a capacity scan's requests come from: texts, a dataset, or random ids where no text is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from vtoken.errors import ConfigError
from vtoken.experiments.capacity.scan_options import (
    DEFAULT_OUTPUT_LEN,
    DEFAULT_PROMPT_LEN,
    ScanSettings,
)
from vtoken.experiments.planning.search import MAX_CONCURRENCY
from vtoken.workloads import (
    WorkloadRequest,
    dataset_texts,
    detect_format,
    load_workload,
    random_prompts,
    shipped_texts,
    text_prompts,
    with_token_ids,
)
from vtoken.workloads.files import read_json_rows
from vtoken.workloads.load import TRACE_LOADERS


class PromptSource:
    """Requests by (number, repeat); no prompt is in two repeats.

    Args:
        make: gives the first `num` requests of a repeat; asking for more must not change them.

    Attributes:
        max_tokens: prompt + output of the longest request there can be.
        max_requests: how many one repeat can have.
        what: where they come from, for people.
    """

    def __init__(
        self,
        make: Callable[[int, int], Sequence[WorkloadRequest]],
        *,
        max_tokens: int,
        max_requests: int = MAX_CONCURRENCY,
        mean_tokens: float | None = None,
        what: str = "",
    ) -> None:
        self._make, self._made = make, {}
        self.max_tokens, self.max_requests, self.what = max_tokens, max_requests, what
        self.mean_tokens = max_tokens if mean_tokens is None else mean_tokens

    def __call__(self, num: int, repeat: int) -> Sequence[WorkloadRequest]:
        if len(self._made.get(repeat, ())) < num:
            self._made[repeat] = self._make(num, repeat)
        return self._made[repeat][:num]


def make_prompts(
    settings: ScanSettings, get_tokenizer: Callable[[], object] | None, vocab_size: int
):
    """Make the source that the settings ask for.

    Args:
        get_tokenizer: called only where there is text; None where the model has none here.

    Raises:
        ConfigError: the dataset cannot be read, or has too few rows.
    """
    if settings.dataset_path is not None and settings.uses_dataset_lengths:
        return _dataset_prompts(settings, get_tokenizer, vocab_size)
    prompt_len = settings.prompt_len or DEFAULT_PROMPT_LEN
    output_len = settings.output_len or DEFAULT_OUTPUT_LEN
    seed, total = settings.engine.seed, prompt_len + output_len
    lengths = f"{prompt_len:,} + {output_len:,} tokens"
    if get_tokenizer is None:
        return PromptSource(
            lambda num, repeat: random_prompts(
                num, prompt_len, output_len, vocab_size=vocab_size, seed=seed, repeat=repeat
            ),
            max_tokens=total,
            what=f"random prompts, {lengths}",
        )
    texts = dataset_texts(settings.dataset_path) if settings.dataset_path else shipped_texts()
    tokenizer = get_tokenizer()
    return PromptSource(
        lambda num, repeat: text_prompts(
            tokenizer, num, prompt_len, output_len=output_len, seed=seed, repeat=repeat, texts=texts
        ),
        max_tokens=total,
        what=f"prompts cut from {settings.dataset_path or 'the shipped texts'}, {lengths}",
    )


def _dataset_prompts(settings: ScanSettings, get_tokenizer, vocab_size: int) -> PromptSource:
    """Requests of a dataset as they are; each repeat takes other rows."""
    path = settings.dataset_path
    form = detect_format(path)
    if form in TRACE_LOADERS:
        rows = load_workload(path)
        if settings.output_len is not None:
            rows = [replace(row, output_len=settings.output_len) for row in rows]
    else:
        if form != "text":
            for _ in read_json_rows(path):  # a bad line is found before a tokenizer is loaded
                pass
        tokenizer = get_tokenizer() if get_tokenizer is not None else None
        options = {} if settings.output_len is None else {"output_len": settings.output_len}
        rows = load_workload(path, tokenizer, **options)
    per_repeat = len(rows) // settings.repeats
    if per_repeat < 1:
        raise ConfigError(
            "--repeats", settings.repeats, f"at most {len(rows)}, the usable rows of {path}"
        )
    totals = [row.prompt_len + row.output_len for row in rows]

    def make(num: int, repeat: int) -> list[WorkloadRequest]:
        if num > per_repeat:
            raise ConfigError(
                "--concurrency", num,
                f"at most {per_repeat}: {path} has {len(rows)} usable rows for "
                f"{settings.repeats} repeats",
            )  # fmt: skip
        first = repeat * per_repeat
        return [
            with_token_ids(rows[i], vocab_size=vocab_size, index=i)
            for i in range(first, first + num)
        ]

    return PromptSource(
        make,
        max_tokens=max(totals),
        max_requests=per_repeat,
        mean_tokens=sum(totals) / len(totals),
        what=f"requests of {path}, up to {max(totals):,} tokens",
    )

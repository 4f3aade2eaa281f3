"""Tasks of the quality suite: questions with known answers, made up or from a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vtoken.errors import ConfigError, nearest
from vtoken.experiments.bench.named_workloads import files_called_workloads, leave_out_long
from vtoken.workloads import WorkloadRequest, load_longbench, needle_prompts
from vtoken.workloads.chat import LengthBounds
from vtoken.workloads.retrieval import key_value_prompts, line_prompts, multidoc_prompts

PROMPT_TOKENS, OUTPUT_TOKENS = 192, 12

MADE: dict[str, Callable[..., list[WorkloadRequest]]] = {
    "needle": needle_prompts,
    "key-value": key_value_prompts,
    "lines": line_prompts,
    "multidoc": multidoc_prompts,
}


@dataclass(frozen=True, kw_only=True)
class Task:
    """Attributes:
    requests: each with its accepted answers.
    note: what was left out of a file, in a sentence, or "".
    """

    name: str
    requests: Sequence[WorkloadRequest]
    note: str = ""

    @property
    def max_tokens(self) -> int:
        return max(r.prompt_len + r.output_len for r in self.requests)


def make_task(
    text: str,
    tokenizer,
    num: int,
    *,
    prompt_len: int | None = None,
    output_len: int | None = None,
    seed: int = 0,
    max_len: int | None = None,
) -> Task:
    """Make a task from its name, or from a file of LongBench-style JSONL.

    Args:
        num: questions; of a file those whose prompts are at most `prompt_len` tokens.
        max_len: as in `make_workload`.

    Raises:
        ConfigError: no such task, or a file without usable rows that have answers.
    """
    output = output_len or OUTPUT_TOKENS
    if text in MADE:
        length = prompt_len or PROMPT_TOKENS
        requests = MADE[text](tokenizer, num, length, output_len=output, seed=seed)
        return Task(name=text, requests=requests)
    if "/" not in text and "." not in text and not Path(text).exists():
        raise ConfigError(
            "--workload", text, f"{nearest(text, MADE)} or a file of LongBench-style JSONL"
        )
    bounds = LengthBounds(
        min_prompt_tokens=1, min_output_tokens=1, max_prompt_tokens=prompt_len,
        max_total_tokens=None,
    )  # fmt: skip
    with files_called_workloads():
        requests = load_longbench(text, tokenizer, output_len=output, bounds=bounds)
    requests = [r for r in requests if r.answers]
    if not requests:
        raise ConfigError("--workload", text, "rows with answers to compare with")
    requests, note = leave_out_long(requests, text, max_len)
    return Task(name=Path(text).stem, requests=requests[:num], note=note)

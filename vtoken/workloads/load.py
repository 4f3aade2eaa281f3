"""Load any dataset by looking at it, and find text in it to cut prompts from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vtoken.errors import ConfigError
from vtoken.workloads.chat import conversation_texts, load_sharegpt
from vtoken.workloads.files import OPTION, csv_header, read_json_rows, read_text
from vtoken.workloads.longbench import context_texts, load_longbench, load_prompts
from vtoken.workloads.request import WorkloadRequest
from vtoken.workloads.tokens import Tokenizer
from vtoken.workloads.traces import (
    CSV_FORMATS,
    MOONCAKE_FIELDS,
    load_azure,
    load_burstgpt,
    load_mooncake,
    load_servegen,
)

TEXT_FORMATS = ("sharegpt", "longbench", "prompts", "text")
TRACE_LOADERS: dict[str, Callable[..., list[WorkloadRequest]]] = {
    "azure": load_azure,
    "burstgpt": load_burstgpt,
    "mooncake": load_mooncake,
    "servegen": load_servegen,
}
FORMATS = (*TEXT_FORMATS, *TRACE_LOADERS)
_KNOWN = (
    "ShareGPT JSON, LongBench-style JSONL, JSONL with a prompt field, "
    "a trace (Azure, BurstGPT or ServeGen CSV, Mooncake or Bailian JSONL), or plain text in .txt or .md"
)


def detect_format(path: str | Path) -> str:
    """Tell a dataset's format, one of `FORMATS`, from its first row (plain text: from its name).

    Raises:
        ConfigError: no such file, an empty one, a first row that is not JSON, or none of the
            formats.
    """
    path = Path(path)
    if path.is_dir() or path.suffix.lower() in (".txt", ".md"):
        return "text"
    text = read_text(path)
    if not text.strip():
        raise ConfigError(OPTION, str(path), f"{_KNOWN}; this file is empty")
    if path.suffix.lower() == ".csv":
        header = set(csv_header(path))
        for name, (columns, _) in CSV_FORMATS.items():
            if header & set(columns):
                return name
        known = " or ".join(f"{', '.join(c)} ({name})" for name, (c, _) in CSV_FORMATS.items())
        raise ConfigError(OPTION, f"{path}:1", f"columns {known}")
    if text.lstrip()[0] not in "[{" and path.suffix.lower() not in (".json", ".jsonl"):
        raise ConfigError(OPTION, str(path), _KNOWN)
    line, row = next(read_json_rows(path), (1, {}))
    if "conversations" in row or "conversation" in row:
        return "sharegpt"
    if {"timestamp", "hash_ids"} & set(row) and set(MOONCAKE_FIELDS) & set(row):
        return "mooncake"
    if "context" in row:
        return "longbench"
    if "prompt" in row or "turns" in row:
        return "prompts"
    found = ", ".join(map(str, row)) or "nothing"
    raise ConfigError(OPTION, f"{path}:{line}", f"{_KNOWN}; this row has {found}")


def load_workload(
    path: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    num: int | None = None,
    **options,
) -> list[WorkloadRequest]:
    """Load a dataset with the loader of its format.

    Args:
        tokenizer: needed for formats with text.
        options: further arguments of that format's loader (`seed`, `output_len`, `bounds`, ...).

    Raises:
        ConfigError: from `detect_format` or the loader; plain text, which has no requests in it
            (use `dataset_texts` and `text_prompts`); text without a tokenizer.
    """
    name = detect_format(path)
    if name in TRACE_LOADERS:
        if name != "mooncake" and (key := next(iter(options), None)):
            option = "--" + key.replace("_", "-")
            raise ConfigError(option, options[key], f"a trace with prefix hashes; {path} has none")
        return TRACE_LOADERS[name](path, num=num, **options)
    if name == "text":
        raise ConfigError(OPTION, str(path), "a dataset of requests; plain text has no requests")
    if tokenizer is None:
        raise ConfigError(OPTION, str(path), "a trace; text needs a tokenizer to count it with")
    loader = {"sharegpt": load_sharegpt, "longbench": load_longbench, "prompts": load_prompts}[name]
    return loader(path, tokenizer, num=num, **options)


def dataset_texts(path: str | Path) -> list[str]:
    """Find the text in a dataset, for `text_prompts(texts=...)`: a file, or a folder of .txt.

    Raises:
        ConfigError: the dataset is a trace, or holds no text.
    """
    path = Path(path)
    name = detect_format(path)
    if name in TRACE_LOADERS:
        raise ConfigError(OPTION, str(path), f"a dataset with text; this is a {name} trace")
    if name == "sharegpt":
        texts = conversation_texts(path)
    elif name == "text":
        files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        texts = [read_text(file) for file in files]
    else:
        texts = context_texts(path)
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ConfigError(OPTION, str(path), "text to cut prompts from, but it holds none")
    return texts

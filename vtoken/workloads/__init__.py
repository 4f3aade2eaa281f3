"""Workloads: datasets, traces and made-up prompts, all as lists of `WorkloadRequest`.

Files:
    files.py      reading with errors that name file and line
    chat.py       ShareGPT            longbench.py   LongBench, JSONL prompts
    traces.py     Azure, Mooncake, ServeGen: lengths and times, no text
    texts.py      exact-length prompts cut from real text (ours are in prompts/)
    synthetic.py  random tokens, shared prefixes, needles
    load.py       which of these a file is
"""

from vtoken.workloads.chat import NO_BOUNDS, LengthBounds, load_sharegpt
from vtoken.workloads.load import FORMATS, dataset_texts, detect_format, load_workload
from vtoken.workloads.longbench import load_longbench, load_prompts
from vtoken.workloads.request import (
    WorkloadRequest,
    scale_rate,
    trace_token_ids,
    with_arrivals,
    with_token_ids,
)
from vtoken.workloads.synthetic import needle_prompts, random_prompts, shared_prefix_prompts
from vtoken.workloads.texts import shipped_texts, text_prompts
from vtoken.workloads.traces import load_azure, load_mooncake, load_servegen

__all__ = [
    "FORMATS", "NO_BOUNDS", "LengthBounds", "WorkloadRequest", "dataset_texts", "detect_format",
    "load_azure", "load_longbench", "load_mooncake", "load_prompts", "load_servegen",
    "load_sharegpt", "load_workload", "needle_prompts", "random_prompts", "scale_rate",
    "shared_prefix_prompts", "shipped_texts", "text_prompts", "trace_token_ids", "with_arrivals",
    "with_token_ids",
]  # fmt: skip

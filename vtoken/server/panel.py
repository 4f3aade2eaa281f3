"""What `vtoken serve` says when its engine is up: the pool, the budget, what it means for output.

`facts` reads a finished VllmConfig into plain values, `render` makes a Rich panel of them.
"""

from __future__ import annotations

from typing import Any

from vtoken.config import VTokenConfig
from vtoken.core.budget import Budget
from vtoken.policies.base import ScoreKind
from vtoken.units import cdiv

# Requests that the concurrency is computed for, besides one as long as the model takes.
EXAMPLE_PROMPT_TOKENS, EXAMPLE_OUTPUT_TOKENS = 256, 768


def facts(
    vllm_config, config: VTokenConfig, *, url: str, kernels: str, status_page: bool | str
) -> dict[str, Any]:
    """Collect what the panel shows.

    Args:
        vllm_config: after the engine is up: the pool's size is known.
        kernels: what computes attention over holes, or why nothing does.
        status_page: True, or the reason why there is none.
    """
    cache, model = vllm_config.cache_config, vllm_config.model_config
    engines = max(1, vllm_config.parallel_config.data_parallel_size)
    blocks, N = (cache.num_gpu_blocks or 1) // engines - 1, cache.block_size
    budget = config.make_budget(N)
    lengths = {EXAMPLE_PROMPT_TOKENS + EXAMPLE_OUTPUT_TOKENS, model.max_model_len}
    return {
        "model": model.served_model_name,
        "url": url,
        "status_page": status_page,
        "engines": engines,
        "pool": {
            "usable_blocks": blocks,
            "block_size": N,
            "tokens": blocks * N,
            "bytes": pool_bytes(vllm_config, blocks),
        },
        "mode": config.mode,
        "budget": _budget_text(config, budget),
        "output": _output_text(config, budget),
        "kernels": kernels if config.hooks_installed else "vLLM's own: no hooks are installed",
        "concurrency": [
            concurrency(config, budget, blocks, N, length)
            for length in sorted(lengths)
            if length <= model.max_model_len
        ],
        "features": features(vllm_config, config, budget, status_page),
    }


def pool_bytes(vllm_config, num_blocks: int) -> int | None:
    """Bytes of K and V in the pool on one rank; None for models we cannot size."""
    import torch

    cache, model = vllm_config.cache_config, vllm_config.model_config
    parallel = vllm_config.parallel_config
    dtype = model.dtype if cache.cache_dtype == "auto" else getattr(torch, cache.cache_dtype, None)
    if not isinstance(dtype, torch.dtype):
        return None
    per_token = 2 * model.get_num_kv_heads(parallel) * model.get_head_size() * dtype.itemsize
    return num_blocks * cache.block_size * per_token * model.get_num_layers(parallel)


def concurrency(
    config: VTokenConfig, budget: Budget | None, num_blocks: int, block_size: int, length: int
) -> dict[str, Any]:
    """Requests of a final length that fit at once, with and without reclamation, as formulas."""
    from vtoken.core.budget import peak_tokens

    full = cdiv(length, block_size)
    reclaims = config.mode == "vtoken" and budget is not None
    peak = cdiv(peak_tokens(budget, length, block_size), block_size) if reclaims else full
    return {
        "request_tokens": length,
        "without_reclamation": num_blocks // full,
        "with_reclamation": num_blocks // peak,
        "formula": f"{num_blocks} // {full} blocks, {num_blocks} // {peak} blocks",
    }


def _budget_text(config: VTokenConfig, budget: Budget | None) -> str:
    if budget is None:
        return f"none: mode {config.mode} keeps every token"
    if config.kv_budget_tokens is not None:
        kept = f"{config.kv_budget_tokens} live tokens a request"
    else:
        kept = f"{100 * (1 - budget.eviction_ratio):g}% of a request's tokens stay live"
    when = "only while the pool runs short" if config.evict_when == "pressure" else "always"
    return (
        f"{config.policy}: {kept} (at least {budget.policy.floor_tokens}), "
        f"evicts every {budget.interval_tokens} tokens, {when}"
    )


def _output_text(config: VTokenConfig, budget: Budget | None) -> str:
    if budget is None:
        return "the same as stock vLLM's"
    if config.evict_when == "pressure":
        return "the same as stock vLLM's while there is room; may differ once the pool runs short"
    first = budget.next_eviction_len(0, 0, 0)
    return f"may differ from stock vLLM's once a request is longer than {first} tokens"


def features(
    vllm_config, config: VTokenConfig, budget: Budget | None, status_page: bool | str
) -> list[tuple[str, bool, str]]:
    """(feature, on, reason), where the reason says why it is off or how it is on."""
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    scored = budget is not None and budget.policy.score_kind is not ScoreKind.NONE
    own = "policy, budget and enabled, through vllm_xargs"
    rows = [
        ("eviction", config.evicts, "" if config.evicts else f"mode {config.mode}"),
        (
            "reclamation",
            config.mode == "vtoken",
            f"{config.relocation} copies" if config.mode == "vtoken" else f"mode {config.mode}",
        ),
        (
            "attention scores",
            scored,
            f"{budget.policy.score_kind.value}, last {config.score_queries} prompt queries"
            if scored
            else "no policy reads them",
        ),
        (
            "options per request",
            config.evicts,
            own if config.evicts else f"mode {config.mode} evicts nothing",
        ),
        (
            "prefix caching",
            bool(cache.enable_prefix_caching),
            f"shared prefixes: {config.shared_prefix}"
            if cache.enable_prefix_caching
            else "switched off, or the model does not support it",
        ),
        ("chunked prefill", bool(scheduler.enable_chunked_prefill), ""),
        (
            "async scheduling",
            bool(scheduler.async_scheduling),
            "" if scheduler.async_scheduling else _why_not_async(vllm_config),
        ),
        ("status page", status_page is True, "" if status_page is True else str(status_page)),
    ]
    return rows


def _why_not_async(vllm_config) -> str:
    if vllm_config.device_config.device_type == "cpu":
        return "vLLM turns it off on CPUs"
    return "vLLM's choice for this configuration, or yours"


def render(found: dict[str, Any]):
    """Make a Rich panel of `facts`."""
    from rich.console import Group
    from rich.markup import escape
    from rich.panel import Panel
    from rich.table import Table

    pool = found["pool"]
    size = "" if pool["bytes"] is None else f" = {_size(pool['bytes'])}"
    each = f" in each of {found['engines']} engines" if found["engines"] > 1 else ""
    blocks, N = pool["usable_blocks"], pool["block_size"]
    pool_text = f"{blocks:,} blocks x {N} tokens = {pool['tokens']:,} tokens{size}{each}"
    top = Table.grid(padding=(0, 2))
    top.add_column(style="bold", no_wrap=True)
    top.add_column(overflow="fold")
    for name, value in (
        ("model", found["model"]),
        ("pool", pool_text),
        ("mode", found["mode"]),
        ("budget", found["budget"]),
        ("output", found["output"]),
        ("kernels", found["kernels"]),
    ):
        top.add_row(name, escape(str(value)))
    for row in found["concurrency"]:
        top.add_row(
            "fits at once",
            f"{row['without_reclamation']:,} without reclamation, {row['with_reclamation']:,} with, "
            f"of {row['request_tokens']:,} tokens each ({row['formula']}; "
            "measured: run capacity-scan)",
        )
    for name, on, reason in found["features"]:
        state = "[green]on[/]" if on else "[yellow]off[/]"
        top.add_row(name, state + (f"  {escape(reason)}" if reason else ""))
    top.add_row("API", f"{found['url']}/v1")
    if found["status_page"] is True:
        url = found["url"]
        top.add_row("watch", f"{url}/vtoken   (in a terminal: vtoken top {url})")
    return Panel(Group(top), title="vToken", title_align="left", border_style="cyan")


def _size(num_bytes: int) -> str:
    gib = num_bytes / 2**30
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{gib:.2g} GiB"

"""Checks of engines, layers and prompts against the list of what works (`support_list`)."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Literal

from vtoken.vllm_plugin.support_list import PROPERTIES


def _check(of: str, subject, where: str = "") -> None:
    for prop in PROPERTIES:
        if prop.of == of:
            prop.check(subject, where)


def check_config_supported(vllm_config, config, block_size: int | None = None) -> None:
    """Refuse a finished VllmConfig that has what is not listed.

    Args:
        config: vToken's settings.

    Raises:
        UnsupportedError: names the feature, the reason and what would work.
    """
    block_size = block_size or vllm_config.cache_config.block_size or 16
    engine = SimpleNamespace(
        all=vllm_config, model=vllm_config.model_config, cache=vllm_config.cache_config,
        parallel=vllm_config.parallel_config, scheduler=vllm_config.scheduler_config,
        policy=config.make_policy(block_size) if config.evicts else None,
    )  # fmt: skip
    _check("engine", engine)
    if vllm_config.device_config.device_type == "cuda":
        check_gpu_supported(config, block_size)


def check_gpu_supported(config, block_size: int) -> None:
    """Refuse what needs attention over holes, or scores, where no kernel of ours runs.

    Raises:
        UnsupportedError: says why, and what works.
    """
    policy = config.make_policy(block_size) if config.evicts else None
    _check("gpu", SimpleNamespace(config=config, policy=policy))


def check_scheduler_supported(scheduler, managers) -> None:
    """Refuse KV caches that the hooks cannot serve.

    Raises:
        UnsupportedError: names the layout and the reason.
    """
    num_hashes = scheduler.block_size / scheduler.hash_block_size
    _check("scheduler", SimpleNamespace(num_groups=len(managers), num_hashes=num_hashes))


def check_layer_specs(specs: Mapping[str, Any]) -> None:
    """Refuse attention layers whose KV is not one relocatable entry per token, alike in all.

    Raises:
        UnsupportedError: names the layer and the reason.
    """
    for name, spec in specs.items():
        _check("spec", spec, f" in layer {name}")
    _check("specs", {(s.num_kv_heads, s.head_size, s.dtype) for s in specs.values()})


def check_layer_impls(layers: Mapping[str, Any]) -> None:
    """Refuse attention implementations whose result depends on where an entry lies.

    Raises:
        UnsupportedError: names the layer and the reason.
    """
    for name, layer in layers.items():
        _check("layer", layer.impl, f" in layer {name}")


def check_prompt(kind: Literal["token ids", "embeddings", "stream"]) -> None:
    """Refuse a prompt that the scheduler cannot count.

    Raises:
        UnsupportedError: says what to send.
    """
    _check("prompt", kind)

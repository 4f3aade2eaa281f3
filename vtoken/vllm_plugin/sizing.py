"""How many blocks one request needs at its peak, from vLLM's config and ours."""

from __future__ import annotations

from vtoken.config import VTokenConfig
from vtoken.core.budget import Budget
from vtoken.errors import ConfigError
from vtoken.units import cdiv

# Scores are two steps old when they are used: the pool must last that long.
SCORE_DELAY_STEPS = 3


def config_of(vllm_config) -> VTokenConfig | None:
    """vToken's settings in a VllmConfig; None when there are none or the mode is native."""
    additional = vllm_config.additional_config
    data = additional.get("vtoken") if isinstance(additional, dict) else None
    if data is None:
        return None
    if not isinstance(data, dict):
        raise ConfigError("additional_config['vtoken']", data, "a mapping of vToken settings")
    config = VTokenConfig.from_mapping(data)
    return config if config.hooks_installed else None


def peak_tokens(budget: Budget | None, num_tokens: int, chunk_tokens: int) -> int:
    """Most slots a request of this final length needs at once.

    A decode never holds more than budget + interval tokens. A prompt is evicted between its
    chunks, so it adds one chunk; chunks are cut to what the pool has room for.
    """
    if budget is None:
        return num_tokens
    # Scores are asked for two steps ahead, so scored evictions come no later; the odd late one
    # (right after a prompt) lives off the headroom.
    peak = int(budget.tokens(num_tokens)) + budget.interval_tokens
    return min(num_tokens, peak + max(0, chunk_tokens - 1))


def peak_blocks_per_request(vllm_config, block_size: int, num_tokens: int) -> int | None:
    """Blocks a request of this final length needs at its peak; None: as many as its tokens."""
    config = config_of(vllm_config)
    if config is None or config.mode != "vtoken":
        return None
    budget = config.make_budget(block_size)
    return cdiv(peak_tokens(budget, num_tokens, block_size), block_size)

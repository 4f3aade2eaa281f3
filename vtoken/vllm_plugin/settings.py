"""vToken's settings in vLLM's config, and what they mean for the size of a request."""

from __future__ import annotations

from vtoken.config import VTokenConfig
from vtoken.core.budget import peak_blocks
from vtoken.errors import ConfigError


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


def peak_blocks_per_request(vllm_config, block_size: int, num_tokens: int) -> int | None:
    """Blocks a request of this final length needs at its peak; None: as many as its tokens."""
    config = config_of(vllm_config)
    if config is None or config.mode != "vtoken":
        return None
    return peak_blocks(config.make_budget(block_size), num_tokens, block_size)

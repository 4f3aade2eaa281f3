"""vLLM's general plugin: `LLM(..., additional_config={"vtoken": {...}})` and nothing else.

Loaded by vLLM in every one of its processes, several times. Does nothing unless a config asks for
vToken; then it names our scheduler and worker where the user named none. Under a vLLM that was not
tested it only refuses such a config.
"""

from __future__ import annotations

import functools
import sys

from vtoken.errors import UnsupportedError
from vtoken.vllm_plugin import compat
from vtoken.vllm_plugin.support_list import OUR_SCHEDULERS, OUR_WORKERS


def register() -> None:
    """Entry point `vllm.general_plugins`; may be called again."""
    try:
        compat.check_version(compat.vllm_version())
    except UnsupportedError as error:
        # An untested vLLM may be run without vToken: refuse only when it is asked for.
        _wrap_config_creation(refusal=error)
        return
    from vtoken.vllm_plugin.manager import register_spec

    register_spec()
    _wrap_config_creation()
    if "vllm.v1.engine.core" in sys.modules:  # an engine's process; front ends need no import
        from vtoken.vllm_plugin.endpoint import install_utility

        install_utility()


def _wrap_config_creation(refusal: UnsupportedError | None = None) -> None:
    from vllm.engine.arg_utils import EngineArgs

    stock = EngineArgs.create_engine_config
    if getattr(stock, "is_vtoken", False):
        return

    @functools.wraps(stock)
    def create_engine_config(self, *args, **kwargs):
        if not has_settings(self.additional_config):
            return stock(self, *args, **kwargs)
        wants = wants_vtoken(self.additional_config)
        if wants and refusal is not None:
            raise refusal
        if wants and self.worker_cls == "auto":
            from vllm.platforms import current_platform

            self.worker_cls = OUR_WORKERS["cpu" if current_platform.is_cpu() else "cuda"]
        vllm_config = stock(self, *args, **kwargs)
        if wants:
            finish_config(vllm_config)
        if refusal is None:
            from vtoken.vllm_plugin.requests import install

            compat.check("front end")

            install()
        return vllm_config

    create_engine_config.is_vtoken = True
    EngineArgs.create_engine_config = create_engine_config


def has_settings(additional_config) -> bool:
    """Whether a config speaks of vToken at all, `native` included."""
    return isinstance(additional_config, dict) and "vtoken" in additional_config


def wants_vtoken(additional_config) -> bool:
    """Whether a config has vToken settings whose mode installs hooks."""
    data = additional_config.get("vtoken") if isinstance(additional_config, dict) else None
    if data is None:
        return False
    from vtoken.config import VTokenConfig

    return VTokenConfig.from_mapping(data).hooks_installed


def finish_config(vllm_config) -> None:
    """Check a finished VllmConfig and name our scheduler where the user named none.

    Raises:
        ConfigError: a setting is wrong, or the engine has a feature that is not supported.
    """
    from vtoken.vllm_plugin.settings import config_of
    from vtoken.vllm_plugin.support import check_config_supported
    from vtoken.vllm_plugin.vocabulary import with_vocabulary

    config = config_of(vllm_config)
    scheduler = vllm_config.scheduler_config
    if scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = OUR_SCHEDULERS[bool(scheduler.async_scheduling)]
    check_config_supported(vllm_config, config)
    config.make_budget(vllm_config.cache_config.block_size)
    full = with_vocabulary(config, vllm_config.model_config)
    if full is not config:  # a copy: the mapping that the user gave stays as it is
        settings = {**vllm_config.additional_config["vtoken"], "policy_args": full.policy_args}
        vllm_config.additional_config = {**vllm_config.additional_config, "vtoken": settings}

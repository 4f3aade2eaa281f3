"""Refuse a bad request in the front end: a 400 for that request, before anything is sent.

Two places: `AsyncLLM.generate`, which a server calls before it answers (a stream's status line
included), and `InputProcessor.process_inputs`, through which every other way into an engine goes.
"""

from __future__ import annotations

import functools

from vllm.exceptions import VLLMValidationError

from vtoken.errors import ConfigError
from vtoken.scheduling.budgets import check_fits
from vtoken.scheduling.request_options import PREFIX, read_options, request_budget
from vtoken.vllm_plugin.settings import config_of
from vtoken.vllm_plugin.support import check_prompt


class RequestRefused(ConfigError, VLLMValidationError):
    """A ConfigError that vLLM's server answers with status 400."""

    def __init__(self, option: str, value: object, allowed: str) -> None:
        ConfigError.__init__(self, option, value, allowed)
        self.parameter, self.value = option, value

    def __str__(self) -> str:
        return ConfigError.__str__(self)


def check_request(vllm_config, params, num_prompt_tokens: int, kind: str = "token ids") -> None:
    """Check a request's own options and that it can ever be finished in this pool.

    Args:
        kind: of prompt: "token ids", "embeddings" or "stream".

    Raises:
        RequestRefused: says what is wrong, or what the request needs and what there is.
    """
    additional = vllm_config.additional_config
    if not isinstance(additional, dict) or "vtoken" not in additional:
        return
    cache = vllm_config.cache_config
    try:
        config = config_of(vllm_config)
        if config is not None:
            check_prompt(kind)
        options = read_options(getattr(params, "extra_args", None))
        budget = request_budget(config, options, cache.block_size)
        if cache.num_gpu_blocks:
            engines = max(1, vllm_config.parallel_config.data_parallel_size)
            usable = cache.num_gpu_blocks // engines - 1
            max_tokens = getattr(params, "max_tokens", None) or 1
            check_fits(config, budget, num_prompt_tokens, max_tokens, cache.block_size, usable)
    except RequestRefused:
        raise
    except ConfigError as error:
        option = error.option
        if option.startswith("--"):  # the command line's name of what the body calls vtoken_...
            option = PREFIX + option.removeprefix("--").replace("-", "_")
        raise RequestRefused(option, error.value, error.allowed) from None


def _kind_and_length(ids, embeds, resumable: bool = False) -> tuple[str, int]:
    if resumable:
        return "stream", 0
    return ("token ids", len(ids or ())) if embeds is None else ("embeddings", len(embeds))


def install() -> None:
    """Wrap the two entries; may be called again."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    if not getattr(AsyncLLM.generate, "is_vtoken", False):
        AsyncLLM.generate = _checked_generate(AsyncLLM.generate)
    if not getattr(InputProcessor.process_inputs, "is_vtoken", False):
        InputProcessor.process_inputs = _checked_process(InputProcessor.process_inputs)


def _checked_generate(stock):
    @functools.wraps(stock)
    def generate(self, prompt, sampling_params, *args, **kwargs):
        # `stock` is an async generator: its body runs when the first token is awaited, after a
        # stream has been answered with 200. This body runs when it is called.
        if isinstance(prompt, dict):
            ids, embeds = prompt.get("prompt_token_ids"), prompt.get("prompt_embeds")
            if ids is not None or embeds is not None:
                kind, length = _kind_and_length(ids, embeds)
                check_request(self.vllm_config, sampling_params, length, kind)
        return stock(self, prompt, sampling_params, *args, **kwargs)

    generate.is_vtoken = True
    return generate


def _checked_process(stock):
    @functools.wraps(stock)
    def process_inputs(self, *args, **kwargs):
        request = stock(self, *args, **kwargs)
        kind, length = _kind_and_length(
            request.prompt_token_ids, request.prompt_embeds, request.resumable
        )
        check_request(self.vllm_config, request.sampling_params, length, kind)
        return request

    process_inputs.is_vtoken = True
    return process_inputs

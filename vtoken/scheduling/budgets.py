"""The budget of each request, and whether a request can be served at all."""

from __future__ import annotations

from vtoken.config import VTokenConfig
from vtoken.core.budget import Budget, peak_blocks, peak_tokens
from vtoken.errors import ConfigError
from vtoken.scheduling.ports import Request
from vtoken.scheduling.request_options import RequestOptions, read_options, request_budget

MAX_KNOWN_BUDGETS = 1024


class RequestBudgets:
    """Attributes:
    common: the server's budget, or None where nothing is evicted.
    """

    def __init__(self, config: VTokenConfig, block_size: int, num_usable_blocks: int) -> None:
        self.config, self.block_size = config, block_size
        self.num_usable_blocks = num_usable_blocks
        self.common = config.make_budget(block_size)
        self._own: dict[RequestOptions, Budget | None] = {}  # of requests, by what they asked for

    def of(self, request: Request) -> Budget | None:
        """The budget a request asked for (`vllm_xargs`), else the server's."""
        params = request.sampling_params
        if params is None or not params.extra_args or self.common is None:
            return self.common
        try:
            options = read_options(params.extra_args)
            if options is None:
                return self.common
            if options not in self._own:
                if len(self._own) >= MAX_KNOWN_BUDGETS:
                    self._own.clear()
                self._own[options] = request_budget(self.config, options, self.block_size)
            return self._own[options]
        except ConfigError:
            return self.common  # refused in the front end; never a reason to end the engine

    def admission_cap_tokens(self, request: Request, num_tokens: int) -> int:
        """Slots to reserve when a request is admitted: its peak, eviction between chunks counted."""
        budget = self.of(request)
        if budget is None or self.config.mode != "vtoken":
            return num_tokens
        return peak_tokens(budget, num_tokens, self.block_size)

    def check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Refuse a request that could never be finished in this pool.

        Raises:
            ConfigError: says what it needs and what there is.
        """
        check_fits(
            self.config, self.common, num_prompt_tokens, max_tokens, self.block_size,
            self.num_usable_blocks,
        )  # fmt: skip


def check_fits(
    config: VTokenConfig | None,
    budget: Budget | None,
    num_prompt_tokens: int,
    max_tokens: int,
    block_size: int,
    num_usable_blocks: int,
) -> None:
    """Refuse a request that could never be finished in a pool.

    Args:
        config: the server's settings; None when the mode is native.
        budget: the request's.

    Raises:
        ConfigError: says what it needs and what there is.
    """
    # Holes of `naive` are given back in whole blocks only: nothing can be promised there.
    shrinks = config is not None and config.mode == "vtoken"
    total = num_prompt_tokens + max_tokens
    needed = peak_blocks(budget if shrinks else None, total, block_size)
    if needed > num_usable_blocks:
        raise ConfigError(
            "request", f"{num_prompt_tokens} prompt + {max_tokens} output tokens",
            f"needs {needed} KV blocks of {block_size} tokens at its peak, the pool has "
            f"{num_usable_blocks}; lower max_tokens or the request's budget",
        )  # fmt: skip

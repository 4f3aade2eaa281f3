"""The budget of each request, and whether a request can be served at all."""

from __future__ import annotations

from vtoken.core.budget import Budget
from vtoken.errors import ConfigError
from vtoken.server.request_options import read_options, request_budget
from vtoken.units import cdiv
from vtoken.vllm_plugin.sizing import peak_tokens

MAX_KNOWN_BUDGETS = 1024


class RequestBudgets:
    """Part of SchedulerHooks."""

    def __init__(self, hooks) -> None:
        self.hooks, self.config, self.common = hooks, hooks.config, hooks.budget
        self._own: dict = {}  # of requests that asked for one, by what they asked for

    def of(self, request) -> Budget | None:
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
                self._own[options] = request_budget(self.config, options, self.hooks.block_size)
            return self._own[options]
        except ConfigError:
            return self.common  # refused in the front end; never a reason to end the engine

    def admission_cap_tokens(self, request, num_tokens: int) -> int:
        """Slots to reserve when a request is admitted: its peak, eviction between chunks counted."""
        budget = self.of(request)
        if budget is None or self.config.mode != "vtoken":
            return num_tokens
        return peak_tokens(budget, num_tokens, self.hooks.block_size)

    def check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Refuse a request that could never be finished in this pool.

        Raises:
            ConfigError: says what it needs and what there is.
        """
        N, total = self.hooks.block_size, num_prompt_tokens + max_tokens
        budget = self.common if self.config.mode == "vtoken" else None
        needed = cdiv(peak_tokens(budget, total, N), N)
        usable = self.hooks.pool.num_gpu_blocks - 1
        if needed > usable:
            raise ConfigError(
                "request", f"{num_prompt_tokens} prompt + {max_tokens} output tokens",
                f"needs {needed} blocks of {N} tokens at its peak, the pool has {usable}",
            )  # fmt: skip

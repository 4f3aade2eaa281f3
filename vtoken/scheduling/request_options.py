"""Options of one request: read, checked and turned into a budget of its own.

A client sends them beside the OpenAI fields:

    {"model": ..., "prompt": ..., "vllm_xargs": {"vtoken_kv_budget_tokens": 256}}

    vtoken_enabled            false: this request keeps every token
    vtoken_policy             another policy, if the engine collects what it needs
    vtoken_eviction_ratio     fraction dropped      (one of the two)
    vtoken_kv_budget_tokens   absolute live tokens

The front end checks them, so that a bad one fails that request alone; the scheduler reads them
again when the request is first scheduled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from vtoken.config import VTokenConfig
from vtoken.core.budget import Budget
from vtoken.errors import ConfigError, nearest
from vtoken.policies.base import ScoreKind

PREFIX = "vtoken_"


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request asked for; None: as the server was started."""

    enabled: bool | None = None
    policy: str | None = None
    eviction_ratio: float | None = None
    kv_budget_tokens: int | None = None

    @property
    def evicts(self) -> bool:
        """Whether anything is asked for that needs eviction."""
        return bool(self.enabled) or any(
            x is not None for x in (self.policy, self.eviction_ratio, self.kv_budget_tokens)
        )


_NAMES = tuple(f.name for f in fields(RequestOptions))


def read_options(extra_args: Mapping[str, Any] | None) -> RequestOptions | None:
    """Take vToken's options out of a request's `vllm_xargs`; None when there are none.

    Raises:
        ConfigError: an unknown option or a value of the wrong kind.
    """
    if not extra_args:
        return None
    given = {k: v for k, v in extra_args.items() if k.startswith(PREFIX)}
    if not given:
        return None
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = key.removeprefix(PREFIX)
        if name not in _NAMES:
            raise ConfigError("vllm_xargs", key, nearest(key, (PREFIX + n for n in _NAMES)))
        values[name] = _READERS[name](key, value)
    options = RequestOptions(**values)
    if options.eviction_ratio is not None and options.kv_budget_tokens is not None:
        raise ConfigError(
            "vtoken_eviction_ratio and vtoken_kv_budget_tokens",
            (options.eviction_ratio, options.kv_budget_tokens),
            "give one of them: a fraction dropped, or absolute live tokens",
        )
    if options.enabled is False and RequestOptions(**(values | {"enabled": None})).evicts:
        raise ConfigError("vtoken_enabled", False, "cannot be given with a policy or a budget")
    return options


def _bool(key: str, value: Any) -> bool:
    # JSON's true arrives as 1 or 1.0: vLLM declares these values as strings and numbers.
    for result, accepted in ((True, (1, "true", "1")), (False, (0, "false", "0"))):
        if value in accepted or (isinstance(value, str) and value.lower() in accepted):
            return result
    raise ConfigError(key, value, "true or false")


def _str(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(key, value, "a policy's name")
    return value


def _ratio(key: str, value: Any) -> float:
    return _number(key, value, "a fraction dropped, from 0 to below 1", lambda x: 0.0 <= x < 1.0)


def _tokens(key: str, value: Any) -> int:
    allowed = "a whole number of live tokens, 1 or more"
    return int(_number(key, value, allowed, lambda x: 1 <= x < 1e18 and x == int(x)))


def _number(key: str, value: Any, allowed: str, is_allowed: Callable[[float], bool]) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if isinstance(value, bool) or not is_allowed(number):
        raise ConfigError(key, value, allowed)
    return number


_READERS = {"enabled": _bool, "policy": _str, "eviction_ratio": _ratio, "kv_budget_tokens": _tokens}


def request_budget(
    config: VTokenConfig | None, options: RequestOptions | None, block_size: int
) -> Budget | None:
    """The budget of a request under the server's settings; None: it keeps every token.

    Args:
        config: the server's settings; None when the mode is native.

    Raises:
        ConfigError: the server does not evict, does not collect the scores that the policy
            needs, or the budget is below what the policy must keep.
    """
    if config is None or not config.evicts:
        if options is not None and options.evicts:
            mode = "native" if config is None else config.mode
            raise ConfigError(
                "vllm_xargs", _as_xargs(options),
                f"this server does not evict tokens (--mode {mode})",
            )  # fmt: skip
        return None
    if options is None:
        return config.make_budget(block_size)
    if options.enabled is False:
        return None
    own = _merged(config, options)
    budget = own.make_budget(block_size)
    assert budget is not None  # it evicts, as the server does
    _check_scores(config, own, budget, block_size)
    return budget


def _merged(config: VTokenConfig, options: RequestOptions) -> VTokenConfig:
    data = config.model_dump(exclude_unset=True)
    if options.policy is not None and options.policy != config.policy:
        data.pop("policy_args", None)  # they are parameters of the other policy
        data["policy"] = options.policy
    if options.eviction_ratio is not None or options.kv_budget_tokens is not None:
        data["eviction_ratio"] = options.eviction_ratio
        data["kv_budget_tokens"] = options.kv_budget_tokens
    return VTokenConfig.from_mapping(data)


def _check_scores(config: VTokenConfig, own: VTokenConfig, budget: Budget, block_size: int) -> None:
    needed = budget.policy.score_kind
    if needed is ScoreKind.NONE or own.policy == config.policy:
        return
    collected = config.make_policy(block_size).score_kind
    if needed is not collected:
        have = "none" if collected is ScoreKind.NONE else f"{collected.value} scores"
        raise ConfigError(
            "vtoken_policy", own.policy,
            f"needs {needed.value} scores, this server collects {have} for {config.policy}; "
            "streaming-llm, sliding-window and random need none",
        )  # fmt: skip


def _as_xargs(options: RequestOptions) -> dict[str, Any]:
    return {PREFIX + n: getattr(options, n) for n in _NAMES if getattr(options, n) is not None}

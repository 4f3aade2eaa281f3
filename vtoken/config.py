"""What a user can set, checked once: `VTokenConfig`.

The same keys everywhere: `additional_config={"vtoken": {...}}` of plain vLLM, `--config FILE.yaml`
and the command line (there with dashes, and a few shorter names, see `OPTION_NAMES`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vtoken.core.budget import Budget
from vtoken.errors import ConfigError, nearest
from vtoken.modes import EVICTING_MODES, Mode
from vtoken.policies.base import Policy
from vtoken.policies.registry import make_policy

OPTION_NAMES = {
    "eviction_interval_tokens": "--eviction-interval",
    "low_watermark_frac": "--low-watermark",
    "policy_args": "policy_args",
}


def option_name(key: str) -> str:
    """The command line's name of a config key."""
    return OPTION_NAMES.get(key, "--" + key.replace("_", "-"))


class VTokenConfig(BaseModel):
    """All settings of the token-level cache.

    Attributes:
        mode: `native` leaves vLLM alone; `indirection` installs hooks and tables only; `naive`
            evicts without relocation; `vtoken` evicts and reclaims.
        policy, policy_args: who names the victims, and its own parameters by field name.
        eviction_ratio, kv_budget_tokens: fraction dropped or absolute live tokens; neither: 0.5.
        sink_tokens, recent_tokens: None takes the policy's own.
        eviction_interval_tokens: live tokens above the budget at which eviction happens; None:
            one block.
        score_queries: prompt queries that count for scores, the last N of every chunk or "all".
        shared_prefix: what happens to tokens in blocks shared with other requests.
        record_decisions, replay_decisions: files of which ids died at which length.
        record_scores: file of score reports, for dry runs.
        max_moves_per_step: None is no limit.
        fragmentation_threshold: hole fraction at which a request is compacted; 0: always packed.
        evict_when: `always`, or `pressure`: only while the pool runs short.
        relocation: `inline` is what exists.
        low_watermark_frac: share of the pool that is kept free: below it compaction does not wait,
            and under `pressure` requests shrink until twice as much is free; admission leaves it.
        hash_kv_every: check I1/I2 with K/V hashes at every N-th relocation event; 0: never.
        seed: what policies' random draws depend on.
        trace: record every step's live ids (tests, verify).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    mode: Mode = "vtoken"
    policy: str = "h2o"
    policy_args: dict[str, Any] = Field(default_factory=dict)
    eviction_ratio: float | None = Field(None, ge=0.0, lt=1.0)
    kv_budget_tokens: int | None = Field(None, ge=1)
    sink_tokens: int | None = Field(None, ge=0)
    recent_tokens: int | None = Field(None, ge=0)
    eviction_interval_tokens: int | None = Field(None, ge=1)
    score_queries: Literal["all"] | int = 32
    shared_prefix: Literal["protect", "copy"] = "protect"
    record_decisions: str | None = None
    replay_decisions: str | None = None
    record_scores: str | None = None
    max_moves_per_step: int | None = Field(None, ge=0)
    fragmentation_threshold: float = Field(0.0, ge=0.0, lt=1.0)
    evict_when: Literal["always", "pressure"] = "always"
    relocation: Literal["inline"] = "inline"
    low_watermark_frac: float = Field(0.02, ge=0.0, lt=1.0)
    hash_kv_every: int = Field(0, ge=0)
    seed: int = Field(0, ge=0)
    trace: bool = False

    @model_validator(mode="before")
    @classmethod
    def _known_keys_only(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            for key in data:
                if key not in cls.model_fields:
                    raise ConfigError("vtoken config key", key, nearest(key, cls.model_fields))
        return data

    @model_validator(mode="after")
    def _one_budget(self) -> VTokenConfig:
        if self.eviction_ratio is not None and self.kv_budget_tokens is not None:
            raise ConfigError(
                "--eviction-ratio and --kv-budget-tokens",
                (self.eviction_ratio, self.kv_budget_tokens),
                "give one of them: a fraction dropped, or absolute live tokens",
            )
        if self.record_decisions and self.replay_decisions:
            raise ConfigError(
                "--replay-decisions",
                self.replay_decisions,
                "cannot be given with --record-decisions",
            )
        if isinstance(self.score_queries, int) and self.score_queries < 1:
            raise ConfigError(
                "--score-queries", self.score_queries, "`all`, or a whole number from 1"
            )
        return self

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> VTokenConfig:
        """Read settings.

        Raises:
            ConfigError: one sentence naming the option, the value and what is allowed.
        """
        try:
            return cls(**data)
        except ValidationError as error:
            raise _as_config_error(error) from None

    @property
    def run_files(self) -> list[str]:
        """Files that a run writes or follows."""
        given = (self.record_decisions, self.replay_decisions, self.record_scores)
        return [path for path in given if path]

    @property
    def evicts(self) -> bool:
        return self.mode in EVICTING_MODES

    @property
    def hooks_installed(self) -> bool:
        return self.mode != "native"

    @property
    def effective_ratio(self) -> float | None:
        """The ratio in force; None when the budget is absolute."""
        if self.kv_budget_tokens is not None:
            return None
        return 0.5 if self.eviction_ratio is None else self.eviction_ratio

    def interval_tokens(self, block_size: int) -> int:
        return self.eviction_interval_tokens or block_size

    def make_policy(self, block_size: int) -> Policy:
        """Build the policy.

        Raises:
            ConfigError: unknown policy or parameter.
        """
        return make_policy(
            self.policy,
            block_size=block_size,
            sink_tokens=self.sink_tokens,
            recent_tokens=self.recent_tokens,
            **self.policy_args,
        )

    def make_budget(self, block_size: int) -> Budget | None:
        """Build the budget; None when nothing is evicted.

        Raises:
            ConfigError: unknown policy, or a budget below what the policy must keep.
        """
        if not self.evicts:
            return None
        policy = self.make_policy(block_size)
        if self.kv_budget_tokens is not None and self.kv_budget_tokens < policy.floor_tokens:
            raise ConfigError(
                "--kv-budget-tokens",
                self.kv_budget_tokens,
                f"at least {policy.floor_tokens} for {self.policy}: sinks + recent + 1 "
                f"({policy.sink_tokens} + {policy.floor_tokens - policy.sink_tokens - 1} + 1)",
            )
        return Budget(
            policy=policy,
            eviction_ratio=self.effective_ratio,
            kv_budget_tokens=self.kv_budget_tokens,
            interval_tokens=self.interval_tokens(block_size),
        )


_ALLOWED = {
    "eviction_ratio": "a fraction dropped, from 0 to below 1",
    "fragmentation_threshold": "a hole fraction, from 0 to below 1",
    "low_watermark_frac": "a share of the pool, from 0 to below 1",
    "kv_budget_tokens": "a whole number of live tokens, 1 or more",
    "eviction_interval_tokens": "a whole number of tokens, 1 or more",
    "relocation": "`inline`: the copy-stream forms `async` and `sync` are not there yet",
    "score_queries": "`all`, or a whole number from 1",
}


def _as_config_error(error: ValidationError) -> ConfigError:
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause
    key = str(first["loc"][0]) if first["loc"] else "vtoken"
    return ConfigError(
        option_name(key), first.get("input"), _ALLOWED.get(key, first["msg"].lower())
    )

"""What a verification covers: policies x modes x block sizes x prefix caching x scheduling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from vtoken.config import VTokenConfig
from vtoken.engine.settings import EngineSettings
from vtoken.errors import ConfigError
from vtoken.policies.registry import make_policy

# name -> VTokenConfig fields. `holes` keeps holes and reuses them, `compacted` packs them late.
LAYOUTS: dict[str, dict[str, object]] = {
    "packed": {"mode": "vtoken", "eviction_interval_tokens": 4},
    "naive": {"mode": "naive", "eviction_interval_tokens": 4},
    "holes": {"mode": "vtoken", "eviction_interval_tokens": 12, "fragmentation_threshold": 0.5},
    "compacted": {
        "mode": "vtoken", "fragmentation_threshold": 0.25,  # interval: a block and a little
    },
}  # fmt: skip


def layouts_of(mode: str | None) -> list[str]:
    """Layouts that a mode makes; None for all.

    Raises:
        ConfigError: the mode relocates nothing, so there would be nothing to check.
    """
    found = [name for name, fields in LAYOUTS.items() if mode in (None, fields["mode"])]
    if not found:
        raise ConfigError(
            "--mode", mode, "naive or vtoken: without evictions there is nothing to verify"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """One engine of the matrix."""

    block_size: int
    prefix_caching: bool
    async_scheduling: bool

    @property
    def scheduling(self) -> str:
        return "async" if self.async_scheduling else "sync"

    def settings(self, base: dict[str, object]) -> EngineSettings:
        # Prompts are token ids: a tokenizer would only cost time at every start.
        more = {"skip_tokenizer_init": True, **base.get("vllm_args", {})}
        return EngineSettings(
            **{**base, "vllm_args": more},
            block_size=self.block_size,
            enable_prefix_caching=self.prefix_caching,
            async_scheduling=True if self.async_scheduling else None,
        )


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run: a policy and a layout on an engine."""

    engine: EngineKind
    policy: str
    layout: str

    def config(self, user: dict[str, object]) -> VTokenConfig:
        """The run's settings: the user's win over the layout's.

        Raises:
            ConfigError: a setting of the user's is wrong.
        """
        fields = {**LAYOUTS[self.layout], "policy": self.policy, "hash_kv_every": 1, "trace": True}
        fields.setdefault("eviction_interval_tokens", self.engine.block_size + 4)
        if "kv_budget_tokens" not in user and "eviction_ratio" not in user:
            policy = make_policy(
                self.policy, block_size=self.engine.block_size,
                sink_tokens=user.get("sink_tokens"), recent_tokens=user.get("recent_tokens"),
                **user.get("policy_args", {}),
            )  # fmt: skip
            fields["kv_budget_tokens"] = max(40, policy.floor_tokens + 3)
        return VTokenConfig.from_mapping({**fields, **user, "policy": self.policy})


PAIRWISE = (
    EngineKind(block_size=16, prefix_caching=True, async_scheduling=False),
    EngineKind(block_size=32, prefix_caching=False, async_scheduling=False),
    EngineKind(block_size=16, prefix_caching=False, async_scheduling=True),
    EngineKind(block_size=32, prefix_caching=True, async_scheduling=True),
)
"""Every pair of values of two dimensions occurs in one of these."""

ALL_KINDS = tuple(
    EngineKind(block_size=b, prefix_caching=c, async_scheduling=a)
    for a, c, b in product((False, True), (True, False), (16, 32))
)


def build_matrix(
    policies: Sequence[str], layouts: Sequence[str], *, full: bool
) -> dict[EngineKind, list[Cell]]:
    """Spread policies x layouts over engines.

    Args:
        full: every combination; else every policy and layout once, on the engines in turn.

    Raises:
        ConfigError: an unknown layout.
    """
    for name in layouts:
        if name not in LAYOUTS:
            raise ConfigError("layout", name, "one of " + ", ".join(LAYOUTS))
    cells: dict[EngineKind, list[Cell]] = {}
    for (i, policy), (j, layout) in product(enumerate(policies), enumerate(layouts)):
        # Each layout, and each policy, meets all four engines in turn.
        in_turn = PAIRWISE[(i + j + i // len(PAIRWISE)) % len(PAIRWISE)]
        for kind in ALL_KINDS if full else (in_turn,):
            cells.setdefault(kind, []).append(Cell(engine=kind, policy=policy, layout=layout))
    return cells

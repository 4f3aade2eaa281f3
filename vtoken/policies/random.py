"""Random eviction: the baseline that scatters holes most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vtoken.policies.base import Policy, Rule


@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """Drop tokens drawn evenly from all but the sinks and the newest block.

    Source: the baseline "Random" of the vToken paper (section 5.1), which states no parameters.

    What differs here: one draw serves all layers and heads, because vLLM's block table is shared
    by them. The draw depends on the seed, the prompt and the length alone, never on earlier draws,
    so two engines that reach the same length evict the same tokens.
    """

    name: ClassVar[str] = "random"
    rule: ClassVar[Rule] = Rule.RANDOM_DRAW

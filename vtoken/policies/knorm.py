"""Evict by key norm: no attention needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vtoken.policies.base import Policy, Rule, ScoreKind


@dataclass(frozen=True, kw_only=True)
class KNorm(Policy):
    """Drop the tokens whose keys have the highest L2 norm.

    Source: "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", Devoto,
    Zhao, Scardapane, Minervini, 2024 (EMNLP 2024). A low key norm goes with high attention. Its
    defaults: no sinks, no recent window, and no compression in the first layers (two for
    Llama-2-7b), where the correlation is weak.

    What differs here: the paper ranks in each layer and head apart. vLLM's block table is shared
    by all of them, so norms are summed over layers and heads and no layer can be left out; a head
    with large keys weighs more. Sinks (4) and the newest block are kept.

    Among equal norms the lower logical id is evicted first.
    """

    name: ClassVar[str] = "knorm"
    score_kind: ClassVar[ScoreKind] = ScoreKind.KEY_NORM
    rule: ClassVar[Rule] = Rule.HIGHEST_SCORE

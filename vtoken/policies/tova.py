"""Omit the token that the newest query attends to least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vtoken.policies.base import Policy, Rule, ScoreKind


@dataclass(frozen=True, kw_only=True)
class TOVA(Policy):
    """Drop the tokens with the lowest attention from the last query.

    Source: "Transformers are Multi-State RNNs", Oren, Hassid, Yarden, Adi, Schwartz, 2024
    (EMNLP 2024). Its defaults: no sinks and no recent window, one token dropped a step.

    What differs here: the paper averages over heads but decides in each layer apart. vLLM's block
    table is shared by all layers, so the attention is summed over layers too. Sinks (4) and the
    newest block are kept; `sink_tokens=0, recent_tokens=0` gives the paper's rule. Tokens are
    dropped an interval at a time, ranked by one query.

    Among equal scores the lower logical id is evicted first.
    """

    name: ClassVar[str] = "tova"
    score_kind: ClassVar[ScoreKind] = ScoreKind.LAST
    rule: ClassVar[Rule] = Rule.LOWEST_SCORE

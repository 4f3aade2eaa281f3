"""Choose what to protect by what the heads look at: special tokens, punctuation, ..."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from vtoken.policies.base import Policy, RequestView, ScoreKind
from vtoken.policies.parameters import check_fraction, check_ids
from vtoken.policies.selection import lowest

# A token's class: the first of these that fits. A profile keeps the classes from one up.
OTHER, LOCAL, FREQUENT, PUNCTUATION, SPECIAL = range(5)


@dataclass(frozen=True, kw_only=True)
class FastGen(Policy):
    """Protect the cheapest set of token classes that still draws most of the attention.

    The profiles grow, as in the paper: special tokens; and punctuation; and the most attended
    tokens (frequency); and the newest ones (local). The first whose tokens, with those that are
    kept anyway, hold at least `recovery_frac` of the request's attention is chosen; the widest
    where none does. Tokens outside the profile are evicted first, lowest score first; if the
    budget asks for more, its classes follow, the one added last first.

    Source: "Model Tells You What to Discard: Adaptive KV Cache Compression for LLMs", Ge, Zhang,
    Liu, Zhang, Han, Gao, 2023 (ICLR 2024). Its defaults: 0.3 of the sequence each for the
    frequency and the local profile, special tokens in every profile; the recovery target is what
    the paper varies.

    What differs here:
    * The paper chooses a profile for each head. vLLM's block table is shared by all layers and
      heads, so every head votes with its attention: the scores summed over layers and heads
      decide on one profile a request.
    * The paper fixes the profile after the prompt. Here it is chosen anew at each eviction, from
      all attention accumulated so far; evicted tokens no longer count.
    * The paper keeps what the profile names, however much that is, and everything in heads that
      no profile fits. Here the budget says how many tokens stay, the profile which; hence the two
      fractions are of the budget, and the full-cache profile cannot be offered.
    * What a special or punctuation token is depends on the vocabulary. Without `special_ids` and
      `punctuation_ids` only frequency and local are left.

    Among equal scores the lower logical id is evicted first.

    Attributes:
        special_ids, punctuation_ids: vocabulary ids; the engine fills in its tokenizer's.
        frequent_frac, local_frac: size of the two profiles, as a fraction of the budget.
        recovery_frac: share of the attention that a profile has to hold.
    """

    name: ClassVar[str] = "fastgen"
    score_kind: ClassVar[ScoreKind] = ScoreKind.ACCUMULATED
    needs_token_ids: ClassVar[bool] = True

    special_ids: tuple[int, ...] = ()
    punctuation_ids: tuple[int, ...] = ()
    frequent_frac: float = 0.3
    local_frac: float = 0.3
    recovery_frac: float = 0.95

    def __post_init__(self) -> None:
        for field in ("frequent_frac", "local_frac", "recovery_frac"):
            check_fraction(self.name, field, getattr(self, field))
        for field in ("special_ids", "punctuation_ids"):
            ids = check_ids(self.name, field, getattr(self, field))
            object.__setattr__(self, field, ids)  # a list from YAML would not be hashable

    def evict(self, view: RequestView) -> np.ndarray:
        ids, scores = self.scored_candidates(view)
        scored = ~np.isnan(scores)
        if not scored.all():
            ids, scores = ids[scored], scores[scored]
        classes = self.classes(view, ids, scores)
        profile = self.choose_profile(view, scores, classes)
        victims = lowest_of(ids, scores, classes < profile, view.num_evict)
        for token_class in range(profile, SPECIAL + 1):
            if len(victims) >= view.num_evict:
                break
            more = lowest_of(ids, scores, classes == token_class, view.num_evict - len(victims))
            victims = np.concatenate([victims, more])
        return victims

    def classes(self, view: RequestView, ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """int8[C], the class of each scored candidate."""
        out = self._vocabulary_classes(view.token_ids, ids)
        plain = np.flatnonzero(out == OTHER)
        num_frequent = int(self.frequent_frac * view.budget_tokens)
        rest = lowest(plain, scores[plain], len(plain) - num_frequent)
        out[plain] = FREQUENT
        out[rest] = OTHER
        num_local = int(self.local_frac * view.budget_tokens)
        newest = out[ids.searchsorted(np.int32(view.num_computed_tokens - num_local)) :]
        newest[newest == OTHER] = LOCAL
        return out

    def choose_profile(self, view: RequestView, scores: np.ndarray, classes: np.ndarray) -> int:
        """The lowest class that the chosen profile keeps: SPECIAL (cheapest) to LOCAL (widest)."""
        drawn = np.bincount(classes, scores, minlength=SPECIAL + 1)
        assert view.scores is not None
        low, high = self.candidate_range(view)
        kept_anyway = np.nansum(view.scores[:low], dtype=np.float64) + np.nansum(
            view.scores[high:], dtype=np.float64
        )
        total = kept_anyway + drawn.sum()
        # The slack keeps rounding from refusing a profile that holds everything.
        target = self.recovery_frac * total - 1e-9 * abs(total)
        for profile in (SPECIAL, PUNCTUATION, FREQUENT):
            if kept_anyway + drawn[profile:].sum() >= target:
                return profile
        return LOCAL

    @cached_property
    def _class_of_vocabulary_id(self) -> np.ndarray:
        """int8[V], class by vocabulary id; the last entry stands for larger ids and for -1."""
        size = max((*self.special_ids, *self.punctuation_ids), default=-1) + 2
        table = np.full(size, OTHER, np.int8)
        table[list(self.punctuation_ids)] = PUNCTUATION
        table[list(self.special_ids)] = SPECIAL
        return table

    def _vocabulary_classes(self, token_ids: np.ndarray | None, ids: np.ndarray) -> np.ndarray:
        """int8[C], SPECIAL, PUNCTUATION or OTHER by vocabulary; OTHER where the id is unknown."""
        out = np.full(len(ids), OTHER, np.int8)
        if token_ids is None:
            return out
        known = int(ids.searchsorted(np.int32(len(token_ids))))  # the newest may be missing
        table = self._class_of_vocabulary_id
        out[:known] = table[np.minimum(token_ids[ids[:known]], len(table) - 1)]
        return out


def lowest_of(ids: np.ndarray, scores: np.ndarray, members: np.ndarray, count: int) -> np.ndarray:
    """`lowest` among the entries where the mask `members` is set."""
    chosen = np.flatnonzero(members)  # taking by index is faster than by mask
    return lowest(ids[chosen], scores[chosen], count)


# How tokenizers write a space or line feed at the front of a token.
_BLANK_MARKS = " \t\r\n\u0120\u010a\u010d\u0109\u2581"


def punctuation_ids(vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    """Find the ids whose text is punctuation alone (Unicode category P), blanks aside.

    Args:
        vocabulary: token text to id, as a Hugging Face tokenizer's `get_vocab()` gives it.
    """
    found = []
    for text, token_id in vocabulary.items():
        text = text.strip(_BLANK_MARKS)
        if text and all(unicodedata.category(c).startswith("P") for c in text):
            found.append(token_id)
    return tuple(sorted(found))

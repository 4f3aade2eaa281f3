"""Made-up requests for `check_policy` and for tests of policies: single moments and whole lives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from vtoken.policies.base import Policy, RequestView, ScoreKind, budget_tokens

VOCABULARY_SIZE = 64
# The newest tokens' scores are still on their way to the scheduler.
NUM_UNSCORED_TOKENS = 2


@dataclass(frozen=True)
class PolicyCase:
    """One made-up request at the moment it must evict; the fields are those of `RequestView`."""

    live_ids: np.ndarray
    num_computed_tokens: int
    num_prompt_tokens: int
    budget_tokens: int
    num_evict: int
    scores: np.ndarray | None = None
    protected_tokens: int = 0
    token_ids: np.ndarray | None = None
    seed: int = 0
    prompt_hash: int = 0

    def view(self, *, lazy: bool = False) -> RequestView:
        """A view over copies of the arrays; `lazy` hands over functions, as the engine does."""
        fields: dict[str, Any] = dict(vars(self))
        for name in ("live_ids", "scores", "token_ids"):
            fields[name] = None if fields[name] is None else fields[name].copy()
        if lazy:
            live_ids, scores = fields["live_ids"], fields["scores"]
            fields["live_ids"] = lambda: live_ids
            fields["scores"] = None if scores is None else lambda: scores
        return RequestView(**fields)

    def __str__(self) -> str:
        unscored = 0 if self.scores is None else int(np.isnan(self.scores).sum())
        return (
            f"a request of {self.num_computed_tokens} computed tokens ({self.num_prompt_tokens} "
            f"prompt, {len(self.live_ids)} live, {self.protected_tokens} protected, {unscored} "
            f"without a score), budget {self.budget_tokens}, num_evict {self.num_evict}"
        )


def random_case(policy: Policy, gen: np.random.Generator, length: int | None = None) -> PolicyCase:
    """Draw a request: any length, live set, protection, scores (ties and gaps) and budget."""
    if length is None:
        length = int(gen.choice([gen.integers(0, 12), gen.integers(0, 64), gen.integers(0, 600)]))
    protected = int(gen.choice([0, 0, gen.integers(0, length + 1)]))
    live = np.ones(length, bool)
    if gen.random() < 0.7:
        live = gen.random(length) < gen.random()
        if gen.random() < 0.8:  # as in an engine: sinks, protected and newest tokens are there
            live[: max(protected, policy.sink_tokens)] = True
            live[max(0, length - policy.block_size) :] = True
    live_ids = np.flatnonzero(live).astype(np.int32)
    num_unprotected = int(np.count_nonzero(live_ids >= protected))
    budget = int(policy.floor_tokens + gen.choice([0, 1, gen.integers(0, length + 1)]))
    over = max(0, num_unprotected - budget)
    return PolicyCase(
        live_ids=live_ids,
        num_computed_tokens=length,
        num_prompt_tokens=int(gen.choice([length, gen.integers(0, 2 * length + 2)])),
        budget_tokens=budget,
        num_evict=int(gen.choice([over, over, 0, 1, gen.integers(0, length + 40)])),
        scores=_random_scores(policy, gen, len(live_ids)),
        protected_tokens=protected,
        token_ids=_random_token_ids(policy, gen, length),
        seed=int(gen.integers(0, 2**31)),
        prompt_hash=int(gen.integers(0, 2**63)),
    )


def _random_scores(policy: Policy, gen: np.random.Generator, count: int) -> np.ndarray | None:
    """float32[count]: spread, tied, all equal or huge; none, some or all of them missing."""
    if policy.score_kind is ScoreKind.NONE:
        return None
    spread = gen.random(count) ** 4 * gen.choice([1, 1e-6, 1e6])
    tied = gen.integers(0, 4, count)
    scores = (spread, tied, np.full(count, gen.integers(0, 2)))[gen.integers(3)].astype(np.float32)
    if policy.score_kind is ScoreKind.COUNT_ABOVE_THRESHOLD:
        scores = np.floor(np.minimum(scores, 1e4)).astype(np.float32)
    missing_frac = gen.choice([0, 0, 0.3, 1])
    scores[gen.random(count) < missing_frac] = np.nan
    scores[count - int(gen.integers(0, 3)) :] = np.nan
    return scores


def _random_token_ids(policy: Policy, gen: np.random.Generator, length: int) -> np.ndarray | None:
    """int32 vocabulary ids; the newest two may be missing, or a few more be known already."""
    if not policy.needs_token_ids:
        return None
    known = max(0, length + int(gen.integers(-2, 3)))
    return gen.integers(0, VOCABULARY_SIZE, known, np.int32)


def special_cases(policy: Policy, seed: int) -> Iterator[PolicyCase]:
    """Requests at the edges: empty, one token, just at sinks, window, floor and budget."""
    gen = np.random.default_rng([seed, 0])
    floor, recent = policy.floor_tokens, policy.recent(policy.floor_tokens)
    edges = {0, 1, 2, policy.sink_tokens, recent, policy.sink_tokens + recent, floor, floor + 1}
    for length in sorted({e + d for e in edges for d in (-1, 0, 1) if e + d >= 0}):
        for _ in range(2):
            yield random_case(policy, gen, length)


def live_lives(
    policy: Policy, seed: int, evict: Callable[[PolicyCase], np.ndarray], num_output: int = 120
) -> None:
    """Let requests grow from prompt to last token and call `evict` whenever the engine would.

    Three budgets (half, a tenth, the policy's floor) by three prompts (one token, fewer than the
    sinks, several chunks). `evict` returns the ids to drop.
    """
    gen = np.random.default_rng([seed, 2])
    for ratio, absolute in ((0.5, None), (0.9, None), (None, policy.floor_tokens)):
        for num_prompt, chunk in ((1, 1), (3, 3), (90, 32)):
            live, length = np.empty(0, np.int32), 0
            while length < num_prompt + num_output:
                grown = min(length + chunk, num_prompt) if length < num_prompt else length + 1
                live = np.append(live, np.arange(length, grown, dtype=np.int32))
                length = grown
                budget = budget_tokens(
                    length,
                    floor_tokens=policy.floor_tokens,
                    eviction_ratio=ratio,
                    kv_budget_tokens=absolute,
                )
                if len(live) >= budget + policy.block_size:
                    case = _grown_case(policy, gen, live, length, num_prompt, budget)
                    live = np.setdiff1d(live, evict(case)).astype(np.int32)


def _grown_case(
    policy: Policy,
    gen: np.random.Generator,
    live: np.ndarray,
    length: int,
    num_prompt: int,
    budget: int,
) -> PolicyCase:
    """The moment at which a living request is above its budget."""
    scores = _random_scores(policy, gen, len(live))
    if scores is not None:
        scores = np.nan_to_num(scores, nan=1.0)
        scores[live >= length - NUM_UNSCORED_TOKENS] = np.nan
    return PolicyCase(
        live_ids=live,
        num_computed_tokens=length,
        num_prompt_tokens=num_prompt,
        budget_tokens=budget,
        num_evict=len(live) - budget,
        scores=scores,
        token_ids=_random_token_ids(policy, gen, length),
    )

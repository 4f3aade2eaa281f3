"""Every built-in policy again, a few plain lines each, written from its paper.

Shares no code with `vtoken.policies`: lists, sorting and dictionaries instead of numpy, so that a
mistake would have to be made twice. Other tests import `reference_victims` to replay runs.
"""

from __future__ import annotations

import math

import numpy as np

SCORED = {"h2o", "tova", "knorm", "scissorhands", "snapkv", "fastgen"}


def reference_victims(
    name: str,
    *,
    live: list[int],
    L: int,
    prompt_len: int,
    budget: int,
    scores: list[float] | None = None,
    token_ids: list[int] | None = None,
    seed: int = 0,
    prompt_hash: int = 0,
    protected: int = 0,
    num_evict: int | None = None,
    sinks: int | None = None,
    recent: int | None = None,
    block: int = 16,
    **parameters,
) -> set[int]:
    """Name the ids that policy `name` evicts.

    Args:
        live: live logical ids. L: tokens computed so far. budget: live tokens allowed.
        scores: one per live id, NaN where there is none.
        num_evict: how many to name; None: as many as `live` is above the budget.
        sinks, recent: None takes the policy's default.
        parameters: the policy's other fields.
    """
    if sinks is None:
        sinks = 0 if name == "sliding-window" else 4
    if recent is None:
        recent = {
            "sliding-window": budget,
            "streaming-llm": budget - sinks,
            "h2o": min(budget // 2, budget - sinks),
        }.get(name, block)
    if num_evict is None:
        num_evict = max(0, len([i for i in live if i >= protected]) - budget)
    score = {}
    if name in SCORED:
        score = {i: float(s) for i, s in zip(live, scores, strict=False) if not math.isnan(s)}
    able = [i for i in sorted(live) if i >= sinks and i >= protected and i < L - recent]
    if name in SCORED:
        able = [i for i in able if i in score]

    if name in ("streaming-llm", "sliding-window"):
        order = able
    elif name == "random":
        gen = np.random.default_rng([seed, prompt_hash, L])
        count = min(num_evict, len(able))
        order = [able[j] for j in gen.choice(len(able), count, replace=False)] if count else []
    elif name in ("h2o", "tova"):
        order = sorted(able, key=lambda i: (score[i], i))
    elif name == "knorm":
        order = sorted(able, key=lambda i: (-score[i], i))
    elif name == "scissorhands":
        order = _scissorhands(able, score, L, prompt_len, **parameters)
    elif name == "snapkv":
        order = _snapkv(able, score, L - recent, **parameters)
    elif name == "fastgen":
        order = _fastgen(able, score, L, budget, token_ids, **parameters)
    else:
        raise KeyError(name)
    return set(order[:num_evict])


def _scissorhands(able, score, L, prompt_len, history_tokens=400):
    """Most steps without importance first, out of those that the history window saw."""
    unimportant = {}
    for i in able:
        steps = L - i if i >= prompt_len else 1 + max(0, L - prompt_len)
        steps = max([steps] + [score[j] for j in able if j >= i])
        unimportant[i] = min(steps, history_tokens) * (1 - score[i] / steps)
    return sorted(able, key=lambda i: (-unimportant[i], i))


def _snapkv(able, score, window_start, pool_tokens=7):
    """Lowest max-pooled attention first; the kept window takes no part in the pooling."""
    reach = pool_tokens // 2
    pooled = {
        i: max(score[j] for j in range(i - reach, i + reach + 1) if j in score and j < window_start)
        for i in able
    }
    return sorted(able, key=lambda i: (pooled[i], i))


def _fastgen(
    able,
    score,
    L,
    budget,
    token_ids,
    special_ids=(),
    punctuation_ids=(),
    frequent_frac=0.3,
    local_frac=0.3,
    recovery_frac=0.95,
):
    """Outside the cheapest sufficient profile first, then what the profile added last."""
    word = {i: token_ids[i] if i < len(token_ids) else None for i in able}
    special = {i for i in able if word[i] in special_ids}
    punctuation = {i for i in able if word[i] in punctuation_ids} - special
    rest = sorted(set(able) - special - punctuation, key=lambda i: (-score[i], -i))
    frequent = set(rest[: int(frequent_frac * budget)])
    local = {i for i in rest if i >= L - int(local_frac * budget)} - frequent
    total = sum(score.values())
    fixed = sum(s for i, s in score.items() if i not in able)
    added = [special, punctuation, frequent, local]
    for width in (1, 2, 3, 4):
        kept = set().union(*added[:width])
        if fixed + sum(score[i] for i in kept) >= recovery_frac * total - 1e-9 * total:
            break
    tier = {i: 0 for i in able}  # 0 goes first
    for position, members in enumerate(added[:width]):
        tier.update({i: 4 - position for i in members})
    return sorted(able, key=lambda i: (tier[i], score[i], i))

"""Scores for dry runs out of a file that `--record-scores` wrote.

    vtoken capacity-scan --policy h2o --mode vtoken --concurrency 8 --record-scores scores.jsonl
    vtoken capacity-scan --policy h2o --dry-run --replay-scores scores.jsonl ...

A request with a recorded prompt gets that prompt's scores. Others borrow those of a recorded one,
in turn: which ids die is then that request's, how many is their own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.core.budget import Budget
from vtoken.errors import ConfigError
from vtoken.policies.base import ScoreKind
from vtoken.policies.registry import policy_class, policy_names
from vtoken.recording.decisions import prompt_hash
from vtoken.recording.score_files import ScoreTrace

OPTION = "--replay-scores"
_SAME = ("policy", "eviction_ratio", "kv_budget_tokens", "sink_tokens", "recent_tokens")


class RecordedScores:
    """A recorded file, checked once; gives every dry engine a score source of its own.

    Args:
        config: of the runs; its policy, budget and windows must be those that were recorded, for
            ids that died in the recorded run have no scores.
        max_tokens: prompt + output of the longest request.

    Raises:
        ConfigError: no such file, another policy or budget, or requests longer than recorded.
    """

    def __init__(self, path: str, config: VTokenConfig, block_size: int, max_tokens: int) -> None:
        self.path = path
        budget = config.make_budget(block_size)
        self._trace = ScoreTrace(path, budget.policy.score_kind)
        self._check_header(config, budget)
        self.prompts = self._trace.prompts()
        if not self.prompts:
            raise ConfigError(OPTION, path, "a file with scores: in that run nothing was due")
        self._check_length(budget, max_tokens)

    def _check_header(self, config: VTokenConfig, budget: Budget) -> None:
        ours = {
            "policy": config.policy,
            "eviction_ratio": budget.eviction_ratio,
            "kv_budget_tokens": budget.kv_budget_tokens,
            "sink_tokens": budget.policy.sink_tokens,
            "recent_tokens": budget.policy.recent_tokens,
        }
        for name in _SAME:
            recorded = self._trace.header.get(name)
            if recorded != ours[name]:
                raise ConfigError(
                    OPTION, self.path, f"recorded with {name} {recorded!r}, this run has {ours[name]!r}"
                )  # fmt: skip

    def _check_length(self, budget: Budget, max_tokens: int) -> None:
        """Refuse requests that come to evict after the record of the shortest prompt has ended."""
        last = min(self._trace.lengths(prompt)[-1] for prompt in self.prompts)
        gone = max(0, last - int(budget.tokens(last)))
        if budget.next_eviction_len(gone, 0, last + 1) < max_tokens:
            raise ConfigError(
                OPTION, self.path,
                f"recorded up to {last:,} tokens of a request; here a request has {max_tokens:,}: "
                "record with prompts and outputs as long",
            )  # fmt: skip

    def source(self) -> Callable[[str, int, np.ndarray], np.ndarray]:
        """A new `score_source` of a dry engine."""
        return _Source(self._trace, self.prompts)


class _Source:
    """Knows which recorded prompt each request of one engine takes its scores from."""

    def __init__(self, trace: ScoreTrace, prompts: list[str]) -> None:
        self._trace, self._prompts = trace, prompts
        self._taken: dict[str, str] = {}
        self._num_borrowed = 0
        self._prompt_of = None

    def bind(self, prompt_of) -> None:
        """Learn how to find a request's prompt: `prompt_of(req_id) -> token ids`."""
        self._prompt_of = prompt_of

    def __call__(self, req_id: str, step_seq: int, ids: np.ndarray) -> np.ndarray:
        if req_id not in self._taken:
            own = prompt_hash(self._prompt_of(req_id))
            if not self._trace.lengths(own):
                own = self._prompts[self._num_borrowed % len(self._prompts)]
                self._num_borrowed += 1
            self._taken[req_id] = own
        return self._trace.scores(self._taken[req_id], int(ids.max()) + 1, ids)


def is_scored(policy: str) -> bool:
    """Whether a policy reads scores."""
    return policy_class(policy).score_kind != ScoreKind.NONE


def score_free_policies() -> list[str]:
    """Registered policies that read no scores."""
    return [policy for policy in policy_names() if not is_scored(policy)]

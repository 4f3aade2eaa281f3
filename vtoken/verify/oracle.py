"""What every request should hold and attend to, kept in dictionaries: {logical id: content}.

The oracle never looks at tables, layouts, slots or plans. It follows the scheduler's output (who
got how many tokens), decides evictions with a function of its own, and computes the contents of
`vtoken.verify.contents` over its dictionaries. Whatever the machine does with blocks, its
attention must have read exactly the contents that stand here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.verify.contents import Read, chunk_contents, clean_contents, sample, sum_of

SCORE_DELAY_STEPS = 2  # a decision uses the report of two steps ago
# Reports are asked for when a decision may come; where none was, it comes this much later.
MAX_LATE_STEPS = 2

# Tokens kept besides the recent window and the recent window where it does not follow the budget.
_SINKS = {"sliding-window": 0}
_FOLLOWS_BUDGET = {"streaming-llm", "sliding-window", "h2o"}
SCORED = {"h2o", "scissorhands", "fastgen", "snapkv", "tova", "knorm"}

Victims = Callable[..., set[int]]
"""(policy, live=, L=, prompt_len=, budget=, scores=, token_ids=, seed=, prompt_hash=, protected=,
num_evict=, sinks=, recent=, block=, **parameters) -> ids to evict."""


def made_up_score(prompt_hash: int, logical: int, num_computed_tokens: int) -> float:
    """A score that depends on nothing but the request's content; has ties."""
    return float(crc32(f"{prompt_hash} {logical} {num_computed_tokens // 8}".encode()) % 97)


@dataclass(frozen=True, slots=True)
class Rules:
    """When a request must shrink, and by how much: DESIGN's budget in a few lines."""

    config: VTokenConfig
    block_size: int

    @property
    def sinks(self) -> int:
        own = self.config.sink_tokens
        return own if own is not None else _SINKS.get(self.config.policy, 4)

    @property
    def floor(self) -> int:
        recent = self.config.recent_tokens
        if recent is None:
            recent = 0 if self.config.policy in _FOLLOWS_BUDGET else self.block_size
        return self.sinks + recent + 1

    @property
    def interval(self) -> int:
        return self.config.eviction_interval_tokens or self.block_size

    def budget(self, length: int) -> int:
        if self.config.kv_budget_tokens is not None:
            return max(self.floor, self.config.kv_budget_tokens)
        ratio = 0.5 if self.config.eviction_ratio is None else self.config.eviction_ratio
        return max(self.floor, math.ceil((1 - ratio) * length - 1e-9))


@dataclass
class OracleRequest:
    """Attributes:
    live: {logical id: content}. num_computed: ids handed out so far.
    reports: {step: (live ids, tokens computed) after it}; what scores of that step are about.
    num_late: steps since an eviction by scores was due, because there was no report for it.
    num_given: tokens known when it started: below that it prefills.
    """

    req_id: str
    tokens: list[int]
    num_prompt: int
    live: dict[int, int] = field(default_factory=dict)
    num_computed: int = 0
    reports: dict[int, tuple[set[int], int]] = field(default_factory=dict)
    num_late: int = 0
    num_given: int = 0

    @property
    def prompt_hash(self) -> int:
        return crc32(np.asarray(self.tokens[: self.num_prompt], np.int32).tobytes())


class Oracle:
    """The dictionaries of all requests.

    Args:
        config: None where the mode is native.
        victims: an implementation of the policies that is independent of the engine's. None takes
            the engine's recorded evictions on trust and checks only what is done with them.
    """

    def __init__(
        self, config: VTokenConfig | None, block_size: int, victims: Victims | None = None
    ) -> None:
        self.config = config
        self.rules = Rules(config, block_size) if config is not None and config.evicts else None
        self.victims = victims
        self.requests: dict[str, OracleRequest] = {}
        self.num_evicted = 0

    # ---- following the scheduler -----------------------------------------------------------

    def begin_step(
        self,
        step_seq: int,
        scheduler_output,
        protected: dict[str, set[int]],
        recorded: dict[str, np.ndarray],
    ) -> list[str]:
        """Take in who was scheduled; decide evictions of running requests.

        Args:
            protected: per running request, its ids in blocks shared with others, before the step.
            recorded: per scheduled request, the live ids that the engine says it attended to.

        Returns:
            What is wrong with the recorded ids.
        """
        for req_id in scheduler_output.finished_req_ids:
            self.requests.pop(req_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._start(new.req_id, list(new.prompt_token_ids), None, new.num_computed_tokens)
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if req_id in cached.resumed_req_ids:
                tokens = list(cached.all_token_ids[req_id])
                self._start(req_id, tokens, self.requests[req_id].num_prompt, num_computed)
            elif self.rules is not None and self.victims is not None:
                shared = protected.get(req_id, set())
                self._evict(self.requests[req_id], step_seq, shared, recorded[req_id])
        wrong = []
        for req_id, live_ids in recorded.items():
            if self.victims is None:
                wrong += self.follow(req_id, live_ids)
            elif set(live_ids.tolist()) != self.requests[req_id].live.keys():
                wrong.append(f"{req_id}: recorded other live ids than its policy leaves")
        return wrong

    def pass_over(
        self, req_id: str, step_seq: int, protected: set[int], live_ids: np.ndarray
    ) -> None:
        """A step did not reach a request, which may have lost tokens at its head all the same.

        Args:
            protected: as in `begin_step`.
            live_ids: what the engine holds; only whether it evicted is taken from there.
        """
        request = self.requests[req_id]
        if self.rules is not None and len(live_ids) < len(request.live):
            self._evict(request, step_seq, protected, live_ids)

    def _start(self, req_id: str, tokens: list[int], num_prompt: int | None, num_hits: int) -> None:
        """A request begins, or begins again: prefix hits hold what was computed without eviction."""
        request = OracleRequest(req_id, tokens, len(tokens) if num_prompt is None else num_prompt)
        request.live = dict(enumerate(clean_contents(tokens[:num_hits])))
        request.num_computed, request.num_given = num_hits, len(tokens)
        self.requests[req_id] = request

    def _evict(
        self, request: OracleRequest, step_seq: int, shared: set[int], recorded: np.ndarray
    ) -> None:
        shared = shared & request.live.keys()
        length = request.num_computed
        budget = self.rules.budget(length - len(shared))
        num_evict = len(request.live) - len(shared) - budget
        if num_evict < self.rules.interval:
            request.num_late = 0
            return
        free = sorted(request.live.keys() - shared)
        scores = None
        if self.config.policy in SCORED:
            if len(recorded) == len(request.live) and request.num_late < MAX_LATE_STEPS:
                request.num_late += 1
                return
            known, at = self._report(request, step_seq)
            scores = [
                made_up_score(request.prompt_hash, i, at) if i in known else math.nan for i in free
            ]
        request.num_late = 0
        gone = self.victims(
            self.config.policy, live=free, L=length, prompt_len=request.num_prompt,
            budget=budget, scores=scores, token_ids=request.tokens, seed=self.config.seed,
            prompt_hash=request.prompt_hash, protected=0, num_evict=num_evict,
            sinks=self.rules.sinks, recent=self.config.recent_tokens,
            block=self.rules.block_size, **self.config.policy_args,
        )  # fmt: skip
        self.drop(request, gone)

    @staticmethod
    def _report(request: OracleRequest, step_seq: int) -> tuple[set[int], int]:
        """The report of two steps ago; a deferred prompt goes by its last chunk's."""
        step = step_seq - SCORE_DELAY_STEPS
        if request.num_computed < request.num_given and step not in request.reports:
            step = max((s for s in request.reports if s <= step), default=step)
        return request.reports.get(step, (set(), 0))

    def drop(self, request: OracleRequest, ids: set[int]) -> None:
        """Forget these ids of a request."""
        for i in ids:
            del request.live[i]
        self.num_evicted += len(ids)

    def follow(self, req_id: str, live_ids: np.ndarray) -> list[str]:
        """Take the engine's evictions on trust (where there is no `victims`); dead stays dead."""
        request = self.requests[req_id]
        now = set(live_ids.tolist())
        if now - request.live.keys():
            return [f"{req_id}: ids {sorted(now - request.live.keys())} came back to life"]
        self.drop(request, request.live.keys() - now)
        return []

    # ---- checks ----------------------------------------------------------------------------

    def compute(self, req_id: str, step_seq: int, read: Read) -> list[str]:
        """Compute a request's new tokens, and compare what attention read on the way."""
        request = self.requests[req_id]
        wrong = []
        if read.first_id != request.num_computed:
            wrong.append(f"{req_id}: ids from {read.first_id} on, not from {request.num_computed}")
        expected = np.sort(np.fromiter(request.live.values(), np.uint64, len(request.live)))
        if not np.array_equal(expected, np.sort(read.contents)):
            wrong.append(self._describe(request, read))
        first, n = request.num_computed, read.num_new_tokens
        contents = chunk_contents(request.tokens[first : first + n], first, sum_of(expected))
        request.live.update(zip(range(first, first + n), contents, strict=True))
        request.num_computed = first + n
        if request.num_computed == len(request.tokens):
            request.tokens.append(sample(contents[-1]))
            if read.sampled != request.tokens[-1]:
                wrong.append(f"{req_id}: generated {read.sampled}, not {request.tokens[-1]}")
        request.reports[step_seq] = (set(request.live), request.num_computed)
        if len(request.reports) > SCORE_DELAY_STEPS + 1:
            del request.reports[min(request.reports)]
        return wrong

    @staticmethod
    def _describe(request: OracleRequest, read: Read) -> str:
        by_content = {c: i for i, c in request.live.items()}
        seen = [by_content.get(int(c)) for c in read.contents]
        missing = sorted(request.live.keys() - set(seen))
        foreign = [int(s) for s, i in zip(read.slots, seen, strict=True) if i is None]
        twice = sorted({i for i in seen if i is not None and seen.count(i) > 1})
        return (
            f"{request.req_id} at {read.first_id}+{read.num_new_tokens}: attention missed ids "
            f"{missing}, read ids {twice} twice, and slots {foreign} hold none of its tokens"
        )

    def check_slots(
        self, req_id: str, ids: np.ndarray, slots: np.ndarray, kv: np.ndarray
    ) -> list[str]:
        """I1: a table's live ids are the oracle's, and their slots hold their KV."""
        live = self.requests[req_id].live
        if set(ids.tolist()) != live.keys():
            extra, missing = set(ids.tolist()) - live.keys(), live.keys() - set(ids.tolist())
            return [f"{req_id}: ids {sorted(extra)} should be dead, {sorted(missing)} alive"]
        expected = np.fromiter((live[i] for i in ids.tolist()), np.uint64, len(ids))
        bad = np.flatnonzero(kv[slots] != expected)
        if len(bad):
            return [
                f"{req_id}: ids {ids[bad].tolist()} are not in their slots {slots[bad].tolist()}"
            ]
        return []

    def check_output(self, req_id: str, num_prompt: int, output: list[int]) -> list[str]:
        """A finished request generated what the oracle generates."""
        request = self.requests.get(req_id)
        if request is None:
            return []  # finished before it was ever scheduled
        expected = request.tokens[num_prompt : num_prompt + len(output)]
        return [] if output == expected else [f"{req_id}: generated {output}, not {expected}"]


class HashBook:
    """Which contents a cached block must hold, by prefix hash."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._expected: dict[bytes, np.ndarray] = {}
        self._clean: dict[str, list[int]] = {}

    def learn(self, req_id: str, token_ids: list[int], block_hashes: list[bytes]) -> None:
        """Note the contents behind a request's block hashes."""
        N = self.block_size
        known = self._clean.setdefault(req_id, [])
        done, wanted = len(known) // N, len(block_hashes)
        if wanted <= done:
            return
        rest = token_ids[done * N : wanted * N]
        known += chunk_contents(rest, done * N, sum(known) & ((1 << 64) - 1))
        for i in range(done, wanted):
            self._expected[block_hashes[i]] = np.array(known[i * N : (i + 1) * N], np.uint64)

    def check_block(self, block_id: int, block_hash: bytes, kv: np.ndarray) -> list[str]:
        """A block that can be hit holds exactly the KV of its token prefix, computed in full."""
        expected = self._expected.get(block_hash)
        if expected is None:
            return [f"block {block_id} is cached under a hash that no request has"]
        N = self.block_size
        held = kv[block_id * N : (block_id + 1) * N]
        bad = np.flatnonzero(held != expected)
        if len(bad):
            return [f"cached block {block_id}: offsets {bad.tolist()} do not hold its prefix's KV"]
        return []

"""Live tokens per block, watched while requests run, and what chance alone would leave there.

A block is counted while it is in vLLM's block table, or was: `naive` gives a block back when its last
token dies, and it counts as fully dead from then on. Shares are over blocks with a token in them.

Shape legend: T tokens, B blocks, N block size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from vtoken.core.budget import Budget
from vtoken.units import cdiv

SHARES = ("fully_dead", "partly_dead", "not_dead")


@dataclass(slots=True)
class BlockShares:
    """Counts of blocks by how many of their tokens are dead."""

    fully_dead: float = 0.0
    partly_dead: float = 0.0
    not_dead: float = 0.0

    def add(self, other: BlockShares) -> None:
        for name in SHARES:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def fracs(self) -> dict[str, float] | None:
        total = self.fully_dead + self.partly_dead + self.not_dead
        return {name: getattr(self, name) / total for name in SHARES} if total else None


@dataclass
class LayoutWatch:
    """Looks at every running request's layout after every few steps; pass it as `on_step`.

    Attributes:
        every: steps from one look to the next.
        histogram: int64[N + 1], blocks that are held by how many of their tokens are live.
        shares: over all looks.
        over_time: rows with step, the three shares and `expected_*` ones.
        budget: gives the expectation; None where nothing is evicted.
    """

    engine: object
    every: int = 4
    budget: Budget | None = None
    shares: BlockShares = field(default_factory=BlockShares)
    expected: BlockShares = field(default_factory=BlockShares)
    over_time: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.histogram = np.zeros(self.engine.block_size + 1, np.int64)
        self._chance: dict[int, ChanceModel] = {}
        self._step = 0

    def on_step(self, num_finished: int, num_output_tokens: int) -> None:
        self._step += 1
        running = self.engine.scheduler.running
        if self._step % self.every or not running:
            return
        seen, expected = BlockShares(), BlockShares()
        for request in running:
            # A prompt that is being read in chunks has not been thinned out yet.
            if request.num_computed_tokens < request.num_prompt_tokens:
                continue
            live, written = self._layout(request)
            self._count(live, written, seen)
            if self.budget is not None:
                expected.add(self._expect(request))
        self.shares.add(seen)
        self.expected.add(expected)
        if (fracs := seen.fracs()) is None:
            return
        row: dict[str, float] = {"step": self._step, **fracs}
        if chance := expected.fracs():
            row |= {f"expected_{name}": value for name, value in chance.items()}
        self.over_time.append(row)

    def _layout(self, request) -> tuple[np.ndarray, np.ndarray]:
        """(int[B], int[B]), live tokens and tokens ever written there, by block of the block table."""
        engine, N = self.engine, self.engine.block_size
        manager = engine.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        blocks = manager.req_to_blocks[request.request_id]
        hooks, length = engine.hooks, request.num_computed_tokens
        state = hooks.requests.by_id.get(request.request_id) if hooks is not None else None
        if state is None:
            written = np.clip(length - N * np.arange(len(blocks)), 0, N)
            self._add_to_histogram(written[written > 0])
            return written, written
        state.sync(length)
        live = state.table.live_per_block()
        written = np.clip(state.table.num_physical_tokens - N * np.arange(len(live)), 0, N)
        held = np.array([not b.is_null for b in blocks], bool)
        self._add_to_histogram(live[held & (written > 0)])
        return live, written

    def _add_to_histogram(self, live: np.ndarray) -> None:
        np.add.at(self.histogram, live, 1)

    @staticmethod
    def _count(live: np.ndarray, written: np.ndarray, into: BlockShares) -> None:
        used = written > 0
        into.fully_dead += int((used & (live == 0)).sum())
        into.not_dead += int((used & (live == written)).sum())
        into.partly_dead += int((used & (live > 0) & (live < written)).sum())

    def _expect(self, request) -> BlockShares:
        prompt_len = request.num_prompt_tokens
        if prompt_len not in self._chance:
            self._chance[prompt_len] = ChanceModel(self.budget, prompt_len, self.engine.block_size)
        return self._chance[prompt_len].at(request.num_computed_tokens)


class ChanceModel:
    """Shares of dead blocks, without relocation, if every victim were drawn by chance.

    Each token survives an eviction that takes k of E evictable live tokens with probability
    1 - k / E; a block of n tokens is fully dead with the product of their (1 - p), and not dead
    with the product of their p. What `random` does, up to draws without replacement; other
    policies differ from it by how much they keep together.

    Args:
        budget: of the request.
        prompt_len: tokens; the first eviction is after it.
    """

    def __init__(self, budget: Budget, prompt_len: int, block_size: int) -> None:
        self.budget, self.block_size = budget, block_size
        self.survival = np.ones(2 * prompt_len + block_size)
        self.length, self.num_evicted = prompt_len, 0.0
        self._evict_if_due()

    def at(self, num_computed_tokens: int) -> BlockShares:
        """Expected counts for a request of this length; lengths never go down."""
        assert num_computed_tokens >= self.length or num_computed_tokens == self.length
        while self.length < num_computed_tokens:
            self.length += 1
            self._evict_if_due()
        N, T = self.block_size, self.length
        survival = np.ones(cdiv(T, N) * N)
        survival[:T] = self._padded(T)[:T]
        is_token = (np.arange(len(survival)) < T).reshape(-1, N)
        by_block = survival.reshape(-1, N)
        fully = np.where(is_token, 1 - by_block, 1.0).prod(1).sum()
        none = by_block.prod(1).sum()
        return BlockShares(float(fully), float(len(by_block) - fully - none), float(none))

    def _padded(self, size: int) -> np.ndarray:
        if size > len(self.survival):
            grown = np.ones(2 * size)
            grown[: len(self.survival)] = self.survival
            self.survival = grown
        return self.survival

    def _evict_if_due(self) -> None:
        budget, L = self.budget, self.length
        kept = int(budget.tokens(L))
        live = L - self.num_evicted
        if live < kept + budget.interval_tokens:
            return
        first = budget.policy.sink_tokens
        last = max(first, L - budget.policy.recent(kept))
        evictable = self._padded(L)[first:last]
        if (pool := float(evictable.sum())) <= 0:
            return
        evictable *= max(0.0, 1.0 - (live - kept) / pool)
        self.num_evicted += min(live - kept, pool)

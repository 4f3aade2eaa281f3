"""One request driven through table operations by hand: a pool of its own, no scheduler, no vLLM.

Freed blocks are handed out again at once, so a move that came too late would read poison.
"""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np

from vtoken.core.budget import Budget
from vtoken.core.counters import Counters
from vtoken.core.invariants import check_block_table, check_step_plan, check_table
from vtoken.core.messages import StepPlan
from vtoken.core.ops import Change, LayoutRules, apply_to_block_table
from vtoken.core.reclaim import blocks_needed
from vtoken.core.scalar_ops import ScalarOps
from vtoken.core.table import RequestTable
from vtoken.scheduling.naming import request_view
from vtoken.testing.worker_model import WorkerModel, chunk_contents, sample, sum_of


class SoloRequest:
    """Attributes:
    live: {logical id: content}, what should be held; kept by the caller's own reckoning.
    block_table: the pool's; placeholders are 0.
    last: what the last step's plan says of the request, None where it says nothing.
    """

    def __init__(
        self, budget: Budget | None, *, block_size: int = 4, num_blocks: int = 40,
        moves: bool = True, fragmentation_threshold: float = 0.0,
    ) -> None:  # fmt: skip
        self.block_size, self.budget = block_size, budget
        self.counters, self.ops = Counters(), ScalarOps()
        self.rules = LayoutRules(moves=moves, fragmentation_threshold=fragmentation_threshold)
        self.table = RequestTable("r", block_size)
        self.num_protected = 0
        self.change: Change | None = None
        self.worker = WorkerModel(num_blocks + 1, block_size)
        self.free = list(range(num_blocks, 0, -1))
        self.block_table: list[int] = []
        self.live: dict[int, int] = {}
        self.tokens = [30 + i % 7 for i in range(400)]
        self.length = self.num_steps = 0
        self.last = None

    def sync(self) -> None:
        self.table.sync_new_tokens(self.block_table[self.table.num_blocks :], self.length)

    def num_above_budget(self) -> int:
        live = self.length - self.table.num_evicted_tokens - self.num_protected
        return live - self.budget.tokens(self.length - self.num_protected)

    def named(self, num_evict: int, protected_ids=None, scores=None) -> np.ndarray:
        """What the policy names, ascending."""
        view = request_view(
            self.table, self.budget, num_evict, protected_ids, scores, num_prompt_tokens=8,
            num_protected=self.num_protected, seed=0, prompt_hash=77,
        )  # fmt: skip
        return np.sort(self.budget.policy.evict(view))

    def due_victims(self) -> np.ndarray:
        """What the policy evicts now; empty when nothing is due."""
        if self.budget is None or self.num_above_budget() < self.budget.interval_tokens:
            return np.empty(0, np.int32)
        return self.named(self.num_above_budget())

    def step(self, n: int, victims=None, pinned: np.ndarray | None = None, **change) -> None:
        """Schedule n tokens, after evicting `victims` (None: what the policy says)."""
        self.num_steps += 1
        fresh, plan = self.length == 0, None
        if not fresh:
            self.sync()
            victims = self.due_victims() if victims is None else np.asarray(victims, np.int32)
            if len(victims) or change:
                self._evict(victims, n, pinned, **change)
        grown = self._allocate(n)
        if not fresh:
            plan = self._place(n)
        self.last = None if plan is None else _of_one(plan)
        self._work(plan, n, grown, fresh)
        self.check()

    def _evict(self, victims, n, pinned, **change) -> None:
        for i in victims:
            del self.live[int(i)]
        self.change = Change(self.table, self.rules, n, pinned=pinned, **change)
        self.ops.evict([self.change], victims, [len(victims)])
        if len(victims):
            self.counters.note_evicted([self.change], len(victims))
        self.counters.dropped_blocks += len(self.change.released)
        self.free += reversed(apply_to_block_table(self.change, self.block_table, 0))

    def _place(self, n: int) -> StepPlan | None:
        holes = self.rules.moves and n == 1 and len(self.table.holes)
        if self.change is None and not holes:
            return None
        change, self.change = self.change or Change(self.table, self.rules), None
        plan = self.ops.place([change], [n], lambda e, first: self.block_table[first:])
        self.counters.note_placed([change], plan)
        plan = pickle.loads(pickle.dumps(plan))
        wrong = check_step_plan(plan, len(self.worker.kv), set(), self.block_size)
        assert not wrong, wrong
        return plan

    def _allocate(self, n: int) -> list[int]:
        if n == 0:
            return []
        table = self.table
        if table.num_computed_tokens == 0:
            needed = -(-n // self.block_size)
        elif not self.rules.moves:
            needed = -(-(table.num_computed_tokens + n) // self.block_size)
        else:
            packs = self.change is not None and self.change.packs
            needed = blocks_needed(table, n, packs=packs)
        grown = [self.free.pop() for _ in range(needed - len(self.block_table))]
        self.block_table += grown
        return grown

    def _work(self, plan, n: int, grown: list[int], fresh: bool) -> None:
        """Hand the step to the worker model; hold what it read against `live`."""
        tokens = self.tokens[: max(self.length + n, 1)]
        new = SimpleNamespace(
            req_id="r", prompt_token_ids=tokens, block_ids=[self.block_table], num_computed_tokens=0
        )
        cached = SimpleNamespace(
            req_ids=[] if fresh or not n else ["r"], resumed_req_ids=set(), all_token_ids={},
            new_block_ids=[(grown,)] if grown else [None], num_computed_tokens=[self.length],
        )  # fmt: skip
        if fresh or not n:
            cached.num_computed_tokens = []
        elif "r" in self.worker.requests:
            self.worker.requests["r"].tokens = list(tokens)
        output = SimpleNamespace(
            finished_req_ids=(), scheduled_new_reqs=[new] if fresh else [],
            scheduled_cached_reqs=cached, num_scheduled_tokens={"r": n} if n else {},
        )  # fmt: skip
        self.worker.execute(output, plan)
        if not n:
            return
        read = self.worker.reads["r"]
        expected = np.sort(np.fromiter(self.live.values(), np.uint64, len(self.live)))
        assert np.array_equal(np.sort(read.contents), expected), "attention read other tokens"
        first = self.length
        contents = chunk_contents(tokens[first : first + n], first, sum_of(expected))
        self.live.update(zip(range(first, first + n), contents, strict=True))
        self.length += n
        assert read.sampled == sample(contents[-1])

    def check(self) -> None:
        """All invariants; every live token in its slot; every block accounted for."""
        self.sync()
        table = self.table
        wrong = check_table(table) + check_block_table(table, self.block_table)
        assert not wrong, wrong
        ids = table.live_ids()
        assert ids.tolist() == sorted(self.live)
        held = self.worker.kv[table.slots_of(table.index_of[ids])]
        assert held.tolist() == [self.live[int(i)] for i in ids]
        owned = [b for b in self.block_table if b]
        assert sorted(owned + self.free) == list(range(1, self.worker.num_blocks))


def _of_one(plan: StepPlan) -> SimpleNamespace:
    """A plan's entry of its only request."""
    source, destination = plan.moves_of(0)
    return SimpleNamespace(
        num_reclaimed=int(plan.num_reclaimed[0]), new_token_index=int(plan.new_token_index[0]),
        mask_kind=int(plan.mask_kind[0]), move_source=source, move_destination=destination,
        kept=plan.kept_of(0) if plan.rewrites_block_table[0] else None,
    )  # fmt: skip

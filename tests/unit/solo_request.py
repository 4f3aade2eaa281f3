"""One request driven through the planner by hand: a pool of its own, no scheduler, no vLLM.

Freed blocks are handed out again at once, so a move that came too late would read poison.
"""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np

from vtoken.core.budget import Budget
from vtoken.core.events import Counters, build_step_plan
from vtoken.core.invariants import check_row, check_step_plan, check_table
from vtoken.core.planner import PlannerSettings, RequestPlanner, RequestState
from vtoken.core.table import RequestTable
from vtoken.testing.worker_model import WorkerModel, chunk_contents, sample, sum_of


class SoloRequest:
    """Attributes:
    live: {logical id: content}, what should be held; kept by the caller's own reckoning.
    row: the pool's row; placeholders are 0.
    last: the RequestStep of the last step; release: its Release.
    """

    def __init__(
        self, budget: Budget | None, *, block_size: int = 4, num_blocks: int = 40,
        moves: bool = True, fragmentation_threshold: float = 0.0,
    ) -> None:  # fmt: skip
        self.block_size = block_size
        self.counters = Counters()
        settings = PlannerSettings(moves=moves, fragmentation_threshold=fragmentation_threshold)
        self.planner = RequestPlanner(settings, self.counters)
        self.state = RequestState(RequestTable("r", block_size), budget, 8, prompt_hash=77)
        self.worker = WorkerModel(num_blocks + 1, block_size)
        self.free = list(range(num_blocks, 0, -1))
        self.row: list[int] = []
        self.live: dict[int, int] = {}
        self.tokens = [30 + i % 7 for i in range(400)]
        self.length = self.num_steps = 0
        self.last = self.release = None

    @property
    def table(self) -> RequestTable:
        return self.state.table

    def sync(self) -> None:
        self.table.sync(self.row[self.table.num_blocks :], self.length)

    def due_victims(self, pinned_ids=None) -> np.ndarray:
        """What the policy evicts now; empty when nothing is due."""
        state = self.state
        num_evict = self.planner.num_to_evict(state, self.length) if state.budget else 0
        if not state.budget or num_evict < state.budget.interval_tokens:
            return np.empty(0, np.int32)
        return self.planner.decide(state, num_evict=num_evict, protected_ids=pinned_ids)

    def step(self, n: int, victims=None, pinned: np.ndarray | None = None, **execute) -> None:
        """Schedule n tokens, after evicting `victims` (None: what the policy says)."""
        self.num_steps += 1
        fresh = self.length == 0
        if not fresh:
            self.sync()
            victims = self.due_victims() if victims is None else np.asarray(victims, np.int32)
            if len(victims) or execute:
                self._execute(victims, n, pinned, **execute)
        grown = self._allocate(n)
        self.last = (
            None if fresh else self.planner.finalize(self.state, n, lambda start: self.row[start:])
        )
        plan = build_step_plan(self.num_steps, [self.last] if self.last else [], [])
        if plan is not None:
            plan = pickle.loads(pickle.dumps(plan))
            wrong = check_step_plan(plan, len(self.worker.kv), set(), self.block_size)
            assert not wrong, wrong
        self._work(plan, n, grown, fresh)
        self.check()

    def _execute(self, victims, n, pinned, **execute) -> None:
        for i in victims:
            del self.live[int(i)]
        self.release = release = self.planner.execute(self.state, victims, n, pinned, **execute)
        if release is None:
            return
        self.free += [self.row[i] for i in release.released]
        if release.leaves_placeholder:
            for i in release.released:
                self.row[i] = 0
        elif release.kept is not None:
            self.row = [self.row[i] for i in release.kept]

    def _allocate(self, n: int) -> list[int]:
        if n == 0:
            return []
        if self.table.num_computed_tokens == 0:
            needed = -(-n // self.block_size)
        else:
            needed = self.planner.num_blocks_needed(self.state, n)
        grown = [self.free.pop() for _ in range(needed - len(self.row))]
        self.row += grown
        return grown

    def _work(self, plan, n: int, grown: list[int], fresh: bool) -> None:
        """Hand the step to the worker model; hold what it read against `live`."""
        tokens = self.tokens[: max(self.length + n, 1)]
        new = SimpleNamespace(
            req_id="r", prompt_token_ids=tokens, block_ids=[self.row], num_computed_tokens=0
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
        wrong = check_table(table) + check_row(table, self.row)
        assert not wrong, wrong
        ids = table.live_ids()
        assert ids.tolist() == sorted(self.live)
        held = self.worker.kv[table.slots_of(table.index_of[ids])]
        assert held.tolist() == [self.live[int(i)] for i in ids]
        owned = [b for b in self.row if b]
        assert sorted(owned + self.free) == list(range(1, self.worker.num_blocks))

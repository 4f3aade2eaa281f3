"""Many requests at once, in numpy and compiled, against one at a time: the same plans, tables and
counts, to the byte."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtoken.core import planner as planner_module
from vtoken.core.batch import ScoredIds, Tables
from vtoken.core.batch_planner import execute_batch, finalize_batch
from vtoken.core.budget import Budget
from vtoken.core.events import Counters, build_step_plan
from vtoken.core.invariants import check_table
from vtoken.core.planner import PlannerSettings, RequestPlanner, RequestState
from vtoken.core.table import RequestTable, TokenTable
from vtoken.kernels.tables import load_ops
from vtoken.policies.base import BatchView, RequestView
from vtoken.policies.random import Random
from vtoken.policies.registry import make_policy
from vtoken.policies.streaming_llm import StreamingLLM

compiled_here = load_ops().name == "compiled"
needs_compiled = pytest.mark.skipif(not compiled_here, reason="no C++ compiler: numpy alone")


def all_sides(num_requests: int, block_size: int) -> list[Side]:
    """The same requests one by one, together in numpy, and together compiled."""
    sides = [Side(num_requests, block_size, together) for together in (False, True)]
    if compiled_here:
        sides.append(Side(num_requests, block_size, True, load_ops()))
    return sides


class Side:
    """E requests, in one arena or each in its own; block ids are never used twice."""

    def __init__(self, num_requests: int, block_size: int, together: bool, ops=None) -> None:
        self.N, self.together = block_size, together
        self.counters = Counters()
        self.planner = RequestPlanner(PlannerSettings(moves=True), self.counters)
        tables = TokenTable(block_size, ops)
        self.states = [
            RequestState(
                tables.add(f"r{e}") if together else RequestTable(f"r{e}", block_size), None, 8, 1
            )
            for e in range(num_requests)
        ]
        self.rows: list[list[int]] = [[] for _ in self.states]
        self.next_id = [1000 * (e + 1) for e in range(num_requests)]

    def allocate(self, e: int, num_blocks: int) -> None:
        while len(self.rows[e]) < num_blocks:
            self.rows[e].append(self.next_id[e])
            self.next_id[e] += 1

    def grow(self, growth: list[int]) -> None:
        """Append tokens to every request."""
        tables = [s.table for s in self.states]
        lengths = [t.num_computed_tokens + g for t, g in zip(tables, growth, strict=True)]
        for e, (t, g) in enumerate(zip(tables, growth, strict=True)):
            self.allocate(e, -(-(t.num_physical_tokens + g) // self.N))
        new = [row[t.num_blocks :] for row, t in zip(self.rows, tables, strict=True)]
        if self.together:
            Tables(tables).sync(new, lengths)
        else:
            for t, blocks, length in zip(tables, new, lengths, strict=True):
                t.sync(blocks, length)

    def step(self, due: list[int], victims: list[np.ndarray], num_new: list[int], expected: int):
        states = [self.states[e] for e in due]
        if self.together:
            counts = [len(v) for v in victims]
            event = execute_batch(states, np.concatenate(victims), counts, expected, self.counters)
            released, last = event.eviction.gone, event.eviction.last
            rewritten = [[] for _ in due]
            for i, pos in zip(*event.rewritten(), strict=True):
                rewritten[i].append(pos)
            for i, e in enumerate(due):
                row = self.rows[e]
                block = row[last[i]]
                for pos in sorted({*released[i], last[i]}, reverse=True):
                    del row[pos]
                row.append(block)
            self._allocate_new(due, num_new)
            batch, num_moved = finalize_batch(
                event, num_new, lambda i, start: self.rows[due[i]][start:], self.counters
            )
            assert num_moved == np.diff(batch.move_start).tolist()
            steps = []
        else:
            released, rewritten = [], []
            for e, state, ids in zip(due, states, victims, strict=True):
                release = self.planner.execute(state, ids, expected)
                released.append(release.released.tolist())
                rewritten.append(release.rewritten.tolist())
                if release.kept is not None:
                    self.rows[e] = [self.rows[e][i] for i in release.kept]
            self._allocate_new(due, num_new)
            batch = None
            steps = [
                self.planner.finalize(state, n, lambda start, e=e: self.rows[e][start:])
                for e, state, n in zip(due, states, num_new, strict=True)
            ]
        return released, rewritten, build_step_plan(3, steps, [], batch=batch)

    def _allocate_new(self, due: list[int], num_new: list[int]) -> None:
        for e, n in zip(due, num_new, strict=True):
            if n:
                self.allocate(e, self.planner.num_blocks_needed(self.states[e], n))


def assert_same_tables(one: Side, many: Side) -> None:
    for a, b in zip(one.states, many.states, strict=True):
        a, b = a.table, b.table
        for name in ("num_computed_tokens", "num_physical_tokens", "num_live_tokens", "num_blocks"):
            assert getattr(a, name) == getattr(b, name), name
        L, B = a.num_computed_tokens, a.num_blocks
        assert np.array_equal(a.index_of[:L], b.index_of[:L])
        assert np.array_equal(a.row[:B], b.row[:B])
        assert np.array_equal(a.ids_by_physical_index(), b.ids_by_physical_index())
        assert np.array_equal(a.row_block_ids(), b.row_block_ids())
        assert np.array_equal(a.live_per_block(), b.live_per_block())
        assert not check_table(a) and not check_table(b)


def assert_same_plans(a, b) -> None:
    assert (a is None) == (b is None)
    for f in fields(a) if a is not None else ():
        x, y = getattr(a, f.name), getattr(b, f.name)
        if isinstance(x, np.ndarray):
            assert x.dtype == y.dtype and x.tobytes() == y.tobytes(), f.name
        else:
            assert x == y, f.name


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.sampled_from([1, 4, 16]))
def test_a_batch_does_what_one_after_another_does(seed, num_requests, block_size):
    rng = np.random.default_rng(seed)
    one, *others = sides = all_sides(num_requests, block_size)
    start = rng.integers(1, 12 * block_size + 2, num_requests).tolist()
    for side in sides:
        side.grow(start)
    for _ in range(6):
        due, victims = [], []
        for e, state in enumerate(one.states):
            live = state.table.live_ids()
            if len(live) > 1 and rng.random() < 0.8:
                most = len(live) - 1 if rng.random() < 0.2 else min(len(live) - 1, block_size + 2)
                count = int(rng.integers(1, most + 1))
                if rng.random() < 0.5:
                    at = int(rng.integers(0, len(live) - count + 1))
                    ids = live[at : at + count]  # in a run, as streaming does
                else:
                    ids = np.sort(rng.choice(live, count, replace=False))
                due.append(e)
                victims.append(ids)
        if due:
            expected = int(rng.choice([1, 1, 1, block_size + 3]))
            num_new = rng.choice([0, 1, 1, 1, 1, expected], len(due)).tolist()
            a, *rest = (side.step(due, victims, num_new, expected) for side in sides)
            for b in rest:
                assert a[:2] == b[:2]
                assert_same_plans(a[2], b[2])
        growth = rng.integers(0, 2 * block_size + 2, num_requests).tolist()
        for side in sides:
            side.grow(growth)
        for many in others:
            assert one.rows == many.rows
            assert_same_tables(one, many)
    assert all(one.counters == many.counters for many in others)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_requests_that_left_do_not_change_the_others(seed, compiled):
    """A batch is cut down when a request is preempted after its eviction."""
    rng = np.random.default_rng(seed)
    one, many = Side(4, 4, False), Side(4, 4, True, load_ops() if compiled else None)
    start = rng.integers(8, 60, 4).tolist()
    one.grow(start), many.grow(start)
    victims = [np.sort(rng.choice(n, int(rng.integers(1, n)), replace=False)) for n in start]
    stays = rng.random(4) < 0.6
    stays[int(rng.integers(4))] = True
    due = np.flatnonzero(stays).tolist()
    _, _, expected = one.step(due, [victims[e] for e in due], [1] * len(due), 1)
    counts = [len(v) for v in victims]
    event = execute_batch(many.states, np.concatenate(victims), counts, 1, many.counters)
    event = event.only(stays)
    for e in due:
        i, eviction = due.index(e), event.eviction
        row, gone, last = many.rows[e], eviction.gone[i], eviction.last[i]
        many.rows[e] = [b for p, b in enumerate(row) if p not in {*gone, last}] + [row[last]]
    many._allocate_new(due, [1] * len(due))
    batch, _ = finalize_batch(
        event, [1] * len(due), lambda i, start: many.rows[due[i]][start:], many.counters
    )
    assert_same_plans(expected, build_step_plan(3, [], [], batch=batch))


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["streaming-llm", "sliding-window"]),
    st.sampled_from([None, 0, 3, 9]),
)
def test_evict_many_names_what_evict_names(seed, name, recent):
    rng = np.random.default_rng(seed)
    policy = make_policy(name, block_size=4, recent_tokens=recent)
    sides = all_sides(4, 4)
    start = rng.integers(1, 60, 4).tolist()
    for side in sides:
        side.grow(start)
    for _ in range(4):
        counts = rng.integers(0, 12, 4).tolist()
        budget = rng.integers(1, 30, 4).tolist()
        length = [s.table.num_computed_tokens for s in sides[0].states]
        named = []
        for side in sides[1:]:
            oldest = Tables([s.table for s in side.states]).oldest
            ids, found = policy.evict_many(BatchView(length, budget, counts, oldest))
            named.append(np.split(ids, np.cumsum(found)[:-1]))
        for e, state in enumerate(sides[0].states):
            view = RequestView(
                live_ids=state.table.live_ids, num_computed_tokens=int(length[e]),
                num_prompt_tokens=4, budget_tokens=int(budget[e]), num_evict=int(counts[e]),
                oldest=state.table.oldest,
            )  # fmt: skip
            expected = policy.evict(view)
            assert all(parts[e].tolist() == expected.tolist() for parts in named)
            gone = expected[: max(0, len(expected) - int(rng.integers(0, 2)))]
            if len(gone):
                for side in sides:
                    side.states[e].table.evict(gone)
        growth = rng.integers(0, 9, 4).tolist()
        for side in sides:
            for state, g in zip(side.states, growth, strict=True):
                side.allocate(side.states.index(state), 60)
                table = state.table
                row = side.rows[side.states.index(state)]
                table.sync(row[table.num_blocks :], table.num_computed_tokens + g)


def test_what_a_policy_hands_over_may_be_arrays():
    for side in all_sides(2, 4)[1:]:
        side.grow([20, 30])
        given = [3, 5], [4, 9], [20, 12]  # counts, first ids, end ids
        oldest = Tables([s.table for s in side.states]).oldest
        for parts in (given, [np.array(part) for part in given]):
            ids, counts = oldest(*parts)
            assert ids.tolist() == [4, 5, 6, 9, 10, 11] and counts == [3, 3]


def test_a_subclass_with_another_rule_has_no_batch_form():
    class Newest(StreamingLLM):
        def evict(self, view):
            return view.live_ids[-view.num_evict :]

    class Last(Random):
        def evict(self, view):
            return view.live_ids[-view.num_evict :]

    assert Newest.evict_many is None and Last.evict_many is None
    assert StreamingLLM.evict_many is not None
    assert type(make_policy("sliding-window", block_size=4)).evict_many is not None


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["h2o", "tova", "knorm"]), st.booleans())
def test_ranking_by_id_names_what_ranking_live_tokens_names(seed, name, coarse):
    """Ties, ids without a score, and ids that have one although they died since."""
    rng = np.random.default_rng(seed)
    policy = make_policy(name, block_size=4, sink_tokens=2, recent_tokens=int(rng.integers(0, 6)))
    L = int(rng.integers(4, 80))
    is_live = rng.random(L) < rng.choice([0.5, 0.9, 1.0])
    scores = rng.integers(0, 4, L) if coarse else rng.random(L)
    scores = scores.astype(np.float32)
    scores[rng.random(L) < 0.2] = np.nan
    if rng.random() < 0.5:
        scores[~is_live] = np.nan
    common = {
        "num_computed_tokens": L, "num_prompt_tokens": 4, "budget_tokens": 12,
        "num_evict": int(rng.integers(1, 12)), "protected_tokens": int(rng.integers(0, 5)),
    }  # fmt: skip
    live = np.flatnonzero(is_live).astype(np.int32)
    plain = RequestView(live_ids=live, scores=scores[live], **common)
    by_id = RequestView(
        live_ids=live, scores=scores[live], scores_by_id=scores,
        all_live=lambda ids: bool(is_live[ids].all()), **common,
    )  # fmt: skip
    expected, found = policy.evict(plain), policy.evict(by_id)
    assert found.dtype == expected.dtype and found.tolist() == expected.tolist()


def given_all(side: Side, rng, scores: list[np.ndarray]) -> list[ScoredIds]:
    """Reports about the present layout, at odd places: of the table's ids, holes with a score too;
    or of listed ones, in another order and with some of the dead among them."""
    parts = []
    for state, by_id in zip(side.states, scores, strict=True):
        ids, given = state.table.ids_by_physical_index(), None
        if rng.random() < 0.5:
            ids = np.append(ids, np.flatnonzero(by_id < 0.1))
            ids = given = np.unique(ids)[::-1].astype(np.int32)
        found = np.where(ids >= 0, by_id[ids], np.float32(-9))
        start = int(rng.integers(0, 3))
        found = np.concatenate([np.full(start, np.nan), found, np.zeros(2)]).astype(np.float32)
        parts.append(ScoredIds(given, found, start, len(ids)))
    return parts


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["h2o", "knorm", "random"]), st.booleans())
def test_scores_and_ranks_name_what_they_name_for_one(seed, name, coarse):
    """Ties, NaN, infinities, dead ids with a score; more wanted than there is; long contexts."""
    rng = np.random.default_rng(seed)
    E, sides = 3, all_sides(3, 16)
    policy = make_policy(name, block_size=16, recent_tokens=int(rng.integers(0, 20)))
    start = rng.integers(1, 900, E).tolist()
    for side in sides:
        side.grow(start)
    for e, length in enumerate(start):
        gone = np.flatnonzero(rng.random(length) < rng.choice([0.0, 0.3]))
        for side in sides if 0 < len(gone) < length else ():
            side.states[e].table.evict(gone)
    counts = rng.integers(0, 60, E).tolist()
    scores = [rng.integers(0, 3, n) if coarse else rng.random(n) for n in start]
    scores = [s.astype(np.float32) for s in scores]
    for s in scores:
        s[rng.random(len(s)) < 0.1] = rng.choice([np.nan, np.inf, -np.inf, -0.0])
    expected = []
    for e, state in enumerate(sides[0].states):
        live = state.table.live_ids()
        view = RequestView(
            live_ids=live, scores=None if name == "random" else scores[e][live], seed=seed,
            num_computed_tokens=start[e], num_prompt_tokens=4, budget_tokens=40,
            num_evict=int(counts[e]), prompt_hash=e,
        )  # fmt: skip
        expected.append(np.sort(policy.evict(view)).tolist())
    entropy = [(seed, e, n) for e, n in enumerate(start)]
    for side in sides[1:]:
        batch = Tables([s.table for s in side.states])
        ops, parts = batch.arena.ops, given_all(side, rng, scores)
        ids, found = policy.evict_many(
            BatchView(
                start, [40] * E, counts, batch.oldest,
                lambda first, end, sign, b=batch, o=ops, p=parts: o.lowest_scored(
                    b, p, first, end, counts, sign
                ),
                batch.count_below, batch.at_ranks,
                lambda sizes, wanted, o=ops: o.draw(entropy, sizes, wanted),
            )
        )  # fmt: skip
        assert [p.tolist() for p in np.split(ids, np.cumsum(found)[:-1])] == expected


@needs_compiled
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**64), st.integers(0, 2**32 - 1), st.integers(1, 40_000), st.data())
def test_compiled_draws_are_numpys(seed, prompt_hash, size, data):
    ops = load_ops()
    assert ops._draws_alike
    count = data.draw(st.integers(0, min(size, 400)))
    drawn = ops.draw([(seed, prompt_hash, size)], [size], [count])
    rng = np.random.default_rng([seed, prompt_hash, size])
    assert sorted(drawn) == sorted(rng.choice(size, size=count, replace=False))


@needs_compiled
def test_compiled_code_says_what_is_wrong_and_writes_nothing():
    side = Side(2, 4, True, load_ops())
    side.grow([20, 20])
    batch = Tables([s.table for s in side.states])
    ops, one = batch.arena.ops, [1, 1]
    before = batch.arena.index_of.copy()
    for ids in ([3, 20], [3, -1], [3, 1 << 40]):
        with pytest.raises(AssertionError, match="r1: evicting a token that is not live"):
            ops.execute(batch, np.array(ids), one, 1)
    with pytest.raises(AssertionError, match="r1: tokens are appended where the row has no"):
        ops.sync(batch, [[], []], [20, 21])
    with pytest.raises(AssertionError, match="r0: a rank"):
        ops.at_ranks(batch, np.array([20, 0]), one)
    reports = [ScoredIds(None, np.zeros(21, np.float32), 0, n) for n in (20, 21)]
    with pytest.raises(AssertionError, match="r1: a block or a slot that it does not own"):
        ops.lowest_scored(batch, reports, [0, 0], [20, 20], one, 1)
    with pytest.raises(AssertionError, match="r1: a rank or an id that is out of range"):
        ops.lowest_scored(batch, [reports[0]] * 2, [0, -1], [20, 20], one, 1)
    assert np.array_equal(before, batch.arena.index_of)
    eviction = ops.execute(batch, np.array([3, 4]), one, 1)
    eviction.last[1] = 9
    with pytest.raises(AssertionError, match="r1: a block or a slot that it does not own"):
        ops.pack(batch, eviction, one)
    side.states[0].table.block_base = 1 << 40
    with pytest.raises(AssertionError, match="r0: its numbers describe no region"):
        ops.oldest(batch, one, one, one)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_ids_by_rank_and_random_draws_are_those_of_a_list(seed, together):
    rng = np.random.default_rng(seed)
    side = Side(2, 16, together)
    side.grow(rng.integers(1, 700, 2).tolist())
    policy = make_policy("random", block_size=16, recent_tokens=int(rng.integers(0, 20)))
    for _ in range(6):
        for state in side.states:
            table = state.table
            live, index = table.live_ids(), table.ranked()
            for bound in (0, 1, 64, int(rng.integers(0, 900)), 10**6):
                assert index.count_below(bound) == (live < bound).sum()
            ranks = rng.integers(0, len(live), 20)
            assert index.at(ranks).tolist() == live[ranks].tolist()
            common = {
                "num_computed_tokens": table.num_computed_tokens, "num_prompt_tokens": 4,
                "budget_tokens": 10, "num_evict": int(rng.integers(1, 40)), "prompt_hash": seed,
            }  # fmt: skip
            expected = policy.evict(RequestView(live_ids=live, **common))
            found = policy.evict(RequestView(live_ids=live, ranked=table.ranked, **common))
            assert found.dtype == expected.dtype and found.tolist() == expected.tolist()
            table.evict(np.sort(found)[: len(live) - 1])
        side.grow(rng.integers(0, 90, 2).tolist())


def test_a_long_context_loses_the_same_ids_either_way(monkeypatch):
    lost = {}
    for threshold in (0, 10**9):
        monkeypatch.setattr(planner_module, "RANKED_FROM_TOKENS", threshold)
        side = Side(1, 16, together=True)
        side.grow([3000])
        state, lost[threshold] = side.states[0], []
        state.budget = Budget(
            policy=make_policy("random", block_size=16), eviction_ratio=None,
            kv_budget_tokens=100, interval_tokens=16,
        )  # fmt: skip
        for _ in range(4):
            victims = side.planner.decide(state, num_evict=40)
            side.step([0], [victims], [1], 1)
            side.grow([15])
            lost[threshold].append(victims.tolist())
    assert lost[0] == lost[10**9] and len(lost[0][0]) == 40

"""Operations on token tables, compiled and in plain Python: the same plans, tables and ids, to the byte.

That the plain form is right is for tests/unit/test_scalar_ops.py, with KV that shows misplacement.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtoken.core.counters import Counters
from vtoken.core.invariants import check_table
from vtoken.core.live_index import LiveIndex
from vtoken.core.ops import Change, Draw, LayoutRules, ScoredIds, apply_to_block_table
from vtoken.core.reclaim import blocks_needed
from vtoken.core.scalar_ops import ScalarOps
from vtoken.core.table import TokenTable
from vtoken.kernels.tables import load_ops
from vtoken.policies.base import Policy, RequestView, Rule
from vtoken.policies.random import Random
from vtoken.policies.registry import make_policy
from vtoken.policies.streaming_llm import StreamingLLM
from vtoken.scheduling.naming import draw_ids

compiled_here = load_ops().name == "compiled"
needs_compiled = pytest.mark.skipif(not compiled_here, reason="no C++ compiler: plain Python alone")


def both_sides(num_requests: int, block_size: int) -> list[Side]:
    """The same requests in plain Python and, where there is a compiler, compiled."""
    ops = [ScalarOps(), load_ops()] if compiled_here else [ScalarOps()]
    return [Side(num_requests, block_size, each) for each in ops]


class Side:
    """E requests in one arena; block ids are never used twice.

    Attributes:
        block_tables: the pool's.
    """

    def __init__(self, num_requests: int, block_size: int, ops) -> None:
        self.N, self.ops, self.counters = block_size, ops, Counters()
        tables = TokenTable(block_size)
        self.tables = [tables.add(f"r{e}") for e in range(num_requests)]
        self.block_tables: list[list[int]] = [[] for _ in self.tables]
        self.next_id = [1000 * (e + 1) for e in range(num_requests)]

    def allocate(self, e: int, num_blocks: int) -> None:
        while len(self.block_tables[e]) < num_blocks:
            self.block_tables[e].append(self.next_id[e])
            self.next_id[e] += 1

    def grow(self, growth: list[int]) -> None:
        """Append tokens to every request."""
        lengths = [t.num_computed_tokens + g for t, g in zip(self.tables, growth, strict=True)]
        for e, (t, g) in enumerate(zip(self.tables, growth, strict=True)):
            self.allocate(e, -(-(t.num_physical_tokens + g) // self.N))
        new = [b[t.num_blocks :] for b, t in zip(self.block_tables, self.tables, strict=True)]
        self.ops.sync(self.tables, new, lengths)

    def changes(self, due: list[int], expected: list[int], rules: LayoutRules) -> list[Change]:
        return [Change(self.tables[e], rules, n) for e, n in zip(due, expected, strict=True)]

    def step(
        self, due: list[int], changes: list[Change], victims: list[np.ndarray], num_new: list[int],
        stays: list[bool] | None = None,
    ):  # fmt: skip
        """Evict and place; those that do not stay are preempted between the two."""
        counts = [len(v) for v in victims]
        self.ops.evict(changes, np.concatenate(victims), counts)
        self.counters.note_evicted(changes, sum(counts))
        written = [c.written_positions().tolist() for c in changes]
        gone = []
        for e, change in zip(due, changes, strict=True):
            gone.append(apply_to_block_table(change, self.block_tables[e], 0))
        kept = [True] * len(due) if stays is None else stays
        placed = [(e, c, n) for e, c, n, k in zip(due, changes, num_new, kept, strict=True) if k]
        for e, change, n in placed:
            if n:
                self.allocate(e, self._blocks_needed(change, n))
        if not placed:
            return gone, written, None
        plan = self.ops.place(
            [c for _, c, _ in placed], [n for _, _, n in placed],
            lambda i, first: self.block_tables[placed[i][0]][first:],
        )  # fmt: skip
        self.counters.note_placed([c for _, c, _ in placed], plan)
        return gone, written, plan

    def _blocks_needed(self, change: Change, n: int) -> int:
        if not change.rules.moves:
            return -(-(change.table.num_computed_tokens + n) // self.N)
        return blocks_needed(change.table, n, packs=change.packs)


def assert_same_tables(one: Side, many: Side) -> None:
    for a, b in zip(one.tables, many.tables, strict=True):
        for name in ("num_computed_tokens", "num_physical_tokens", "num_live_tokens", "num_blocks"):
            assert getattr(a, name) == getattr(b, name), name
        L, B = a.num_computed_tokens, a.num_blocks
        assert np.array_equal(a.index_of[:L], b.index_of[:L])
        assert np.array_equal(a.block_table[:B], b.block_table[:B])
        assert np.array_equal(a.ids_by_physical_index(), b.ids_by_physical_index())
        assert np.array_equal(a.block_ids(), b.block_ids())
        assert np.array_equal(a.live_per_block(), b.live_per_block())
        assert not check_table(a) and not check_table(b)


def assert_same_plans(a, b) -> None:
    assert a == b


def draw_victims(side: Side, rng) -> tuple[list[int], list[np.ndarray]]:
    """Some of the requests, and ids that they lose."""
    due, victims = [], []
    for e, table in enumerate(side.tables):
        live = table.live_ids()
        if len(live) > 1 and rng.random() < 0.8:
            most = len(live) - 1 if rng.random() < 0.2 else min(len(live) - 1, side.N + 2)
            count = int(rng.integers(1, most + 1))
            if rng.random() < 0.5:
                at = int(rng.integers(0, len(live) - count + 1))
                ids = live[at : at + count]  # in a run, as streaming does
            else:
                ids = np.sort(rng.choice(live, count, replace=False))
            due.append(e)
            victims.append(ids)
    return due, victims


RULES = [LayoutRules(), LayoutRules(fragmentation_threshold=0.4), LayoutRules(moves=False)]


@needs_compiled
@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 5), st.sampled_from([1, 4, 16]),
    st.sampled_from([*RULES, None]),
)  # fmt: skip
def test_compiled_does_what_plain_python_does(seed, num_requests, block_size, rules):
    """Packed requests alone, and with others that only the plain form takes: holes, naive, pinned
    blocks, chunks. None: each request of a step has rules of its own."""
    rng = np.random.default_rng(seed)
    sides = both_sides(num_requests, block_size)
    of = [rules or RULES[int(rng.integers(3))] for _ in range(num_requests)]
    start = rng.integers(1, 12 * block_size + 2, num_requests).tolist()
    for side in sides:
        side.grow(start)
    for _ in range(6):
        due, victims = draw_victims(sides[0], rng)
        if due:
            expected = [int(rng.choice([1, 1, 1, block_size + 3])) for _ in due]
            num_new = [int(rng.choice([0, 1, 1, 1, n])) for n in expected]
            pins = [rng.random() < 0.2 for _ in due]
            found = []
            for side in sides:
                changes = [
                    Change(side.tables[e], of[e], n) for e, n in zip(due, expected, strict=True)
                ]
                for change, ids, pinned in zip(changes, victims, pins, strict=True):
                    if pinned:
                        change.pinned = untouched_full_blocks(change.table, ids)
                found.append(side.step(due, changes, victims, num_new))
            (gone, written, plan), (gone_b, written_b, plan_b) = found
            assert [sorted(g) for g in gone] == [sorted(g) for g in gone_b]
            assert written == written_b
            assert_same_plans(*(sorted_by_request(p) for p in (plan, plan_b)))
        growth = [
            0 if len(t.holes) else int(rng.integers(0, 2 * block_size + 2)) for t in sides[0].tables
        ]
        for side in sides:
            side.grow(growth)
        assert sides[0].block_tables == sides[1].block_tables
        assert_same_tables(*sides)
    assert sides[0].counters == sides[1].counters


def untouched_full_blocks(table, victims: np.ndarray) -> np.ndarray | None:
    """bool[B], full blocks at the head that lose nothing: as shared prefixes are."""
    N = table.block_size
    lost = set(table.pos_of[table.index_of[victims] // N].tolist())
    pinned = np.zeros(table.num_blocks, bool)
    for pos in range(table.num_physical_tokens // N):
        if pos in lost or table.live_in[table.block_table[pos]] < N:
            break
        pinned[pos] = True
    return pinned if pinned.any() else None


def sorted_by_request(plan):
    """What a plan says, request by request: the compiled ones come first in it."""
    out = {}
    for r, req_id in enumerate(plan.req_ids):
        source, destination = plan.moves_of(r)
        moves = sorted(zip(source.tolist(), destination.tolist(), strict=True))
        out[req_id] = (
            int(plan.num_reclaimed[r]), int(plan.new_token_index[r]), bool(plan.rewrites_block_table[r]),
            plan.kept_of(r).tolist(), int(plan.mask_kind[r]), plan.mask_of(r).tolist(), moves,
        )  # fmt: skip
    return out


@needs_compiled
@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.sampled_from([1, 4, 16]))
def test_plans_of_packed_requests_are_the_same_bytes(seed, num_requests, block_size):
    """Also where some of the requests are preempted between eviction and placement."""
    rng = np.random.default_rng(seed)
    sides = both_sides(num_requests, block_size)
    start = rng.integers(1, 12 * block_size + 2, num_requests).tolist()
    for side in sides:
        side.grow(start)
    due, victims = draw_victims(sides[0], rng)
    if not due:
        return
    stays = [bool(rng.random() < 0.7) for _ in due]
    num_new = rng.choice([0, 1, 1, block_size + 3], len(due)).tolist()
    plans = [
        side.step(due, side.changes(due, [1] * len(due), LayoutRules()), victims, num_new, stays)[2]
        for side in sides
    ]
    if any(stays):
        a, b = plans
        for f in fields(a):
            x, y = getattr(a, f.name), getattr(b, f.name)
            if isinstance(x, np.ndarray):
                assert x.dtype == y.dtype, f.name
                if not f.name.startswith("move_") or f.name == "move_start":
                    assert x.tobytes() == y.tobytes(), f.name
            else:
                assert x == y, f.name
        assert sorted_by_request(a) == sorted_by_request(b)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["streaming-llm", "sliding-window"]),
    st.sampled_from([None, 0, 3, 9]),
)
def test_oldest_names_what_evict_names(seed, name, recent):
    rng = np.random.default_rng(seed)
    policy = make_policy(name, block_size=4, recent_tokens=recent)
    sides = both_sides(4, 4)
    start = rng.integers(1, 60, 4).tolist()
    for side in sides:
        side.grow(start)
    for _ in range(4):
        counts = rng.integers(0, 12, 4).tolist()
        budgets = rng.integers(1, 30, 4).tolist()
        lengths = [t.num_computed_tokens for t in sides[0].tables]
        bounds = policy.candidate_bounds(lengths, budgets, [0] * 4)
        named = []
        for side in sides:
            ids, found = side.ops.oldest(side.tables, *bounds, counts)
            named.append(np.split(ids, np.cumsum(found)[:-1]))
        for e, table in enumerate(sides[0].tables):
            view = RequestView(
                live_ids=table.live_ids, num_computed_tokens=lengths[e], num_prompt_tokens=4,
                budget_tokens=budgets[e], num_evict=counts[e],
            )  # fmt: skip
            expected = policy.evict(view)
            assert all(parts[e].tolist() == expected.tolist() for parts in named)
            gone = expected[: max(0, len(expected) - int(rng.integers(0, 2)))]
            if len(gone):
                for side in sides:
                    side.tables[e].evict_tokens(gone)
        for side in sides:
            for e, table in enumerate(side.tables):
                side.allocate(e, 60)
                length = table.num_computed_tokens + e
                table.sync_new_tokens(side.block_tables[e][table.num_blocks :], length)


@pytest.mark.parametrize("name", ["streaming-llm", "sliding-window"])
def test_the_oldest_are_found_without_a_pass_over_the_context(name, monkeypatch):
    """A rule that names the oldest costs what it names, not what is live."""
    policy = make_policy(name, block_size=4)
    first, end = policy.candidate_bounds([100], [90], [0])
    for side in both_sides(1, 4):
        side.grow([100])
        monkeypatch.setattr(type(side.tables[0]), "live_ids", None)
        ids, _ = side.ops.oldest(side.tables, first, end, [2])
        assert ids.tolist() == [first[0], first[0] + 1]
        monkeypatch.undo()


def test_a_subclass_that_evicts_in_another_way_is_asked_itself():
    class Newest(StreamingLLM):
        def evict(self, view):
            return view.live_ids[-view.num_evict :]

    class Last(Random):
        def evict(self, view):
            return view.live_ids[-view.num_evict :]

    class Fewer(StreamingLLM):
        def evict(self, view):
            return super().evict(view)[:1]

    for cls in (Newest, Last, Fewer):
        assert not cls().names_by_rule
    assert StreamingLLM().names_by_rule
    assert make_policy("sliding-window", block_size=4).names_by_rule
    view = RequestView(
        live_ids=np.arange(40, dtype=np.int32), num_computed_tokens=40, num_prompt_tokens=4,
        budget_tokens=20, num_evict=4,
    )  # fmt: skip
    assert Fewer().evict(view).tolist() == [4]


def test_a_policy_without_rule_and_method_says_so():
    class Neither(Policy):
        name = "neither"

    view = RequestView(
        live_ids=np.arange(40), num_computed_tokens=40, num_prompt_tokens=4, budget_tokens=20,
        num_evict=4,
    )  # fmt: skip
    with pytest.raises(TypeError, match="Neither has neither a rule nor a method `evict`"):
        Neither().evict(view)


def given_all(side: Side, rng, scores: list[np.ndarray]) -> list[ScoredIds]:
    """Reports about the present layout, at odd places: of the table's ids, holes with a score too;
    or of listed ones, in another order and with some of the dead among them."""
    parts = []
    for table, by_id in zip(side.tables, scores, strict=True):
        ids, given = table.ids_by_physical_index(), None
        if rng.random() < 0.5:
            ids = np.append(ids, np.flatnonzero(by_id < 0.1))
            ids = given = np.unique(ids)[::-1].astype(np.int32)
        found = np.where(ids >= 0, by_id[ids], np.float32(-9))
        start = int(rng.integers(0, 3))
        found = np.concatenate([np.full(start, np.nan), found, np.zeros(2)]).astype(np.float32)
        parts.append(ScoredIds(given, found, start, len(ids)))
    return parts


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.sampled_from(["h2o", "tova", "knorm", "random"]), st.booleans()
)
def test_scores_and_ranks_name_what_evict_names(seed, name, coarse):
    """Ties, NaN, infinities, dead ids with a score; more wanted than there is; long contexts."""
    rng = np.random.default_rng(seed)
    E, sides = 3, both_sides(3, 16)
    policy = make_policy(name, block_size=16, recent_tokens=int(rng.integers(0, 20)))
    start = rng.integers(1, 900, E).tolist()
    for side in sides:
        side.grow(start)
    for e, length in enumerate(start):
        gone = np.flatnonzero(rng.random(length) < rng.choice([0.0, 0.3]))
        for side in sides if 0 < len(gone) < length else ():
            side.tables[e].evict_tokens(gone)
    counts = rng.integers(0, 60, E).tolist()
    protected = rng.integers(0, 30, E).tolist()
    scores = [rng.integers(0, 3, n) if coarse else rng.random(n) for n in start]
    scores = [s.astype(np.float32) for s in scores]
    for s in scores:
        s[rng.random(len(s)) < 0.1] = rng.choice([np.nan, np.inf, -np.inf, -0.0])
    expected = []
    for e, table in enumerate(sides[0].tables):
        live = table.live_ids()
        view = RequestView(
            live_ids=live, scores=None if name == "random" else scores[e][live], seed=seed,
            num_computed_tokens=start[e], num_prompt_tokens=4, budget_tokens=40,
            num_evict=counts[e], prompt_hash=e, protected_tokens=protected[e],
        )  # fmt: skip
        expected.append(np.sort(policy.evict(view)).tolist())
    first, end = policy.candidate_bounds(start, [40] * E, protected)
    seeds = [(seed, e, n) for e, n in enumerate(start)]
    for side in sides:
        if policy.rule is Rule.RANDOM_DRAW:
            ids, found = draw_ids(side.ops, side.tables, first, end, counts, seeds)
        else:
            sign, parts = (
                1 if policy.rule is Rule.LOWEST_SCORE else -1,
                given_all(side, rng, scores),
            )
            ids, found = side.ops.lowest_scored(side.tables, parts, first, end, counts, sign)
        assert [p.tolist() for p in np.split(ids, np.cumsum(found)[:-1])] == expected


@needs_compiled
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**64), st.integers(0, 2**32 - 1), st.integers(1, 40_000), st.data())
def test_compiled_draws_are_numpys(seed, prompt_hash, size, data):
    ops = load_ops()
    assert ops._draws_alike
    count = data.draw(st.integers(0, min(size, 400)))
    drawn = ops.draw([Draw((seed, prompt_hash, size), size, count)])
    rng = np.random.default_rng([seed, prompt_hash, size])
    assert sorted(drawn) == sorted(rng.choice(size, size=count, replace=False))


@needs_compiled
def test_compiled_code_says_what_is_wrong_and_writes_nothing():
    side = Side(2, 4, load_ops())
    side.grow([20, 20])
    ops, tables, one = side.ops, side.tables, [1, 1]
    before = tables[0].arena.index_of.copy()
    for ids in ([3, 20], [3, -1], [3, 1 << 40]):
        with pytest.raises(AssertionError, match="r1: evicting a token that is not live"):
            ops.evict(side.changes([0, 1], one, LayoutRules()), np.array(ids), one)
    with pytest.raises(
        AssertionError, match="r1: tokens are appended where the block table has no"
    ):
        ops.sync(tables, [[], []], [20, 21])
    with pytest.raises(AssertionError, match="r0: a rank"):
        ops.at_ranks(tables, np.array([20, 0]), one)
    reports = [ScoredIds(None, np.zeros(21, np.float32), 0, n) for n in (20, 21)]
    with pytest.raises(AssertionError, match="r1: a block or a slot that it does not own"):
        ops.lowest_scored(tables, reports, [0, 0], [20, 20], one, 1)
    with pytest.raises(AssertionError, match="r1: a rank or an id that is out of range"):
        ops.lowest_scored(tables, [reports[0]] * 2, [0, -1], [20, 20], one, 1)
    assert np.array_equal(before, tables[0].arena.index_of)
    changes = side.changes([0, 1], one, LayoutRules())
    ops.evict(changes, np.array([3, 4]), one)
    changes[1].last = 9
    with pytest.raises(AssertionError, match="r1: a block or a slot that it does not own"):
        ops.place(changes, one, lambda e, first: [])
    tables[0].block_base = 1 << 40
    with pytest.raises(AssertionError, match="r0: its numbers describe no region"):
        ops.oldest(tables, one, one, one)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_ids_by_rank_are_those_of_a_list(seed):
    rng = np.random.default_rng(seed)
    side = both_sides(2, 16)[-1]
    side.grow(rng.integers(1, 700, 2).tolist())
    for _ in range(6):
        for table in side.tables:
            live, index = table.live_ids(), LiveIndex(table)
            for bound in (0, 1, 64, int(rng.integers(0, 900)), 10**6):
                assert index.count_below(bound) == (live < bound).sum()
            ranks = rng.integers(0, len(live), 20)
            assert index.at(ranks).tolist() == live[ranks].tolist()
            gone = np.sort(rng.choice(live, int(rng.integers(0, len(live))), replace=False))
            if len(gone):
                table.evict_tokens(gone)
        side.grow([0, 0])

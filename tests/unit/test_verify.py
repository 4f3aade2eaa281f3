"""Parts of `vtoken verify` that need no engine."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest

from vtoken.checks.base import CHECKS, INVARIANTS, Tally, invariant_of
from vtoken.checks.operations import Operation, OperationLog, check_order
from vtoken.checks.plan import Arrival
from vtoken.checks.report import KEEP_PROMPT_TOKENS, ReplayLog, make_report, save_report
from vtoken.config import VTokenConfig
from vtoken.core.messages import Layout, plan_of_layouts
from vtoken.errors import ConfigError, InvariantViolation, UnsupportedError
from vtoken.verify.matrix import ALL_KINDS, LAYOUTS, PAIRWISE, build_matrix, layouts_of
from vtoken.verify.replay import load_report

SOURCE, DESTINATION = np.array([40, 41]), np.array([18, 19])


def op(kind: str, slots=(), other=()) -> Operation:
    return Operation(7, kind, np.array(slots, np.int64), np.array(other, np.int64))


MOVE = op("move", SOURCE, DESTINATION)
ATTENTION = op("attention")


@pytest.mark.parametrize(
    ("operations", "wrong"),
    [
        ([MOVE], ""),
        ([MOVE, op("zero", [40, 41, 42]), op("write", [40]), ATTENTION], ""),
        ([op("zero", [96]), MOVE, ATTENTION], ""),
        ([], "before their copy"),
        ([ATTENTION, MOVE], "after attention"),
        ([op("move", SOURCE[:1], DESTINATION[:1]), ATTENTION], r"slots \[19\] before their copy"),
        ([op("zero", [41]), MOVE, ATTENTION], "zero touches slots .41. before"),
        ([op("write", [18]), MOVE, ATTENTION], "write touches slots .18. before"),
        ([MOVE, op("copy", [19], [64]), ATTENTION], "copy touches slots .19. after"),
    ],
)
def test_order_of_operations(operations, wrong) -> None:
    found = check_order(operations, SOURCE, DESTINATION)
    if wrong:
        import re

        assert len(found) == 1 and re.search(wrong, found[0]), found
    else:
        assert found == []


def test_the_log_keeps_a_step_apart_and_the_past_short() -> None:
    log = OperationLog()
    for step in range(100):
        log.begin_step(step)
        log.record("write", np.array([step]))
        log.record("attention")
    assert [o.kind for o in log.current] == ["write", "attention"]
    assert len(log.recent()) == 64 and log.recent()[-1].step_seq == 99


# ---- hashing ------------------------------------------------------------------------------------


def _cache(dtype_name: str, k_group: int):
    torch = pytest.importorskip("torch")
    from vtoken.kernels.layout import KVLayout

    generator = torch.Generator().manual_seed(1)
    layout = KVLayout(block_size=32, head_size=16, k_group=k_group)
    dtype = getattr(torch, dtype_name)
    kvs = [torch.randn(4, 2, 32, 32, generator=generator).to(dtype) for _ in range(3)]
    return torch, kvs, layout


@pytest.mark.parametrize("dtype_name", ["float32", "bfloat16"])
@pytest.mark.parametrize("k_group", [32, 16])
def test_a_slot_hash_sees_every_cell_and_nothing_else(dtype_name, k_group) -> None:
    torch, kvs, layout = _cache(dtype_name, k_group)
    from vtoken.checks.hashing import SlotHasher

    hasher = SlotHasher(kvs, layout)
    slots = np.arange(32, 128)
    before = hasher.hash_slots(slots)
    assert len(np.unique(before)) == len(slots)
    rng = np.random.default_rng(0)
    for trial in range(24):
        layer, slot = trial % 3, int(rng.integers(32, 128))
        where = torch.tensor([slot])
        k, v = layout.gather(kvs[layer], where)
        part = (k, v)[trial % 2]
        saved = part.clone()
        head, cell = int(rng.integers(2)), int(rng.integers(16))
        part[0, head, cell] += 1.0
        layout.scatter(kvs[layer], where, k, v)
        changed = np.flatnonzero(hasher.hash_slots(slots) != before)
        assert changed.tolist() == [slot - 32]
        part.copy_(saved)
        layout.scatter(kvs[layer], where, k, v)
    assert np.array_equal(hasher.hash_slots(slots), before)


def test_a_slot_hash_moves_with_the_token() -> None:
    torch, kvs, layout = _cache("float32", 32)
    from vtoken.checks.hashing import SlotHasher, digest

    hasher = SlotHasher(kvs, layout)
    source, target = np.array([40, 70, 99]), np.array([65, 33, 127])
    before = hasher.hash_slots(source)
    for kv in kvs:
        layout.scatter(kv, torch.from_numpy(target), *layout.gather(kv, torch.from_numpy(source)))
    after = hasher.hash_slots(target)
    assert np.array_equal(before, after)
    ids = np.array([5, 3, 9])
    assert digest(ids, before) == digest(ids[::-1], after[::-1])  # ordered by id, not by slot
    assert digest(ids, before) != digest(ids, before[[1, 0, 2]])  # two tokens exchanged
    assert len(hasher.hash_slots(np.empty(0, np.int64))) == 0


# ---- matrix -------------------------------------------------------------------------------------


def test_the_four_engines_hold_every_pair_of_values() -> None:
    fields = ("block_size", "prefix_caching", "async_scheduling")
    for a, b in combinations(fields, 2):
        pairs = {(getattr(k, a), getattr(k, b)) for k in PAIRWISE}
        assert len(pairs) == 4, (a, b)


def test_every_policy_and_layout_meets_every_engine() -> None:
    policies = [f"p{i}" for i in range(9)]
    matrix = build_matrix(policies, list(LAYOUTS), full=False)
    cells = [c for group in matrix.values() for c in group]
    assert len({(c.policy, c.layout) for c in cells}) == len(cells) == 36
    for policy in policies:
        assert {c.engine for c in cells if c.policy == policy} == set(PAIRWISE)
    for layout in LAYOUTS:
        assert {c.engine for c in cells if c.layout == layout} == set(PAIRWISE)
    full = build_matrix(policies, list(LAYOUTS), full=True)
    assert set(full) == set(ALL_KINDS) and sum(map(len, full.values())) == 9 * 4 * 8
    with pytest.raises(ConfigError):
        build_matrix(policies, ["sideways"], full=False)


def test_a_cell_fits_its_policy_and_what_the_user_says_wins() -> None:
    cells = build_matrix(["h2o", "random"], ["packed"], full=True)
    for cell in (c for group in cells.values() for c in group):
        config = cell.config({})
        config.make_budget(cell.engine.block_size)  # the budget holds what the policy must keep
        assert config.hash_kv_every == 1 and config.trace
        assert cell.config({"eviction_ratio": 0.25}).kv_budget_tokens is None
        assert cell.config({"eviction_interval_tokens": 9}).eviction_interval_tokens == 9


def test_a_cell_in_which_nothing_was_evicted_shows_nothing() -> None:
    pytest.importorskip("torch")
    from vtoken.verify.findings import CellResult, Report
    from vtoken.verify.reference import ReferenceResult

    cell = next(iter(build_matrix(["h2o"], ["packed"], full=False).values()))[0]
    report = Report(cells=[CellResult(cell, Tally(changes=1), ReferenceResult(tokens=9))])
    assert report.passed
    report.cells.append(CellResult(cell, Tally(), ReferenceResult(tokens=9)))
    assert not report.passed and "nothing was evicted" in report.failures()[0]
    report.cells[1] = CellResult(cell, Tally(changes=1), ReferenceResult())
    assert not report.passed and "no token was compared" in report.failures()[0]


def test_a_run_in_which_nothing_happened_is_a_failure() -> None:
    pytest.importorskip("torch")
    from vtoken.verify.findings import Report

    assert Report().failures() == ["nothing was checked"]
    assert Report(tally=Tally(changes=1)).passed
    (failure,) = Report(tally=Tally(changes=1), idle=["h2o"]).failures()
    assert failure == "nothing was relocated, so nothing was shown, for: h2o"


@pytest.mark.parametrize("mode", ["native", "indirection", "sideways"])
def test_a_mode_without_evictions_is_refused(mode) -> None:
    with pytest.raises(ConfigError, match="--mode .*nothing to verify"):
        layouts_of(mode)
    assert layouts_of("naive") == ["naive"] and layouts_of(None) == list(LAYOUTS)


# ---- reports ------------------------------------------------------------------------------------


def _report(tmp_path) -> dict:
    replay = ReplayLog({"model": "m"}, VTokenConfig().model_dump(mode="json"))
    replay.extend([Arrival(3, "a", np.array([1, 2], np.int32), 5)])
    step = Layout("a", 4, kept=np.array([1, 0]), move_source=SOURCE, move_destination=DESTINATION)
    log = OperationLog()
    log.begin_step(7)
    log.record("move", SOURCE, DESTINATION)
    return make_report(
        "I1.relocated", "a: ids 4 changed", step_seq=7, req_id="a", ids=np.array([4]),
        slots=DESTINATION, plan=plan_of_layouts([step]), log=log, replay=replay,
    )  # fmt: skip


def test_what_a_replay_needs_is_bounded() -> None:
    replay, prompt = ReplayLog({}, {}), np.zeros(KEEP_PROMPT_TOKENS // 4, np.int32)
    for step in range(10):
        replay.extend([Arrival(step, f"r{step}", prompt, 1)])
    assert [a.step_seq for a in replay.arrivals] == [6, 7, 8, 9]


def test_a_report_says_who_where_and_how_to_run_it_again(tmp_path) -> None:
    path = save_report(_report(tmp_path), tmp_path)
    assert path.name == "vtoken-violation-I1-step7.json"
    report = load_report(path)
    assert (report["invariant"], report["request"], report["step"]) == ("I1", "a", 7)
    assert report["ids"] == [4] and report["slots"] == DESTINATION.tolist()
    assert report["plan"]["move_source"] == SOURCE.tolist() and report["plan"][
        "kept_positions"
    ] == [1, 0]
    assert report["operations"][0]["kind"] == "move"
    assert report["replay"]["requests"] == [
        {"step": 3, "req_id": "a", "prompt_token_ids": [1, 2], "max_tokens": 5}
    ]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"replay": 1}', '{"replay": {}, "schema_version": 9}', "[" * 100_000]
)
def test_what_is_not_a_report_is_refused(tmp_path, text) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--replay"):
        load_report(path)
    with pytest.raises(ConfigError, match="--replay"):
        load_report(tmp_path / "none.json")


def test_tally_has_one_row_for_each_invariant() -> None:
    tally, other = Tally(), Tally(off=frozenset({"scores"}))
    other.count("I1", 3)
    other.violations["scores"] += 1
    tally.add(other)
    rows = {r["name"]: (r["events"], r["violations"]) for r in tally.rows()}
    assert tuple(rows) == INVARIANTS and rows["I1"] == (3, 0) and rows["scores"] == (0, 1)
    assert {invariant_of(c) for c in CHECKS} == set(INVARIANTS)
    assert not other.is_on("scores") and tally.is_on("scores")


# ---- paired quality -----------------------------------------------------------------------------


def test_quality_numbers() -> None:
    pytest.importorskip("rouge_score", reason="rouge-score is not installed")
    from vtoken.experiments.bench.paired_outputs import Pair, summarize

    same = Pair("a", [1, 2, 3], [1, 2, 3], "the cat sat", "the cat sat", "the cat sat here")
    other = Pair("b", [1, 2, 3, 4], [1, 9], "one two three four", "one six", "one two three four")
    assert same.identical and not other.identical
    assert (same.first_difference, other.first_difference) == (3, 1)
    numbers = summarize([same, other])
    assert numbers["pairs"] == 2 and numbers["identical_frac"] == 0.5
    # naive hits all four words (F1 = 1); "one six": precision 1/2, recall 1/4, F1 = 1/3.
    assert numbers["mean_rouge_l_diff"] == pytest.approx((1 / 3 - 1) / 2)
    assert numbers["within_0_01_frac"] == 0.5 and numbers["median_length_ratio"] == 0.75


def test_what_the_command_runs() -> None:
    from vtoken_cli.commands.verify import DEFAULT_EVENTS, DEFAULT_PAIRS, _what_to_run
    from vtoken_cli.given import Run
    from vtoken_cli.output import Output

    def plan(vtoken=None, **own):
        return _what_to_run(Run(out=Output(), vtoken=vtoken or {}, own=own))

    assert plan() == {"reference": True}  # coverage checks the invariants as well
    assert plan({"hash_kv_every": 1}) == {"invariants": DEFAULT_EVENTS}
    assert plan(events=50) == {"invariants": 50}
    assert plan(suite="quality", pairs=3) == {"quality": 3}
    everything = plan(suite="all")
    assert everything == {
        "reference": True, "invariants": DEFAULT_EVENTS, "faults": True, "quality": DEFAULT_PAIRS,
    }  # fmt: skip


def test_a_replay_that_compared_nothing_is_a_failure(monkeypatch) -> None:
    from vtoken.verify import replay as module
    from vtoken_cli.commands.verify import _replay
    from vtoken_cli.given import Run
    from vtoken_cli.output import Output

    run = Run(out=Output(), own={"replay": "r.json"})
    monkeypatch.setattr(module, "load_report", lambda path: {"check": "scores", "step": 1})
    monkeypatch.setattr(module, "replay", lambda report: (None, Tally(changes=1)))
    _replay(run)
    monkeypatch.setattr(module, "replay", lambda report: (None, Tally()))
    with pytest.raises(InvariantViolation, match="nothing was checked"):
        _replay(run)


# ---- faults and engines -------------------------------------------------------------------------


def test_an_engine_with_one_half_of_the_checks_is_refused(monkeypatch) -> None:
    from vtoken.verify import runs

    class OneSided:
        hooks = SimpleNamespace(checker=object())
        runner = SimpleNamespace(vtoken_checker=None)
        vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type="cuda"))
        closed = False

        def close(self) -> None:
            self.closed = True

    engine = OneSided()
    monkeypatch.setattr(runs, "open_engine", lambda settings, config: engine)
    with pytest.raises(UnsupportedError, match="--hash-kv 'cuda'"):
        runs.open_checked_engine(None, VTokenConfig(hash_kv_every=1))
    assert engine.closed
    assert runs.open_checked_engine(None, VTokenConfig()) is engine


def test_the_catalogue_names_each_fault_once() -> None:
    from vtoken.verify.catalogue import FAULTS, LIVE_FAULTS, PLAN_FAULTS

    assert len({(f.where, f.name) for f in FAULTS}) == len(FAULTS)
    assert {f.check for f in LIVE_FAULTS} == set(CHECKS)
    for fault in PLAN_FAULTS.values():
        assert set(fault.check.split(" or ")) <= set(INVARIANTS), fault.name


def test_what_a_fault_replaces_comes_back() -> None:
    from vtoken.verify.fault import replaced

    hooks = SimpleNamespace(begin=lambda: "stock")
    engine = SimpleNamespace(hooks=hooks)
    with replaced(engine, "begin step", lambda stock: lambda: f"broken {stock()}"):
        assert hooks.begin() == "broken stock"
    assert hooks.begin() == "stock"
    with pytest.raises(AttributeError), replaced(engine, "end step", lambda stock: stock):
        pass

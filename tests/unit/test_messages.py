"""StepPlan: what goes in comes out, request by request, also after pickling."""

from __future__ import annotations

import pickle
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest

from vtoken.core.counters import Counters
from vtoken.core.messages import (
    MASK_GIVEN,
    MASK_KEPT,
    MASK_PACKED,
    Layout,
    ScoreReport,
    WorkerReport,
    joined,
    plan_of_layouts,
)


def steps():
    return [
        Layout("grown", 3),
        Layout(
            "packed", 7, new_token_index=11, kept=np.array([2, 0], np.int32),
            move_source=np.array([40, 41, 2**33]), move_destination=np.array([8, 9, 10]),
        ),
        Layout(
            "holed", 0, mask_kind=MASK_GIVEN, mask=np.array([1, 0, 1, 1, 0, 1, 1, 1, 1, 0], bool),
            kept=np.array([], np.int32),
        ),
        Layout("kept", 5, mask_kind=MASK_KEPT),
    ]  # fmt: skip


def test_round_trip():
    plan = plan_of_layouts(steps())
    plan.step_seq, plan.report_req_ids = 9, ["holed", "kept"]
    plan = pickle.loads(pickle.dumps(plan))
    assert plan.step_seq == 9 and plan.report_req_ids == ["holed", "kept"]
    assert plan.req_ids == ["grown", "packed", "holed", "kept"]
    assert plan.num_reclaimed.tolist() == [3, 7, 0, 5]
    assert plan.new_token_index.tolist() == [-1, 11, -1, -1]
    assert plan.mask_kind.tolist() == [MASK_PACKED, MASK_PACKED, MASK_GIVEN, MASK_KEPT]
    # An empty row is not "no row": every block may have gone.
    assert plan.rewrites_block_table.tolist() == [False, True, True, False]
    assert [plan.kept_of(r).tolist() for r in range(4)] == [[], [2, 0], [], []]
    moves = [tuple(x.tolist() for x in plan.moves_of(r)) for r in range(4)]
    assert moves == [([], []), ([40, 41, 2**33], [8, 9, 10]), ([], []), ([], [])]
    assert plan.mask_of(0).tolist() == []


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17])
def test_bits_past_the_end_of_a_mask_are_live(length):
    """The request grows there before the next mask comes."""
    mask = np.random.default_rng(length).random(length) < 0.5
    step = Layout("r", 0, mask_kind=MASK_GIVEN, mask=mask)
    out = plan_of_layouts([Layout("q", 0), step]).mask_of(1)
    assert out.dtype == bool and len(out) >= length
    assert np.array_equal(out[:length], mask) and out[length:].all()


@pytest.mark.parametrize("cut", range(5))
def test_joined_plans_say_what_one_would(cut):
    whole = plan_of_layouts(steps())
    both = joined(plan_of_layouts(steps()[:cut]), plan_of_layouts(steps()[cut:]))
    for f in fields(whole):
        a, b = getattr(whole, f.name), getattr(both, f.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), f.name
        else:
            assert a == b, f.name


def test_a_plan_knows_whether_it_says_something():
    plan = plan_of_layouts(())
    assert not plan.says_something and len(plan.move_source) == 0
    plan.report_req_ids = ["a"]
    assert plan.says_something
    assert plan_of_layouts(steps()[:1]).says_something


def test_counters_reset_and_listing():
    counters = Counters(moved_tokens=3, plan_s=0.5)
    assert counters.as_dict()["moved_tokens"] == 3
    counters.reset()
    assert set(counters.as_dict().values()) == {0}


def report() -> ScoreReport:
    parts = [np.ones(3, np.float32), np.empty(0, np.float32), np.zeros(2, np.float32)]
    return ScoreReport.of_parts(7, ["a", "b", "c"], parts)


def test_scores_of_several_requests_are_joined():
    found = report()
    assert found.start.tolist() == [0, 3, 3, 5] and found.start.dtype == np.int32
    assert found.scores.tolist() == [1, 1, 1, 0, 0] and found.scores.dtype == np.float32


def test_a_report_with_nothing_in_it_is_not_sent():
    assert not WorkerReport()
    assert WorkerReport(scores=report()) and WorkerReport(relocation_ns=1)
    assert WorkerReport(check_counts={})  # the checker's first word: nothing checked yet


def test_a_plan_that_carries_a_check_alone_changes_nothing():
    plan = plan_of_layouts(())
    plan.check = {"arrivals": [1]}
    assert plan.says_something
    again = pickle.loads(pickle.dumps(plan))
    assert again.check == plan.check and again.req_ids == []
    for name in ("move_source", "move_destination", "fresh_blocks", "report_req_ids"):
        assert len(getattr(again, name)) == 0, name
    for name in ("kept_start", "added_start", "mask_start", "move_start"):
        assert getattr(again, name).tolist() == [0], name


class TestAttach:
    """On vLLM's output of a step, whichever kind it is."""

    @pytest.fixture
    def attach(self):
        pytest.importorskip("vllm")
        from vtoken.vllm_plugin.runner_v1 import attach

        return attach

    def test_now(self, attach):
        output = SimpleNamespace(req_ids=["a"])
        assert attach(output, WorkerReport(relocation_ns=5)).vtoken.relocation_ns == 5

    def test_when_it_is_fetched(self, attach):
        inner = SimpleNamespace(req_ids=["a"])
        output = SimpleNamespace(get_output=lambda: inner)
        assert attach(output, WorkerReport(relocation_ns=5)) is output
        assert not hasattr(inner, "vtoken")
        assert output.get_output() is inner and inner.vtoken.relocation_ns == 5

    def test_never_on_the_output_that_empty_steps_share(self, attach):
        with pytest.raises(AssertionError, match="belongs to a step"):
            attach(SimpleNamespace(req_ids=[]), WorkerReport(relocation_ns=5))

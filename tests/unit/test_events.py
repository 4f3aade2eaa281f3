"""StepPlan: what goes in comes out, request by request, also after pickling."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from vtoken.core.events import (
    MASK_GIVEN,
    MASK_KEPT,
    MASK_PACKED,
    Counters,
    RequestStep,
    build_step_plan,
)


def steps():
    return [
        RequestStep("grown", 3),
        RequestStep(
            "packed", 7, new_token_index=11, kept=np.array([2, 0], np.int32),
            move_source=np.array([40, 41, 2**33]), move_destination=np.array([8, 9, 10]),
        ),
        RequestStep(
            "holed", 0, mask_kind=MASK_GIVEN, mask=np.array([1, 0, 1, 1, 0, 1, 1, 1, 1, 0], bool),
            kept=np.array([], np.int32),
        ),
        RequestStep("kept", 5, mask_kind=MASK_KEPT),
    ]  # fmt: skip


def test_round_trip():
    plan = pickle.loads(pickle.dumps(build_step_plan(9, steps(), ["holed", "kept"])))
    assert plan.step_seq == 9 and plan.report_req_ids == ["holed", "kept"]
    assert plan.req_ids == ["grown", "packed", "holed", "kept"]
    assert plan.num_reclaimed.tolist() == [3, 7, 0, 5]
    assert plan.new_token_index.tolist() == [-1, 11, -1, -1]
    assert plan.mask_kind.tolist() == [MASK_PACKED, MASK_PACKED, MASK_GIVEN, MASK_KEPT]
    # An empty row is not "no row": every block may have gone.
    assert plan.rewrites_row.tolist() == [False, True, True, False]
    assert [plan.row_of(r).tolist() for r in range(4)] == [[], [2, 0], [], []]
    moves = [tuple(x.tolist() for x in plan.moves_of(r)) for r in range(4)]
    assert moves == [([], []), ([40, 41, 2**33], [8, 9, 10]), ([], []), ([], [])]
    assert plan.mask_of(0).tolist() == []


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17])
def test_bits_past_the_end_of_a_mask_are_live(length):
    """The request grows there before the next mask comes."""
    mask = np.random.default_rng(length).random(length) < 0.5
    step = RequestStep("r", 0, mask_kind=MASK_GIVEN, mask=mask)
    out = build_step_plan(1, [RequestStep("q", 0), step], []).mask_of(1)
    assert out.dtype == bool and len(out) >= length
    assert np.array_equal(out[:length], mask) and out[length:].all()


def test_nothing_changed_is_no_plan():
    assert build_step_plan(1, [], []) is None
    asked = build_step_plan(1, [], ["a"])
    assert asked.report_req_ids == ["a"] and len(asked.move_source) == 0


def test_counters_reset_and_listing():
    counters = Counters(moved_tokens=3, plan_s=0.5)
    assert counters.as_dict()["moved_tokens"] == 3
    counters.reset()
    assert set(counters.as_dict().values()) == {0}

"""What goes over the wire between the scheduler and the workers."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from vtoken.core.events import StepPlan
from vtoken.core.messages import ScoreReport, WorkerReport


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
    plan = StepPlan.empty(4)
    plan.check = {"arrivals": [1]}
    again = pickle.loads(pickle.dumps(plan))
    assert again.step_seq == 4 and again.check == plan.check and again.req_ids == []
    for name in ("move_source", "move_destination", "fresh_blocks", "report_req_ids"):
        assert len(getattr(again, name)) == 0, name
    for name in ("row_start", "added_start", "mask_start", "move_start"):
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

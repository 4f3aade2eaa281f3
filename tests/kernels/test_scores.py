"""Score rules, against numpy written request by request."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_problems import make_problem, reference

from vtoken.kernels.scores import (
    StepShape,
    counted_queries,
    reset_scores,
    update_scores,
)
from vtoken.policies.base import ScoreKind

LAYERS, HEADS = 2, 6


def by_hand(kind, scores, step, groups, queries, counted, window):
    """The rules of ScoreKind, slot by slot."""
    out = scores.astype(np.float64)
    for slots, n, count in zip(groups, queries, counted, strict=True):
        for s in slots:
            a = float(step[s])
            if kind is ScoreKind.ACCUMULATED:
                out[s] += a
            elif kind is ScoreKind.LAST:
                out[s] = a
            elif kind is ScoreKind.WINDOW:
                out[s] = a if n > 1 else out[s] * (1 - 1 / window) + a
            elif kind is ScoreKind.COUNT_ABOVE_THRESHOLD:
                mean = a / (LAYERS * HEADS * count)
                out[s] += mean > 1 / len(slots)
    return out


@pytest.mark.parametrize("kind", list(ScoreKind))
@pytest.mark.parametrize("window", [32, 5])
def test_rules(kernels, kind, window):
    queries, lens = [1, 50, 1], [60, 70, 200]
    problem = make_problem(queries=queries, lens=lens, seed=1, spread=2.0)
    limit = counted_queries(kind, 8)
    counted = [max(1, min(n, limit)) for n in queries]
    plan = problem.plan(kernels, score_queries=limit)
    step = torch.zeros(problem.num_slots)
    for _ in range(LAYERS):
        kernels.attention(
            plan, problem.query, problem.kv, None, layout=problem.layout, scale=problem.scale,
            step_scores=step,
        )  # fmt: skip
    groups = [problem.slots(r) for r in range(3)]
    scores = torch.rand(problem.num_slots, generator=torch.Generator().manual_seed(2))
    before = scores.numpy().copy()
    shape = StepShape(
        num_live_tokens=plan.num_live_tokens,
        num_queries=torch.tensor(queries),
        num_counted=torch.tensor(counted),
        num_heads=LAYERS * HEADS,
    )
    slots = torch.from_numpy(np.concatenate(groups))
    update_scores(kind, scores, step, slots, shape, window_steps=window)
    want = by_hand(kind, before, step.numpy(), groups, queries, counted, window)
    assert np.allclose(scores.numpy(), want, rtol=1e-6, atol=1e-6)
    untouched = np.setdiff1d(np.arange(problem.num_slots), np.concatenate(groups))
    assert np.array_equal(scores.numpy()[untouched], before[untouched])


def test_counts_what_exceeds_an_even_share():
    """The threshold means: more than 1 / live of the attention, on average over heads."""
    scores, step = torch.zeros(4), torch.tensor([0.1, 0.26, 0.24, 0.4]) * LAYERS * HEADS
    shape = StepShape(
        num_live_tokens=torch.tensor([4]), num_queries=torch.tensor([1]),
        num_counted=torch.tensor([1]), num_heads=LAYERS * HEADS,
    )  # fmt: skip
    update_scores(ScoreKind.COUNT_ABOVE_THRESHOLD, scores, step, torch.arange(4), shape)
    assert scores.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    "kind, count",
    [(ScoreKind.LAST, 1), (ScoreKind.WINDOW, 9), (ScoreKind.ACCUMULATED, 9), (ScoreKind.NONE, 0),
     (ScoreKind.COUNT_ABOVE_THRESHOLD, 9), (ScoreKind.KEY_NORM, 0)],
)  # fmt: skip
def test_counted_queries(kind, count):
    assert counted_queries(kind, 9) == count


def test_last_query_scores(kernels):
    """LAST is the attention of the newest query alone."""
    problem = make_problem(queries=[20], lens=[50], seed=3)
    plan = problem.plan(kernels, score_queries=counted_queries(ScoreKind.LAST))
    step = torch.zeros(problem.num_slots)
    kernels.attention(
        plan, problem.query, problem.kv, None, layout=problem.layout, scale=problem.scale,
        step_scores=step,
    )  # fmt: skip
    _, want = reference(problem, score_queries=1)
    assert np.allclose(step.numpy(), want, rtol=1e-5, atol=1e-6)
    assert abs(want.sum() - HEADS) < 1e-9


def test_reset():
    scores = torch.tensor([1.0, float("nan"), 3.0])
    reset_scores(scores, torch.tensor([1]))
    assert scores.tolist() == [1, 0, 3]

"""The attention's bookkeeping of scores, with a batch made by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vtoken.policies.base import ScoreKind

cpu_attention = pytest.importorskip("vtoken.vllm_plugin.cpu_attention", reason="needs vLLM")
N = 16  # block size


@pytest.fixture
def runner():
    """Two requests: 20 tokens in blocks 3 and 1, 35 tokens in 4, 2 and 6, of which ids 5-9 died."""
    holes = np.ones(35, bool)
    holes[5:10] = False
    return SimpleNamespace(
        input_batch=SimpleNamespace(
            num_reqs=2,
            req_id_to_index={"a": 0, "b": 1},
            block_table=[SimpleNamespace(
                block_table=SimpleNamespace(np=np.array([[3, 1, 0], [4, 2, 6]], np.int32))
            )],
        ),
        query_start_loc=SimpleNamespace(np=np.array([0, 1, 2])),
        seq_lens=torch.tensor([20, 35]),
        vtoken_layouts=SimpleNamespace(masks={"b": holes}),
    )  # fmt: skip


def updated(runner, kind: ScoreKind) -> torch.Tensor:
    """Scores after a step whose sums are zero but for live slots, as the kernels leave them."""
    attention = cpu_attention.CPUAttention.__new__(cpu_attention.CPUAttention)
    attention.kind, attention.score_queries = kind, -1
    attention.block_size, attention.num_heads = N, 4
    generator = torch.Generator().manual_seed(7)
    attention.scores = torch.rand(8 * N, generator=generator)
    attention.step_scores = torch.zeros(8 * N)
    live, _ = attention._live_slots(runner, 2)
    attention.step_scores[live] = torch.rand(len(live), generator=generator)
    attention._update_scores(runner)
    return attention.scores


def test_the_live_slots_of_a_batch(runner):
    attention = cpu_attention.CPUAttention.__new__(cpu_attention.CPUAttention)
    attention.block_size = N
    live, counts = attention._live_slots(runner, 2)
    first = [*range(48, 64), *range(16, 20)]
    second = [*range(64, 69), *range(74, 80), *range(32, 48), *range(96, 99)]
    assert live.tolist() == first + second and counts.tolist() == [20, 30]


@pytest.mark.parametrize("kind", [ScoreKind.ACCUMULATED, ScoreKind.LAST, ScoreKind.WINDOW])
def test_adding_the_whole_pool_is_adding_the_live_slots(runner, kind, monkeypatch):
    at_once = updated(runner, kind)
    monkeypatch.setattr(cpu_attention, "ADD_ALL_SLOTS", 0)
    assert torch.equal(updated(runner, kind), at_once)


def test_scores_of_this_step_come_on_top(runner):
    before = torch.rand(8 * N, generator=torch.Generator().manual_seed(7))
    grown = updated(runner, ScoreKind.ACCUMULATED) - before
    assert (grown >= 0).all() and int((grown > 0).sum()) == 50

"""What chance leaves in blocks, against drawing the victims."""

from __future__ import annotations

import numpy as np
import pytest

from vtoken.config import VTokenConfig
from vtoken.experiments.bench.layouts import BlockShares, ChanceModel, LayoutWatch

BLOCK = 8


def _budget(ratio: float = 0.5):
    config = VTokenConfig(policy="random", eviction_ratio=ratio, mode="naive")
    return config.make_budget(BLOCK)


def _draw(budget, prompt_len: int, length: int, seed: int) -> BlockShares:
    """Evict as the planner does, victims drawn at random."""
    rng = np.random.default_rng(seed)
    live = np.ones(length, bool)
    for at in range(prompt_len, length + 1):
        kept = int(budget.tokens(at))
        excess = int(live[:at].sum()) - kept
        if excess < budget.interval_tokens:
            continue
        ids = np.flatnonzero(live[:at])
        ids = ids[(ids >= budget.policy.sink_tokens) & (ids < at - budget.policy.recent(kept))]
        live[rng.choice(ids, min(excess, len(ids)), replace=False)] = False
    counts = live.reshape(-1, BLOCK).sum(1)
    return BlockShares(
        int((counts == 0).sum()), int(((counts > 0) & (counts < BLOCK)).sum()),
        int((counts == BLOCK).sum()),
    )  # fmt: skip


@pytest.mark.parametrize("ratio", [0.5, 0.8])
def test_chance_model_is_the_mean_of_draws(ratio) -> None:
    budget, total = _budget(ratio), BlockShares()
    for seed in range(300):
        total.add(_draw(budget, 64, 128, seed))
    expected = ChanceModel(budget, 64, BLOCK).at(128)
    found, wanted = total.fracs(), expected.fracs()
    for name in wanted:
        # Draws without replacement are a little less spread than independent ones.
        assert found[name] == pytest.approx(wanted[name], abs=0.03), name


def test_chance_model_without_eviction_has_no_dead_blocks() -> None:
    shares = ChanceModel(_budget(0.0), 64, BLOCK).at(70)
    assert (shares.fully_dead, shares.partly_dead, shares.not_dead) == (0, 0, 9)


def test_counts_tell_dead_partly_dead_and_untouched_blocks_apart() -> None:
    into = BlockShares()
    live, written = np.array([8, 3, 0, 2, 0]), np.array([8, 8, 8, 2, 0])
    LayoutWatch._count(live, written, into)
    assert (into.fully_dead, into.partly_dead, into.not_dead) == (1, 1, 2)
    assert into.fracs()["partly_dead"] == 0.25

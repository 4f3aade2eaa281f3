"""The paper's capacity experiment on vLLM's scheduler and block pool, with no model behind them.

Llama-3.1-8B, blocks of 16, prompt 4,032, output 12,288, half of the tokens dropped at random
(section 5.4, figure 9; the paper's vToken reaches 8 and 22, a packed prefix 10 and 22).
"""

from __future__ import annotations

import pytest

from vtoken.errors import ConfigError
from vtoken.experiments.capacity.scan import dry_frontier

pytestmark = pytest.mark.vllm


def frontiers(**settings) -> dict[str, int]:
    rows = dry_frontier(**settings)
    assert all(row["modelled"] for row in rows)
    assert all(row["next_infeasible"] == row["max_concurrency"] + 1 for row in rows)
    return {row["mode"]: row["max_concurrency"] for row in rows}


def test_a_small_pool_step_by_step():
    found = frontiers(num_kv_blocks=67, block_size=16, prompt_len=48, output_len=112)
    # 160 tokens are 10 blocks; half of them and a block of growth are 6. Admission keeps 2 % of
    # the pool free, here one block: 67 // 10 and 66 // 6.
    assert (found["native"], found["vtoken"]) == (6, 11)
    assert 6 <= found["naive"] <= 7  # in short requests a block may die as a whole


def test_an_absolute_budget_counts_in_place_of_the_ratio():
    lengths = {"num_kv_blocks": 61, "block_size": 16, "prompt_len": 48, "output_len": 112}
    found = frontiers(**lengths, kv_budget_tokens=48, modes=("vtoken",))
    assert found == {"vtoken": 60 // 4}


@pytest.mark.parametrize(
    ("num_kv_blocks", "expected"),
    [
        (5427, {"native": 5, "naive": 5, "vtoken": 10}),
        pytest.param(
            11519, {"native": 11, "naive": 11, "vtoken": 22}, marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_the_papers_capacity_points(num_kv_blocks, expected):
    found = frontiers(num_kv_blocks=num_kv_blocks, prompt_len=4032, output_len=12288)
    assert found == expected


def test_a_pool_that_holds_no_packed_request_is_refused():
    with pytest.raises(ConfigError, match="--num-kv-blocks 400: at least 512 blocks"):
        dry_frontier(num_kv_blocks=400, prompt_len=4032, output_len=12288)

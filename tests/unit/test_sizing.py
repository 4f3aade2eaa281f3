"""How many slots a request needs at its peak."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from solo_request import SoloRequest
from test_scalar_ops import budget

from vtoken.config import VTokenConfig
from vtoken.core.budget import peak_tokens
from vtoken.errors import ConfigError
from vtoken.vllm_plugin.settings import config_of, peak_blocks_per_request


def vllm_config(settings) -> SimpleNamespace:
    return SimpleNamespace(additional_config=settings)


def test_without_a_budget_every_token_needs_a_slot():
    assert peak_tokens(None, 1000, 16) == 1000


@pytest.mark.parametrize("chunk", [1, 4, 16])
@pytest.mark.parametrize("policy", ["random", "streaming-llm"])
def test_a_prompt_in_chunks_never_needs_more(policy, chunk):
    b = budget(policy, tokens=16, interval=5)
    solo = SoloRequest(b)
    most = 0
    for _ in range(64 // chunk):
        solo.step(chunk)
        most = max(most, solo.table.num_physical_tokens)
    for _ in range(30):
        solo.step(1)
        most = max(most, solo.table.num_physical_tokens)
    peak = peak_tokens(b, solo.length, chunk)
    assert most <= peak < solo.length


def test_never_more_than_the_request_has():
    assert peak_tokens(budget(tokens=64), 30, 16) == 30


def test_scores_are_asked_for_ahead_and_cost_no_room():
    plain, scored = budget("random", tokens=40), budget("tova", tokens=40)
    assert peak_tokens(scored, 500, 1) == peak_tokens(plain, 500, 1) == 40 + plain.interval_tokens


def test_blocks_per_request_only_shrink_where_blocks_are_released():
    settings = {"policy": "random", "kv_budget_tokens": 64}
    shrinks = peak_blocks_per_request(vllm_config({"vtoken": settings}), 16, 4096)
    assert shrinks == -(-(64 + 16 + 15) // 16)
    for mode in ("naive", "indirection", "native"):
        other = vllm_config({"vtoken": settings | {"mode": mode}})
        assert peak_blocks_per_request(other, 16, 4096) is None


def test_config_of():
    assert config_of(vllm_config(None)) is None
    assert config_of(vllm_config({})) is None
    assert config_of(vllm_config({"vtoken": {"mode": "native"}})) is None
    assert config_of(vllm_config({"vtoken": {"mode": "naive"}})) == VTokenConfig(mode="naive")
    with pytest.raises(ConfigError, match="a mapping"):
        config_of(vllm_config({"vtoken": "yes"}))
    with pytest.raises(ConfigError, match="did you mean"):
        config_of(vllm_config({"vtoken": {"polcy": "random"}}))

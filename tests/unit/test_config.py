"""VTokenConfig: one sentence per mistake, naming the option and what is allowed."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from vtoken.config import VTokenConfig, option_name
from vtoken.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "option", "allowed"),
    [
        ({"eviction_ratio": 1.0}, "--eviction-ratio", "from 0 to below 1"),
        ({"eviction_ratio": -0.1}, "--eviction-ratio", "from 0 to below 1"),
        ({"eviction_ratio": "half"}, "--eviction-ratio", "from 0 to below 1"),
        ({"kv_budget_tokens": 0}, "--kv-budget-tokens", "1 or more"),
        ({"kv_budget_tokens": 2.5}, "--kv-budget-tokens", "1 or more"),
        ({"eviction_interval_tokens": 0}, "--eviction-interval", "1 or more"),
        ({"fragmentation_threshold": 1.0}, "--fragmentation-threshold", "below 1"),
        ({"mode": "fast"}, "--mode", "native"),
        ({"evict_when": "never"}, "--evict-when", "always"),
        ({"score_queries": 0}, "--score-queries", "from 1"),
        ({"score_queries": "most"}, "--score-queries", "`all`"),
        ({"relocation": "async"}, "--relocation", "inline"),
        ({"evicton_ratio": 0.5}, "evicton_ratio", "did you mean 'eviction_ratio'?"),
        ({"eviction_ratio": 0.5, "kv_budget_tokens": 9}, "--kv-budget-tokens", "one of them"),
        ({"record_decisions": "a", "replay_decisions": "b"}, "--replay-decisions", "together|with"),
    ],
)
def test_a_mistake_is_one_sentence(settings, option, allowed):
    with pytest.raises(ConfigError) as caught:
        VTokenConfig.from_mapping(settings)
    text = str(caught.value)
    assert option in text and any(a in text for a in allowed.split("|"))
    assert "\n" not in text and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"policy": "h20"}, "did you mean 'h2o'?"),
        ({"policy": "random", "policy_args": {"windows": 3}}, "windows"),
        ({"policy": "random", "kv_budget_tokens": 20}, "at least 21"),
        ({"policy": "random", "kv_budget_tokens": 9, "recent_tokens": 5}, "at least 10"),
        ({"policy": "streaming-llm", "kv_budget_tokens": 4}, "at least 5"),
        ({"policy": "sliding-window", "sink_tokens": 2}, "sink"),
    ],
)
def test_a_budget_that_cannot_be_kept(settings, option):
    with pytest.raises(ConfigError, match=None) as caught:
        VTokenConfig.from_mapping(settings).make_budget(16)
    assert option in str(caught.value)


def test_the_smallest_budget_is_sinks_plus_recent_plus_one():
    config = VTokenConfig.from_mapping({"policy": "random", "kv_budget_tokens": 21})
    assert config.make_budget(16).tokens(1000) == 21


def test_defaults():
    config = VTokenConfig()
    assert config.mode == "vtoken" and config.policy == "h2o"
    assert config.effective_ratio == 0.5 and config.interval_tokens(16) == 16
    assert config.make_budget(16).tokens(101) == 51


def test_an_absolute_budget_has_no_ratio():
    config = VTokenConfig(kv_budget_tokens=64)
    assert config.effective_ratio is None
    assert config.make_budget(16).tokens(10_000) == 64


@pytest.mark.parametrize(
    ("mode", "hooks", "evicts"),
    [
        ("native", False, False),
        ("indirection", True, False),
        ("naive", True, True),
        ("vtoken", True, True),
    ],
)
def test_modes(mode, hooks, evicts):
    config = VTokenConfig(mode=mode)
    assert (config.hooks_installed, config.evicts) == (hooks, evicts)
    assert (config.make_budget(16) is not None) == evicts


def test_frozen():
    with pytest.raises(ValidationError):
        VTokenConfig().mode = "native"


def test_every_key_has_an_option_name():
    for key in VTokenConfig.model_fields:
        name = option_name(key)
        assert name.startswith("--") or name == "policy_args"

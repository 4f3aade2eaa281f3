"""Options of a request: what is taken, what is refused, and the budget that comes of it."""

from __future__ import annotations

import pytest

from vtoken.config import VTokenConfig
from vtoken.errors import ConfigError
from vtoken.scheduling.request_options import RequestOptions, read_options, request_budget

H2O = VTokenConfig(policy="h2o", eviction_ratio=0.5)


def budget(config: VTokenConfig | None = H2O, **xargs):
    return request_budget(config, read_options({f"vtoken_{k}": v for k, v in xargs.items()}), 16)


@pytest.mark.parametrize("extra", [None, {}, {"session_id": "a", "other": 3}])
def test_other_peoples_options_are_not_ours(extra):
    assert read_options(extra) is None


@pytest.mark.parametrize("value", [True, 1, 1.0, "true", "True", "1"])
def test_what_counts_as_true(value):
    assert read_options({"vtoken_enabled": value}) == RequestOptions(enabled=True)


@pytest.mark.parametrize("value", [False, 0, 0.0, "false", "0"])
def test_what_counts_as_false(value):
    assert read_options({"vtoken_enabled": value}) == RequestOptions(enabled=False)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("enabled", 2), ("enabled", "yes"), ("enabled", []), ("policy", 3), ("policy", ["h2o"]),
        ("eviction_ratio", 1.0), ("eviction_ratio", -0.1), ("eviction_ratio", float("nan")),
        ("eviction_ratio", True), ("eviction_ratio", "half"), ("kv_budget_tokens", 0),
        ("kv_budget_tokens", 1.5), ("kv_budget_tokens", float("inf")), ("kv_budget_tokens", [1]),
    ],
)  # fmt: skip
def test_wrong_values_are_named(key, value):
    with pytest.raises(ConfigError) as error:
        read_options({f"vtoken_{key}": value})
    assert error.value.option == f"vtoken_{key}"


def test_unknown_option_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'vtoken_policy'"):
        read_options({"vtoken_polici": "h2o"})


@pytest.mark.parametrize(
    "xargs",
    [
        {"vtoken_eviction_ratio": 0.5, "vtoken_kv_budget_tokens": 64},
        {"vtoken_enabled": False, "vtoken_policy": "random"},
        {"vtoken_enabled": False, "vtoken_kv_budget_tokens": 64},
    ],
)
def test_contradictions(xargs):
    with pytest.raises(ConfigError):
        read_options(xargs)


def test_without_options_the_servers_budget():
    own = request_budget(H2O, None, 16)
    assert (own.policy.name, own.eviction_ratio) == ("h2o", 0.5)


def test_a_budget_replaces_the_servers_ratio_and_the_other_way_round():
    assert budget(kv_budget_tokens="96").tokens(10_000) == 96
    absolute = VTokenConfig(policy="h2o", kv_budget_tokens=64)
    assert budget(absolute, eviction_ratio=0.25).tokens(1000) == 750


def test_disabled_keeps_everything():
    assert budget(enabled=False) is None


def test_another_policy_leaves_the_others_parameters_behind():
    config = VTokenConfig(policy="scissorhands", policy_args={"history_tokens": 7})
    assert budget(config, policy="streaming-llm").policy.name == "streaming-llm"
    assert budget(config, kv_budget_tokens=64).policy.history_tokens == 7


def test_scores_that_nobody_collects():
    with pytest.raises(ConfigError, match="collects accumulated scores for h2o"):
        budget(policy="tova")
    with pytest.raises(ConfigError, match="collects none for random"):
        budget(VTokenConfig(policy="random"), policy="h2o")


@pytest.mark.parametrize("mode", [None, "indirection"])
def test_a_server_that_does_not_evict(mode):
    config = None if mode is None else VTokenConfig(mode=mode)
    assert budget(config, enabled=False) is None
    with pytest.raises(ConfigError, match=f"--mode {mode or 'native'}"):
        budget(config, kv_budget_tokens=64)


def test_budget_below_the_floor():
    with pytest.raises(ConfigError, match="at least"):
        budget(kv_budget_tokens=3)

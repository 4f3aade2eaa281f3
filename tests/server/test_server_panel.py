"""What the server says at start-up, and how addresses and settings are read."""

from __future__ import annotations

import os

import pytest

from vtoken.config import VTokenConfig
from vtoken.engine import server as launch
from vtoken.errors import ConfigError
from vtoken.server.panel import _output_text, concurrency
from vtoken.server.terminal import pool_map, state_url


def test_concurrency_with_and_without_reclamation():
    config = VTokenConfig(policy="streaming-llm", kv_budget_tokens=64)
    row = concurrency(config, config.make_budget(16), 100, 16, 1024)
    assert row["without_reclamation"] == 100 // 64
    # 64 tokens, one interval of 16, and a chunk that may start anywhere in a block.
    assert row["with_reclamation"] == 100 // 6
    assert row["formula"] == "100 // 64 blocks, 100 // 6 blocks"


@pytest.mark.parametrize("mode", ["native", "indirection", "naive"])
def test_no_promise_where_nothing_is_packed(mode):
    config = VTokenConfig(mode=mode, policy="streaming-llm", kv_budget_tokens=64)
    row = concurrency(config, config.make_budget(16), 100, 16, 1024)
    assert row["with_reclamation"] == row["without_reclamation"] == 1


def test_whether_output_may_differ():
    config = VTokenConfig(policy="streaming-llm", kv_budget_tokens=64)
    assert "longer than 80 tokens" in _output_text(config, config.make_budget(16))
    assert _output_text(VTokenConfig(mode="native"), None) == "the same as stock vLLM's"
    calm = VTokenConfig(policy="streaming-llm", kv_budget_tokens=64, evict_when="pressure")
    assert "while there is room" in _output_text(calm, calm.make_budget(16))


def test_settings_default_only_where_nothing_is_given():
    assert launch.merge_settings({}, {}) == VTokenConfig(**launch.DEFAULT_SETTINGS)
    given = launch.merge_settings({"policy": "random"}, {"policy": "h2o", "eviction_ratio": 0.25})
    assert (given.mode, given.policy, given.eviction_ratio) == ("vtoken", "random", 0.25)
    assert launch.merge_settings({}, {}).evict_when == "pressure"
    assert launch.merge_settings({"policy": "random"}, {}).evict_when == "pressure"
    assert launch.merge_settings({"evict_when": "always"}, {}).evict_when == "always"
    with pytest.raises(ConfigError, match="trace"):
        launch.merge_settings({}, {"trace": True})


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000/vtoken/state"),
        ("http://host:1/v1", "http://host:1/vtoken/state"),
        ("https://host/root/vtoken/", "https://host/root/vtoken/state"),
        ("http://host/vtoken/state", "http://host/vtoken/state"),
    ],
)
def test_addresses(address, expected):
    assert state_url(address) == expected


@pytest.mark.parametrize("address", ["", "ftp://host", "http://"])
def test_no_address(address):
    with pytest.raises(ConfigError, match="URL"):
        state_url(address)


def test_public_url_can_be_opened():
    assert launch.public_url("http://0.0.0.0:8000") == "http://127.0.0.1:8000"
    assert launch.public_url("http://10.1.2.3:80") == "http://10.1.2.3:80"


class FakeEntryPoint:
    def __init__(self, name: str) -> None:
        self.name = name


def fake_plugins(monkeypatch, listed: str | None, **groups: list[str]) -> None:
    known = {f"vllm.{group}": [FakeEntryPoint(n) for n in names] for group, names in groups.items()}
    monkeypatch.setattr(launch, "entry_points", lambda group: known.get(group, []))
    monkeypatch.setenv("VTOKEN_STATUS_PAGE", "")
    if listed is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", listed)


def test_the_page_switches_no_other_plugin_off(monkeypatch):
    fake_plugins(monkeypatch, None, general_plugins=["vtoken", "lora"], platform_plugins=["tpu"])
    monkeypatch.setenv("VLLM_PLUGINS", "placeholder")  # so that monkeypatch restores it
    monkeypatch.delenv("VLLM_PLUGINS")
    assert launch.allow_status_page(True) is True
    assert os.environ["VLLM_PLUGINS"] == "lora,tpu,vtoken"


def test_a_users_list_is_added_to(monkeypatch):
    fake_plugins(monkeypatch, "lora", general_plugins=["vtoken", "lora", "other"])
    assert launch.allow_status_page(True) is True
    assert os.environ["VLLM_PLUGINS"] == "lora,vtoken"


def test_the_page_switches_no_other_page_on(monkeypatch):
    fake_plugins(monkeypatch, None, general_plugins=["vtoken", "admin"], endpoint_plugins=["admin"])
    assert "admin" in launch.allow_status_page(True)
    assert "VLLM_PLUGINS" not in os.environ


def test_no_status_page_leaves_plugins_alone(monkeypatch):
    fake_plugins(monkeypatch, None, general_plugins=["vtoken"])
    assert launch.allow_status_page(False) == "--no-status-page"
    assert "VLLM_PLUGINS" not in os.environ
    assert os.environ["VTOKEN_STATUS_PAGE"] == "0"


def test_map_shows_every_cell_by_what_fills_most_of_it():
    cells = [[16, 0, 0, 0], [0, 9, 7, 0], [0, 0, 0, 16], [0, 0, 0, 0]]
    engine = {"cells": cells, "block_size": 16, "blocks_per_cell": 1, "blocks": {"usable": 4}}
    assert pool_map(engine, 80).plain.startswith("█▓▒·\n")

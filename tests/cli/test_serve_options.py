"""`vtoken serve` and `vtoken top`: what is refused before anything is started."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import yaml

from vtoken.config import VTokenConfig
from vtoken.engine import server as launch
from vtoken_cli.app import main
from vtoken_cli.commands.serve import engine_settings, serve
from vtoken_cli.given import build_run

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--policy", "h20"], "--policy 'h20': did you mean 'h2o'?"),
        (["--mode", "fast"], "--mode 'fast'"),
        (["--eviction-ratio", "1.5"], "--eviction-ratio"),
        (["--eviction-ratio", "0.5", "--kv-budget-tokens", "64"], "give one of them"),
        (["--port", "70000"], "--port 70000"),
        (["tiny-llama", "--model", "tiny-gemma"], "MODEL says tiny-llama"),
    ],
)
def test_wrong_options_are_said_before_anything_starts(capsys, monkeypatch, options, said):
    for module in ("vllm.entrypoints.cli.serve", "vllm.entrypoints.launchers.cli_args"):
        monkeypatch.setitem(sys.modules, module, None)  # an import of it would fail
    assert main(["serve", *options]) == 2
    assert said in capsys.readouterr().err


def test_top_without_a_server(capsys):
    assert main(["top", "127.0.0.1:9", "-n", "1"]) == 3
    assert "no answer from http://127.0.0.1:9/vtoken/state" in capsys.readouterr().err


def test_top_of_something_else(capsys):
    assert main(["top", "ftp://host"]) == 2
    assert "URL 'ftp://host'" in capsys.readouterr().err


class FakeApi:
    """Stands in for the `openai` client: a chunk for every token."""

    asked: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, base_url, **_):
        self.url = base_url
        self.completions = self.chat = self
        self.chat.completions = self
        self.models = SimpleNamespace(list=lambda: SimpleNamespace(data=[SimpleNamespace(id="m")]))

    def create(self, *, model, max_tokens, prompt="", **_):
        self.asked.append((self.url, prompt))
        reasons = [None] * (max_tokens - 1) + ["length"]
        choices = [[SimpleNamespace(finish_reason=reason)] for reason in reasons]
        return iter([SimpleNamespace(choices=c) for c in choices])


@pytest.fixture
def fake_api(monkeypatch):
    FakeApi.asked = []
    monkeypatch.setitem(
        sys.modules, "openai", SimpleNamespace(OpenAI=FakeApi, DefaultHttpxClient=dict)
    )
    return FakeApi


def test_load_on_one_server(capsys, fake_api, monkeypatch):
    args = ["--clients", "2", "--seconds", "1s", "--max-tokens", "5"]
    assert main(["load", "http://127.0.0.1:9/", "--json", *args]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] and found["clients"] == 2 and found["failed"] == []
    assert found["chunks"] == 5 * found["completed"] > 0
    monkeypatch.setattr(fake_api, "create", lambda self, **_: iter([]))  # ends at once
    assert main(["load", "http://127.0.0.1:9", "--json", *args]) == 1
    assert not json.loads(capsys.readouterr().out)["passed"]


def test_load_compares_two_servers_in_turn(capsys, fake_api):
    args = ["load", "http://a", "http://b", "--pairs", "4", "--max-tokens", "8", "--json"]
    assert main(args) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pairs"] == 4 and len(found["median_itl_ms"]) == 2
    assert found["interval"][0] <= found["median_ratio"] <= found["interval"][1]
    assert [url[7] for url, _ in fake_api.asked] == list("abbaabbaab")  # the first pair warms up


def test_load_wants_an_address(capsys):
    assert main(["load"]) == 2
    assert "URL '': a server's address" in capsys.readouterr().err


def test_model_from_either_place():
    rows = serve.rows
    assert engine_settings(build_run({"model_name": "a"}, rows, ())) == {"model": "a"}
    assert engine_settings(build_run({"model": "b"}, rows, ())) == {"model": "b"}
    assert engine_settings(build_run({}, rows, ())) == {}


def test_example_settings_are_settings():
    given = yaml.safe_load((EXAMPLES / "systemd" / "vtoken.yaml").read_text())
    run = build_run(given, serve.rows, ())
    assert VTokenConfig.from_mapping(run.vtoken).policy == "h2o"
    assert run.engine["kv_cache_memory_bytes"] == 4 * 2**30


def test_users_flags_win_over_our_defaults(monkeypatch):
    pytest.importorskip("vllm")
    config = VTokenConfig(policy="random")
    extra = ["--dtype", "bfloat16", "--additional-config", '{"other": 1}']
    given = launch.read_given(extra)
    argv = launch.vllm_argv(config, {"model": "tiny-llama", "num_kv_blocks": 9}, extra, given)
    args = launch.make_parser(extra).parse_args(argv)
    assert args.dtype == "bfloat16"
    assert args.num_gpu_blocks_override == 10  # vLLM's null block is added
    assert args.served_model_name == ["tiny-llama"]
    assert args.additional_config == {
        "other": 1,
        "vtoken": {"policy": "random", "mode": "vtoken"},
    }


def test_what_vllm_does_not_know_is_said_in_one_line(capsys):
    pytest.importorskip("vllm")
    assert main(["serve", "tiny-llama", "--", "--no-such-flag"]) == 2
    err = capsys.readouterr().err
    assert "no-such-flag" in err
    assert "Traceback" not in err

"""Bad requests: the right status for that request, and nothing happens to the others."""

from __future__ import annotations

import json
import time

import pytest

pytest.importorskip("openai")
pytestmark = pytest.mark.vllm

COMPLETIONS = "/v1/completions"


def body(**fields) -> bytes:
    return json.dumps(
        {"model": "tiny-llama", "prompt": "hello", "max_tokens": 4, **fields}
    ).encode()


BAD = {
    "malformed JSON": (COMPLETIONS, b'{"model": "tiny-llama", "prompt":', 400),
    "not an object": (COMPLETIONS, b"[1, 2]", 400),
    "empty body": (COMPLETIONS, b"", 400),
    "not UTF-8": (COMPLETIONS, b'{"model": "\xff\xfe"}', 400),
    "max_tokens is text": (COMPLETIONS, body(max_tokens="many"), 400),
    "max_tokens below zero": (COMPLETIONS, body(max_tokens=-1), 400),
    "temperature below zero": (COMPLETIONS, body(temperature=-3.0), 400),
    "no such model": (COMPLETIONS, body(model="gpt-7"), 404),
    "no such path": ("/v1/nothing", body(), 404),
    "chat without messages": ("/v1/chat/completions", body(), 400),
    "token ids outside the vocabulary": (COMPLETIONS, body(prompt=[10**7]), 400),
    "longer than the model": (COMPLETIONS, body(prompt="a b " * 3000), 400),
    "a body of 3 MB": (COMPLETIONS, body(prompt="ab" * 1_500_000), 400),
    "longer with its output": (COMPLETIONS, body(max_tokens=5000), 400),
    "larger than the pool": (
        COMPLETIONS,
        body(max_tokens=1000, vllm_xargs={"vtoken_enabled": 0}),
        400,
    ),
    "xargs is a list": (COMPLETIONS, body(vllm_xargs=[1]), 400),
    "unknown option": (COMPLETIONS, body(vllm_xargs={"vtoken_polcy": "h2o"}), 400),
    "unknown policy": (COMPLETIONS, body(vllm_xargs={"vtoken_policy": "best"}), 400),
    "policy with other scores": (COMPLETIONS, body(vllm_xargs={"vtoken_policy": "tova"}), 400),
    "budget is text": (COMPLETIONS, body(vllm_xargs={"vtoken_kv_budget_tokens": "lots"}), 400),
    "budget below the floor": (COMPLETIONS, body(vllm_xargs={"vtoken_kv_budget_tokens": 2}), 400),
    "ratio of one": (COMPLETIONS, body(vllm_xargs={"vtoken_eviction_ratio": 1.0}), 400),
    "two budgets": (
        COMPLETIONS,
        body(vllm_xargs={"vtoken_eviction_ratio": 0.5, "vtoken_kv_budget_tokens": 64}),
        400,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_status(idle_server, name):
    path, data, expected = BAD[name]
    status, _, text = idle_server.ask(path, data)
    assert status == expected, text[:500]


def test_status_of_a_stream(idle_server):
    """Refused before the stream begins: its status line cannot be taken back."""
    data = body(stream=True, vllm_xargs={"vtoken_policy": "best"})
    status, _, text = idle_server.ask(COMPLETIONS, data)
    assert status == 400
    assert "'best'" in text


def test_message_names_option_value_and_what_is_allowed(idle_server):
    data = body(vllm_xargs={"vtoken_policy": "h20"})
    message = json.loads(idle_server.ask(COMPLETIONS, data)[2])["error"]["message"]
    assert message == "vtoken_policy 'h20': did you mean 'h2o'?"


def test_what_does_not_fit_is_said_with_numbers(idle_server):
    data = body(max_tokens=1000, stream=True, vllm_xargs={"vtoken_enabled": False})
    status, _, text = idle_server.ask(COMPLETIONS, data)
    assert status == 400
    assert "needs 32 KV blocks of 32 tokens at its peak, the pool has 26" in text


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/models", "/vtoken", "/vtoken/state"])
def test_no_key_no_answer(idle_server, path):
    data = body() if path == COMPLETIONS else None
    assert idle_server.status(path, data, headers={}) == 401
    assert idle_server.status(path, data, headers={"Authorization": "Bearer wrong"}) == 401
    assert idle_server.status(path, data) == 200


def _steps_at_rest(server) -> int:
    """The scheduler's step number once the last good request has left it."""
    before = -1
    for _ in range(50):
        now = server.engine()["step"]
        if now == before:
            return now
        before = now
        time.sleep(0.5)
    raise AssertionError("the server does not come to rest")


def test_a_thousand_in_a_row_leave_the_server_as_it_was(idle_server):
    steps = _steps_at_rest(idle_server)
    names = [n for n in BAD if n != "a body of 3 MB"]
    statuses = []
    for number in range(1000):
        path, data, expected = BAD[names[number % len(names)]]
        statuses.append((idle_server.status(path, data), expected))
    assert all(got == expected for got, expected in statuses)
    assert idle_server.engine()["step"] == steps, "a bad request reached the scheduler"
    assert idle_server.status(COMPLETIONS, body()) == 200

"""`vtoken top` reads what anyone may have put there, and asks its own machine directly."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO

import pytest

from vtoken.errors import VTokenError
from vtoken.server.terminal import is_local, read_state, render, state_url
from vtoken_cli.app import main

COUNTS = dict.fromkeys(
    ("prompt_tokens", "output_tokens", "live", "dead", "blocks", "evicted", "moved", "preemptions"), 1
)  # fmt: skip


def state_with(request_id: str, model: str = "m", policy: str = "h2o") -> dict:
    engine = {
        "engine": 0, "mode": "vtoken", "policy": policy, "block_size": 16, "blocks_per_cell": 1,
        "blocks": {"usable": 1, "free": 0, "cached": 0, "owned": 1}, "num_running": 1,
        "num_waiting": 0, "tokens": {"live": 1, "dead": 0}, "fragmentation_ratio": 0.0,
        "counters": {}, "cells": [[1, 0, 15, 0]], "requests": [{"id": request_id, **COUNTS}],
    }  # fmt: skip
    return {"model": model, "engines": [engine]}


@pytest.fixture
def answer(monkeypatch):
    """A server that answers with what it is given, behind a proxy that answers nothing."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(server.status)
            self.end_headers()
            self.wfile.write(server.body)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def put(body: object, status: int = 200) -> str:
            server.body = body if isinstance(body, bytes) else json.dumps(body).encode()
            server.status = status
            return f"http://127.0.0.1:{server.server_port}"

        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        yield put
        server.shutdown()


HOSTILE = ("[/x]", "[bold", "\x1b]0;title\x07", "\x1b[2Jgone", "a\nb", "\u202ereversed", "\x9b31m")


@pytest.mark.parametrize("text", HOSTILE)
def test_what_clients_choose_reaches_the_terminal_as_text(answer, capsys, text):
    url = answer(state_with(text, model=text, policy=text))
    assert main(["top", url, "-n", "1"]) == 0
    shown = capsys.readouterr().out
    assert "mode vtoken" in shown and "prompt" in shown
    assert all(c.isprintable() or c == "\n" for c in shown)
    if text.startswith("["):
        assert shown.count(text) == 3


def test_colours_do_not_come_from_a_request(answer):
    from rich.console import Console

    state = read_state(state_url(answer(state_with("\x1b[31mred[/x]"))))
    console = Console(file=StringIO(), force_terminal=True, width=100)
    console.print(render(state))
    assert "\x1b[31mred" not in console.file.getvalue()
    assert "\N{REPLACEMENT CHARACTER}[31mred[/x]" in console.file.getvalue()


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b"<html>", 200, "no answer from"),
        (b"[" * 100_000, 200, "no answer from"),
        ([], 200, "is no server of vtoken serve"),
        ({"model": "m"}, 200, "is no server of vtoken serve"),
        ({}, 403, "to its own machine only"),
        ({}, 401, "wants an API key"),
        ({}, 500, "answered 500"),
    ],
)
def test_other_answers_are_one_sentence(answer, body, status, told):
    with pytest.raises(VTokenError, match=told):
        read_state(state_url(answer(body, status)))


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True),
        ("::ffff:127.0.0.1", True), ("10.0.0.1", False), ("::ffff:10.0.0.1", False),
        ("example.com", False), ("testclient", False), ("", False), (None, False),
    ],
)  # fmt: skip
def test_what_is_this_machine(host, local):
    assert is_local(host) == local


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("client", "key", "given", "status"),
    [
        ("127.0.0.1", None, {}, 200),
        ("::1", None, {}, 200),
        ("10.0.0.1", None, {}, 403),
        ("10.0.0.1", "k", {}, 401),
        ("10.0.0.1", "k", {"Authorization": "Bearer k"}, 200),
        ("127.0.0.1", "k", {}, 401),
    ],
)
@pytest.mark.parametrize("path", ["/vtoken", "/vtoken/state"])
def test_who_may_look(monkeypatch, client, key, given, status, path):
    from types import SimpleNamespace

    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    from vtoken.vllm_plugin.endpoint import StatusPage

    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setenv("VTOKEN_STATUS_PAGE", "1")

    async def read() -> dict:
        return {"model": "m", "engines": []}

    app = FastAPI()
    app.state.args = SimpleNamespace(api_key=[key] if key else None)
    app.state.vtoken_reader = SimpleNamespace(read=read)
    StatusPage().attach_router(app)
    answer = TestClient(app, client=(client, 1)).get(path, headers=given)
    assert answer.status_code == status
    if status == 403:
        assert "started with an API key" in answer.json()["error"]

"""/vtoken, /vtoken/state and `vtoken top` of a running server."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("openai")
pytestmark = pytest.mark.vllm

CHROMIUM = shutil.which("chromium")
# Without these, a headless browser looks for hosts of its maker.
CHROMIUM_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


def test_page_needs_nothing_from_elsewhere(idle_server):
    status, headers, page = idle_server.ask("/vtoken")
    assert status == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)""", page)
    assert not re.search(r"https?://|@import|url\(", page)


def test_a_browsers_way_to_give_the_key(idle_server):
    refused = idle_server.ask("/vtoken", headers={})
    assert refused[0] == 401
    assert refused[1]["WWW-Authenticate"].startswith("Basic ")
    pair = base64.b64encode(f"me:{idle_server.api_key}".encode()).decode()
    assert idle_server.status("/vtoken", headers={"Authorization": f"Basic {pair}"}) == 200
    for wrong in ("Basic %%%", "Basic " + base64.b64encode(b"me:no").decode(), "Basic", "Other x"):
        assert idle_server.status("/vtoken", headers={"Authorization": wrong}) == 401


def test_state_adds_up_while_requests_run(idle_server):
    streams = [
        idle_server.client().completions.create(
            model="tiny-llama", prompt=f"{i} slow rain " * 20, max_tokens=160, stream=True,
            extra_body={"ignore_eos": True},
        )
        for i in range(3)
    ]  # fmt: skip
    for stream in streams:
        next(iter(stream))
    seen = 0
    for number, _ in enumerate(streams[0]):
        if number % 20 == 0:
            state = idle_server.engine()
            seen += state["num_running"] > 0
            check_adds_up(state)
    assert seen
    for stream in streams:
        list(stream)


def check_adds_up(state: dict) -> None:
    N, blocks = state["block_size"], state["blocks"]
    live, dead, tail, cached = (sum(c[k] for c in state["cells"]) for k in range(4))
    assert len(state["cells"]) == blocks["usable"]
    assert live + dead + tail == blocks["owned"] * N
    assert cached == blocks["cached"] * N
    assert blocks["owned"] + blocks["free"] == blocks["usable"]
    assert live == sum(r["live"] for r in state["requests"])
    assert all(r["computed"] == r["live"] + r["evicted"] for r in state["requests"])


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium")
def test_page_in_a_browser(idle_server, tmp_path):
    stream = idle_server.client().completions.create(
        model="tiny-llama", prompt="slow rain " * 40, max_tokens=600, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(iter(stream))
    address = idle_server.url.replace("://", f"://me:{idle_server.api_key}@") + "/vtoken"
    dom = subprocess.run(
        [CHROMIUM, *CHROMIUM_FLAGS, f"--user-data-dir={tmp_path}", "--virtual-time-budget=6000",
         "--dump-dom", address],
        capture_output=True, text=True, timeout=300, check=True,
    ).stdout  # fmt: skip
    stream.response.close()
    assert '<span id="model">tiny-llama</span>' in dom
    assert "mode vtoken, h2o" in dom
    assert re.search(r'id="status"[^>]*>live, ', dom), "the page did not reach the state"
    assert re.search(r'<td class="" title="cmpl-', dom), "the running request is not in the table"


def top(*options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "vtoken_cli.app", "top", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_top(idle_server):
    shown = top(idle_server.url, "-n", "1", "--api-key", idle_server.api_key)
    assert shown.returncode == 0, shown.stderr
    assert "mode vtoken, h2o" in shown.stdout
    refused = top(idle_server.url, "-n", "1")
    assert refused.returncode == 2
    assert "API key" in refused.stderr

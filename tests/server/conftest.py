"""One server for all tests that do not need one of their own: h2o, a small pool, an API key."""

from __future__ import annotations

import pytest

# 832 tokens: a request of the model's length fits only because it is cut down to its budget.
BUDGET_TOKENS, BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 64, 32, 26, 1024
API_KEY = "a-key-for-tests"
# Random weights would fill an answer with the blanks that JSON allows between its parts.
TERSE_JSON = '{"backend": "xgrammar", "disable_any_whitespace": true}'


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    from server_process import Server

    started = Server(
        tmp_path_factory.mktemp("server") / "server.log",
        *("--policy", "h2o", "--kv-budget-tokens", str(BUDGET_TOKENS), "--evict-when", "always"),
        *("--num-kv-blocks", str(NUM_BLOCKS), "--block-size", str(BLOCK_SIZE)),
        *("--max-model-len", str(MAX_MODEL_LEN)),
        vllm=("--api-key", API_KEY, "--structured-outputs-config", TERSE_JSON),
        api_key=API_KEY,
    )
    try:
        yield started.wait_until_up()
    finally:
        code = started.stop()
    assert code == 0, f"SIGTERM ended it with {code}: {started.log_text()[-2000:]}"


@pytest.fixture
def idle_server(server):
    """The server with no request in it, before and after."""
    server.wait_idle()
    yield server
    state = server.wait_idle()
    assert state["blocks"]["owned"] == 0, state["requests"]
    assert state["blocks"]["free"] == state["blocks"]["usable"]

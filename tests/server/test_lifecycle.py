"""A server with nothing asked of vToken, and how a server ends when its engine does."""

from __future__ import annotations

import os
import signal
import time

import pytest

pytest.importorskip("openai")
pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    from server_process import Server

    started = Server(
        tmp_path_factory.mktemp("bare") / "server.log",
        *("--num-kv-blocks", "40", "--max-model-len", "512", "--no-status-page"),
    )
    try:
        yield started.wait_until_up()
    finally:
        started.kill()


def test_start_up_says_what_it_is(bare):
    panel = bare.out.read_text()
    assert "40 blocks x 32 tokens = 1,280 tokens" in panel
    assert "the same as stock vLLM's" in panel
    assert "run capacity-scan" in panel
    assert bare.url in panel


def test_no_status_page(bare):
    assert bare.status("/vtoken") == bare.status("/vtoken/state") == 404


def test_it_serves(bare):
    answer = bare.client().completions.create(model="tiny-llama", prompt="hello", max_tokens=5)
    assert answer.usage.completion_tokens == 5


def test_it_evicts_for_a_request_that_asks(bare):
    """Bare, it evicts under pressure only, so a request may ask for a budget; not below the floor."""
    import openai

    def complete(budget: int):
        return bare.client().completions.create(
            model="tiny-llama", prompt="hello", max_tokens=5,
            extra_body={"vllm_xargs": {"vtoken_kv_budget_tokens": budget}},
        )  # fmt: skip

    assert complete(256).usage.completion_tokens == 5
    with pytest.raises(openai.BadRequestError, match="vtoken_kv_budget_tokens.*at least"):
        complete(2)


def test_a_dead_engine_ends_the_server(bare):
    """Comes last: unhealthy at once, then a status that is not 0, and no process is left."""
    stream = bare.client().completions.create(
        model="tiny-llama", prompt="hello", max_tokens=400, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(iter(stream))
    engine = bare.child_named("EngineCore")
    os.kill(engine, signal.SIGKILL)
    statuses = set()
    for _ in range(100):
        statuses.add(bare.status("/health"))
        if (200 not in statuses and statuses) or bare.process.poll() is not None:
            break
        if 503 in statuses or 0 in statuses:
            break
        time.sleep(0.1)
    assert statuses & {503, 0}, "the server says it is healthy"
    assert bare.wait_exit() == 3
    assert "the engine died" in bare.log_text()
    assert not os.path.exists(f"/proc/{engine}")

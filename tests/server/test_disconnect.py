"""Clients that go away: their blocks come back at once, nobody else notices."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("openai")
pytestmark = pytest.mark.vllm

PROMPT = "the mill ground nothing but slow rain and the miller did not mind " * 3


def _stream(server, max_tokens: int):
    return server.client().completions.create(
        model="tiny-llama", prompt=PROMPT, max_tokens=max_tokens, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip


def test_blocks_of_a_client_that_left_return_within_a_step(idle_server):
    leaves, stays = _stream(idle_server, 500), _stream(idle_server, 500)
    next(iter(leaves)), next(iter(stays))
    both = idle_server.engine()
    assert both["num_running"] == 2
    leaves.response.close()

    after = both
    for _ in range(200):
        after = idle_server.engine()
        if after["num_running"] == 1:
            break
        time.sleep(0.02)
    assert after["num_running"] == 1, "the request of the client that left goes on"
    # In the first state without it, its blocks are gone too: nothing is held for a later step.
    assert after["blocks"]["owned"] == after["requests"][0]["blocks"]
    assert len(list(stays)) > 0, "the other stream was cut"


def test_many_clients_that_leave(idle_server):
    streams = [_stream(idle_server, 500) for _ in range(5)]
    for stream in streams:
        next(iter(stream))
    for stream in streams:
        stream.response.close()
    state = idle_server.wait_idle()
    assert state["blocks"]["free"] == state["blocks"]["usable"]
    assert idle_server.status("/health") == 200

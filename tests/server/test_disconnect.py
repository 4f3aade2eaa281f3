"""Clients that go away: their blocks come back at once, no other client notices.

On a busy machine a stream may be over before its client gets to leave it. So nothing here waits for
two streams to run at once: what was generated in all says whether the one was cut.
"""

from __future__ import annotations

import re
import time

import pytest

pytest.importorskip("openai")
pytestmark = pytest.mark.vllm

PROMPT = "the mill ground nothing but slow rain and the miller did not mind " * 3
NUM_TOKENS = 800
MOST_TRIES = 20


def _stream(server):
    return server.client().completions.create(
        model="tiny-llama", prompt=PROMPT, max_tokens=NUM_TOKENS, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip


def _num_generated(server) -> float:
    """Tokens that the server has generated since it started; of an idle server."""
    text = server.ask("/metrics")[2]
    return float(re.search(r"^vllm:generation_tokens_total\{.*\} (\S+)$", text, re.MULTILINE)[1])


def _first_state_without(server, stream_id: str) -> dict:
    """The first state of the engine seen that no longer has this request."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        state = server.engine()
        if not any(row["id"][:13] == stream_id[:13] for row in state["requests"]):
            return state
        time.sleep(0.02)
    raise AssertionError("the request of the client that left goes on")


def _leave_one_of_two(server) -> float:
    """Leave one of two streams; returns how many tokens were generated for both."""
    before = _num_generated(server)
    leaves, stays = _stream(server), _stream(server)
    stream_id = next(iter(leaves)).id
    leaves.response.close()
    state = _first_state_without(server, stream_id)
    # In the first state without it, its blocks are gone too: nothing is held for a later step.
    held = [row["blocks"] for row in state["requests"]]
    assert state["blocks"]["owned"] == sum(held)
    finish_reasons = [chunk.choices[0].finish_reason for chunk in stays]
    assert finish_reasons[-1] == "length", "the other stream was cut"
    server.wait_idle()
    return _num_generated(server) - before


def test_blocks_of_a_client_that_left_return_within_a_step(idle_server):
    for _ in range(MOST_TRIES):
        num_generated = _leave_one_of_two(idle_server)
        assert num_generated >= NUM_TOKENS
        if num_generated < 2 * NUM_TOKENS:
            return
    raise AssertionError("no stream was ever cut: each went on to its end")


def test_many_clients_that_leave(idle_server):
    streams = [_stream(idle_server) for _ in range(5)]
    for stream in streams:
        next(iter(stream))
    for stream in streams:
        stream.response.close()
    state = idle_server.wait_idle()
    assert state["blocks"]["free"] == state["blocks"]["usable"]
    assert idle_server.status("/health") == 200

"""What people use: the real `openai` client against the server."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("openai")
pytestmark = pytest.mark.vllm

PROMPT = (
    "The canal ran uphill past seven locks and a mill, and nobody in the village asked why. " * 4
)
LONG = 150  # tokens: well past the budget of 64 and its interval of 32


def test_completion(idle_server):
    answer = idle_server.client().completions.create(
        model="tiny-llama", prompt=PROMPT, max_tokens=8
    )
    assert answer.usage.completion_tokens == 8
    assert answer.choices[0].finish_reason == "length"


def test_streams_say_what_one_answer_says(idle_server):
    # Salts keep the second from the first one's prefix: a cached prefix brings no scores with it,
    # and h2o would choose other victims.
    ask = {"model": "tiny-llama", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    create = idle_server.client().completions.create
    whole = create(**ask, extra_body={"cache_salt": "a"}).choices[0].text
    chunks = list(create(**ask, stream=True, extra_body={"cache_salt": "b"}))
    assert "".join(c.choices[0].text for c in chunks) == whole
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_chat(idle_server, stream):
    messages = [{"role": "user", "content": PROMPT}]
    answer = idle_server.client().chat.completions.create(
        model="tiny-llama", messages=messages, max_tokens=6, stream=stream
    )
    if stream:
        reasons = [c.choices[0].finish_reason for c in answer if c.choices]
        assert [r for r in reasons if r] == ["length"]
    else:
        assert answer.choices[0].message.role == "assistant"
        assert answer.usage.completion_tokens == 6


def test_json_schema_output(idle_server):
    """The weights are random: whatever comes out must still follow the schema, past the budget."""
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "level": {"enum": [1, 2, 3]}},
        "required": ["colour", "level"],
        "additionalProperties": False,
    }
    answer = idle_server.client().chat.completions.create(
        model="tiny-llama",
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": schema}},
    )
    found = json.loads(answer.choices[0].message.content)
    assert found["colour"] in ("red", "green")
    assert found["level"] in (1, 2, 3)


def _evicted_by(server, **xargs) -> int:
    before = server.engine()["counters"]["evicted_tokens"]
    extra = {"ignore_eos": True, **({"vllm_xargs": xargs} if xargs else {})}
    server.client().completions.create(
        model="tiny-llama", prompt=PROMPT, max_tokens=LONG, temperature=0, extra_body=extra
    )
    return server.engine()["counters"]["evicted_tokens"] - before


def test_a_request_may_keep_all_its_tokens(idle_server):
    assert _evicted_by(idle_server) > 0
    assert _evicted_by(idle_server, vtoken_enabled=False) == 0


def test_a_request_may_have_a_budget_of_its_own(idle_server):
    tight = _evicted_by(idle_server, vtoken_kv_budget_tokens=40)
    loose = _evicted_by(idle_server, vtoken_kv_budget_tokens=120)
    assert tight > loose > 0


def test_a_request_may_have_a_policy_that_needs_no_scores(idle_server):
    assert _evicted_by(idle_server, vtoken_policy="streaming-llm", vtoken_kv_budget_tokens=40) > 0


def test_live_tokens_stay_within_the_budget(idle_server):
    budget, interval, delay = 48, 32, 2
    stream = idle_server.client().completions.create(
        model="tiny-llama",
        prompt=PROMPT,
        max_tokens=LONG,
        stream=True,
        extra_body={"ignore_eos": True, "vllm_xargs": {"vtoken_kv_budget_tokens": budget}},
    )
    held = []
    for number, _ in enumerate(stream):
        if number > 40 and number % 10 == 0:
            held += [r["live"] for r in idle_server.engine()["requests"]]
    assert held, "the request was never seen running"
    assert max(held) <= budget + interval + delay

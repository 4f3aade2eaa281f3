"""An idle engine makes progress: every request is finished, or ended with its numbers."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")
pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vtoken.config import VTokenConfig
from vtoken.engine.dry import DrySettings
from vtoken.errors import ConfigError
from vtoken.testing.engines import CheckedDryEngine

SCORED, SCORE_FREE = ["h2o", "knorm", "snapkv"], ["streaming-llm", "random"]


def make_engine(num_blocks: int, block_size: int = 4, config=None, **pool) -> CheckedDryEngine:
    pool = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "enable_prefix_caching": True, **pool}
    dry = DrySettings(
        num_kv_blocks=num_blocks, block_size=block_size, max_model_len=512, num_kv_heads=1,
        head_size=8, **pool,
    )  # fmt: skip
    return CheckedDryEngine(dry, VTokenConfig.from_mapping(config))


def finish(engine, max_steps: int) -> dict[str, str]:
    """Run to the end; finish reasons by request. Fails where there is no end."""
    reasons = {}
    for _ in range(max_steps):
        if not engine.has_unfinished():
            assert engine.check_idle() == []
            return reasons
        reasons |= {f.req_id: f.finish_reason for f in engine.step()[1]}
    raise AssertionError(f"no end after {max_steps} steps: {list(engine.scheduler.requests)}")


def drawn_prompts(full: int) -> st.SearchStrategy:
    """(prompt, output tokens, how many ask for it, steps until the next one) of each."""
    length = st.one_of(
        st.sampled_from([full, full - 1, full + 1, full - 4, full // 2, 2 * full]),
        st.integers(1, 2 * full),
    )
    return st.lists(
        st.tuples(length, st.integers(0, 1), st.integers(1, 40), st.integers(1, 4),
                  st.sampled_from([0, 0, 1, 5])),
        min_size=1, max_size=3,
    )  # fmt: skip


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(st.data())
def test_any_small_pool_serves_what_it_accepts(data):
    """Pools of 4 to 12 blocks, hits, several requests for one prompt, exact fits."""
    draw = data.draw
    num_blocks, N = draw(st.integers(4, 12)), draw(st.sampled_from([4, 8]))
    config = {
        "policy": draw(st.sampled_from(SCORED + SCORE_FREE)),
        "evict_when": draw(st.sampled_from(["always", "pressure"])),
        "eviction_interval_tokens": draw(st.sampled_from([None, 1, 2])),
        "shared_prefix": draw(st.sampled_from(["protect", "copy"])),
        "recent_tokens": 4,
        **draw(
            st.one_of(
                st.fixed_dictionaries({"kv_budget_tokens": st.integers(9, max(10, num_blocks * N))}),
                st.fixed_dictionaries({"eviction_ratio": st.sampled_from([0.3, 0.5, 0.75])}),
            )
        ),
    }  # fmt: skip
    engine = make_engine(
        num_blocks, N, config, enable_prefix_caching=draw(st.booleans()),
        async_scheduling=draw(st.booleans()), max_num_seqs=draw(st.sampled_from([8, 1])),
        max_num_batched_tokens=draw(st.sampled_from([64, 200, 8])),
    )  # fmt: skip
    tokens = 0
    for i, (length, which, output, copies, gap) in enumerate(draw(drawn_prompts(num_blocks * N))):
        for k in range(copies):
            prompt = [5 + (which * 3 + j * j) % 11 for j in range(length)]
            try:
                engine.add(f"r{i}.{k}", prompt, output)
            except ConfigError:
                break  # refused for its size, before it came in
            tokens += length + output
        for _ in range(gap):
            engine.step()
    assert set(finish(engine, 100 + 3 * tokens).values()) <= {"length"}


@pytest.mark.parametrize("evict_when", ["always", "pressure"])
@pytest.mark.parametrize("policy", ["h2o", "streaming-llm"])
@pytest.mark.parametrize("extra", [0, 1, 2])
def test_a_cached_prompt_that_fills_the_pool_is_served_again(policy, evict_when, extra):
    """Its hits cover the pool and one token is asked for: the chunk that cannot be shorter."""
    config = {"policy": policy, "kv_budget_tokens": 152, "evict_when": evict_when}
    engine = make_engine(7, 32, config, max_num_batched_tokens=512)
    prompt = [5 + (j * j) % 97 for j in range(224)]
    engine.add("first", prompt, 1)
    assert len(finish(engine, 50)) == 1
    engine.add("again", prompt + [9] * extra, 40)
    engine.add("later", [4, 5, 6], 5)
    assert set(finish(engine, 150).values()) == {"length"}


@pytest.mark.parametrize("evict_when", ["always", "pressure"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_several_requests_for_one_prompt_that_fills_the_pool(evict_when, asynchronous):
    """The second is preempted and comes back; by then its prompt is cached to the last block."""
    config = {"policy": "h2o", "kv_budget_tokens": 19, "evict_when": evict_when}
    engine = make_engine(7, 4, config, async_scheduling=asynchronous)
    for name in "ab":
        engine.add(name, [5 + j % 7 for j in range(28)], 49)
    assert set(finish(engine, 300).values()) == {"length"}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("mode", "prompt_tokens"), [("vtoken", 20), ("naive", 20), ("naive", 60)])
def test_what_can_never_be_served_is_ended_with_its_numbers(
    mode, prompt_tokens, asynchronous, caplog
):
    """Let in by mistake: it, and nothing behind it, waits for ever."""
    engine = make_engine(
        8, 4, {"mode": mode, "policy": "streaming-llm", "kv_budget_tokens": 60},
        async_scheduling=asynchronous, max_num_batched_tokens=200,
    )  # fmt: skip
    engine.hooks.budgets.check_fits = lambda *args: None
    engine.add("large", [5 + j for j in range(prompt_tokens)], 60)
    engine.hooks.budgets.__dict__.pop("check_fits")
    engine.add("behind", [4, 5, 6], 5)
    assert finish(engine, 200) == {"large": "error", "behind": "length"}
    assert f"{prompt_tokens} prompt + 60 output tokens need" in caplog.text
    assert "blocks of 4 tokens at their peak, the pool has 8" in caplog.text


# ---- the same on the real engine ---------------------------------------------------------------


def serve(engine, requests, max_steps: int = 300) -> dict:
    """vLLM's outputs by request name; fails where there is no end."""
    from vllm import SamplingParams

    for name, prompt, max_tokens in requests:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        engine.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
    found = {}
    for _ in range(max_steps):
        if not engine.llm_engine.has_unfinished_requests():
            assert engine.check_idle() == []
            return found
        found |= {o.request_id: o.outputs[0] for o in engine.llm_engine.step() if o.finished}
    raise AssertionError(f"no end after {max_steps} steps: {list(engine.scheduler.requests)}")


FULL_POOL = {
    "block_size": 32, "num_kv_blocks": 7, "max_model_len": 512, "max_num_batched_tokens": 512,
    "enable_prefix_caching": True,
}  # fmt: skip


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("policy", "evict_when"), [("h2o", "pressure"), ("streaming-llm", "always")]
)
def test_the_real_engine_serves_a_cached_prompt_that_fills_its_pool(policy, evict_when):
    from one_engine import engine_for

    config = VTokenConfig(policy=policy, kv_budget_tokens=152, evict_when=evict_when)
    engine = engine_for(config, **FULL_POOL)
    prompt = [5 + (j * j) % 97 for j in range(224)]
    assert set(serve(engine, [("first", prompt, 1)])) == {"first"}
    again = [("same", prompt, 40), ("one-more", [*prompt, 9], 40), ("later", [4, 5, 6], 5)]
    found = serve(engine, again)
    assert [len(found[name].token_ids) for name, _, _ in again] == [40, 40, 5]


@pytest.mark.vllm
@pytest.mark.parametrize("asynchronous", [None, True])
def test_the_real_engine_tells_the_client_why(asynchronous, monkeypatch):
    from one_engine import engine_for

    from vtoken.vllm_plugin import requests

    monkeypatch.setattr(requests, "check_request", lambda *args: None)
    config = VTokenConfig(policy="streaming-llm", kv_budget_tokens=152)
    engine = engine_for(config, async_scheduling=asynchronous, **FULL_POOL)
    engine.reconfigure(VTokenConfig(mode="naive", policy="streaming-llm", kv_budget_tokens=152))
    found = serve(engine, [("large", [5] * 300, 20), ("behind", [4, 5, 6], 5)])
    assert (found["large"].finish_reason, found["behind"].finish_reason) == ("error", "length")
    assert "need 10 blocks of 32 tokens at their peak, the pool has 7" in found["large"].stop_reason

"""Seeded sampling of prompts in several chunks: the tokens do not depend on the chunks."""

from __future__ import annotations

import pytest
from one_engine import _open, engine_for, prompts

from vtoken.config import VTokenConfig
from vtoken.engine import EngineSettings, open_engine

pytestmark = pytest.mark.vllm

POOL = {"block_size": 32, "num_kv_blocks": 60, "max_model_len": 512, "max_num_batched_tokens": 2048}
REQUESTS = prompts(4, length=210)


def sample(engine, requests=REQUESTS, max_tokens: int = 40) -> dict[str, list[int]]:
    """Tokens by request, each sampled with a seed of its own; the last one without a seed."""
    from vllm import SamplingParams

    for i, (name, prompt) in enumerate(requests.items()):
        params = SamplingParams(
            temperature=1.0, seed=3 + i if i < 3 else None, max_tokens=max_tokens, ignore_eos=True,
            detokenize=False,
        )  # fmt: skip
        engine.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
    tokens = {}
    while engine.has_unfinished():
        for f in engine.step()[1]:
            tokens[f.req_id] = f.output_token_ids
    assert engine.check_idle() == []
    return tokens


@pytest.fixture(scope="module")
def unchunked():
    """Stock vLLM, whole prompts."""
    while _open:
        _open.pop()[1].close()
    settings = EngineSettings(**{
        "model": "tiny-llama", "max_num_seqs": 8, "enable_prefix_caching": False, **POOL,
    })  # fmt: skip
    with open_engine(settings) as native:
        return sample(native)


@pytest.mark.parametrize("asynchronous", [None, True])
def test_chunks_sample_what_whole_prompts_do(unchunked, asynchronous):
    """Chunks of 96 beside requests that decode; nothing is evicted."""
    config = VTokenConfig(policy="streaming-llm", kv_budget_tokens=500, trace=True)
    engine = engine_for(
        config, async_scheduling=asynchronous, **POOL | {"max_num_batched_tokens": 96}
    )
    tokens = sample(engine)
    assert sum(e.num_new_tokens > 1 for e in engine.trace) > 2 * len(REQUESTS)
    assert engine.counters.evicted_tokens == 0
    for name in ("r0", "r1", "r2"):
        assert tokens[name] == unchunked[name], name
    assert len(set(map(tuple, tokens.values()))) == 4


@pytest.mark.parametrize("policy", ["streaming-llm", "h2o"])
@pytest.mark.parametrize("evict_when", ["always", "pressure"])
def test_a_short_pool_cuts_seeded_prompts(policy, evict_when):
    """Whole prompts would fit a step; there is no room for them, and native makes no chunks."""
    config = VTokenConfig(policy=policy, kv_budget_tokens=96, evict_when=evict_when, trace=True)
    engine = engine_for(config, **POOL | {"num_kv_blocks": 32})
    tokens = sample(engine, prompts(4, length=400), 60)
    assert [len(t) for t in tokens.values()] == [60] * 4
    assert sum(e.num_new_tokens > 1 for e in engine.trace) > 4

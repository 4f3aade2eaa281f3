"""All policies: the shared contract, and equality with references written from their papers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_references import SCORED, reference_victims

from vtoken.policies.registry import BUILT_IN, make_policy, policy_class
from vtoken.policies.selection import lowest
from vtoken.testing import check_policy
from vtoken.testing.policy_cases import PolicyCase, random_case

SPECIAL_IDS, PUNCTUATION_IDS = (0, 1, 40), (5, 6, 7, 8, 40, 63)
# name -> parameter sets; () for all are the defaults, windows and sinks come from WINDOWS.
PARAMETERS = {
    "scissorhands": [{}, {"history_tokens": 5}],
    "snapkv": [{}, {"pool_tokens": 1}, {"pool_tokens": 31}],
    "fastgen": [
        {},
        {"special_ids": SPECIAL_IDS, "punctuation_ids": PUNCTUATION_IDS},
        {"special_ids": SPECIAL_IDS, "punctuation_ids": PUNCTUATION_IDS, "recovery_frac": 0.6},
        {"punctuation_ids": PUNCTUATION_IDS, "frequent_frac": 0.05, "local_frac": 1.0},
        {"special_ids": SPECIAL_IDS, "frequent_frac": 0.0, "recovery_frac": 1.0},
    ],
}
WINDOWS = [
    {},
    {"block_size": 32},
    {"sink_tokens": 0},
    {"sink_tokens": 1, "recent_tokens": 0},
    {"sink_tokens": 3, "recent_tokens": 9},
]
MATRIX = [
    pytest.param(name, {**parameters, **windows}, id=f"{name}-{i}-{j}")
    for name in BUILT_IN
    for i, parameters in enumerate(PARAMETERS.get(name, [{}]))
    for j, windows in enumerate(WINDOWS)
    if not (name == "sliding-window" and windows.get("sink_tokens"))
]


def build(name: str, parameters: dict):
    return make_policy(name, **{"block_size": 16, **parameters})


def expected(name: str, parameters: dict, case: PolicyCase) -> set[int]:
    """What the reference evicts in this case."""
    own = dict(parameters)
    return reference_victims(
        name,
        live=case.live_ids.tolist(),
        L=case.num_computed_tokens,
        prompt_len=case.num_prompt_tokens,
        budget=case.budget_tokens,
        scores=None if case.scores is None else case.scores.tolist(),
        token_ids=None if case.token_ids is None else case.token_ids.tolist(),
        seed=case.seed,
        prompt_hash=case.prompt_hash,
        protected=case.protected_tokens,
        num_evict=case.num_evict,
        sinks=own.pop("sink_tokens", None),
        recent=own.pop("recent_tokens", None),
        block=own.pop("block_size", 16),
        **own,
    )


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_policy_keeps_the_contract(name):
    check_policy(policy_class(name), cases=60)


@pytest.mark.parametrize("parameters", PARAMETERS["fastgen"])
def test_fastgen_keeps_the_contract_with_a_vocabulary(parameters):
    check_policy(build("fastgen", parameters), cases=60)


@pytest.mark.parametrize(("name", "parameters"), MATRIX)
def test_equals_the_reference_on_random_requests(name, parameters):
    policy = build(name, parameters)
    gen = np.random.default_rng(7)
    evicted = 0
    for _ in range(80):
        case = random_case(policy, gen)
        victims = set(policy.evict(case.view()).tolist())
        assert victims == expected(name, parameters, case), str(case)
        evicted += len(victims)
    assert evicted > 300, "the cases hardly evict anything: they test nothing"


@st.composite
def small_cases(draw, policy, scored: bool) -> PolicyCase:
    """Requests small enough to shrink well, with many tied and missing scores."""
    length = draw(st.integers(0, 60))
    live = np.flatnonzero(draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    values = st.sampled_from([0.0, 1.0, 2.0, 3.0, 0.5, 1e-30, float("nan")])
    scores = draw(st.lists(values, min_size=len(live), max_size=len(live))) if scored else None
    token_ids = draw(st.lists(st.integers(0, 63), min_size=length, max_size=length))
    return PolicyCase(
        live_ids=live.astype(np.int32),
        num_computed_tokens=length,
        num_prompt_tokens=draw(st.integers(0, 70)),
        budget_tokens=policy.floor_tokens + draw(st.integers(0, 40)),
        num_evict=draw(st.integers(0, 70)),
        scores=None if scores is None else np.array(scores, np.float32),
        protected_tokens=draw(st.integers(0, 20)),
        token_ids=np.array(token_ids, np.int32) if policy.needs_token_ids else None,
        seed=draw(st.integers(0, 99)),
        prompt_hash=draw(st.integers(0, 2**64 - 1)),
    )


@pytest.mark.parametrize("name", BUILT_IN)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_equals_the_reference_on_small_requests(name, data):
    parameters = dict(data.draw(st.sampled_from(PARAMETERS.get(name, [{}]))))
    if data.draw(st.booleans()):
        parameters |= {"recent_tokens": data.draw(st.integers(0, 8))}
    if name != "sliding-window":
        parameters |= {"sink_tokens": data.draw(st.integers(0, 6))}
    policy = build(name, {**parameters, "block_size": 2})
    case = data.draw(small_cases(policy, name in SCORED))
    victims = policy.evict(case.view()).tolist()
    assert len(victims) == len(set(victims))
    assert set(victims) == expected(name, {**parameters, "block_size": 2}, case)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, np.inf, -np.inf, np.nan])),
    st.integers(-1, 30),
)
def test_lowest_is_the_exact_bottom_by_key_and_id(keys, count):
    ids = np.arange(len(keys), dtype=np.int32) * 3 + 1
    able = [(k, int(i)) for i, k in zip(ids, keys, strict=True) if not np.isnan(k)]
    want = sorted(i for _, i in sorted(able)[: max(0, count)])
    for dtype in (np.float32, np.float64):
        assert lowest(ids, np.array(keys, dtype), count).tolist() == want


def test_windows_and_floors_follow_the_budget_or_the_block():
    floors = {name: make_policy(name, block_size=16).floor_tokens for name in BUILT_IN}
    one_block = dict.fromkeys(BUILT_IN, 4 + 16 + 1)
    assert floors == {**one_block, "h2o": 5, "streaming-llm": 5, "sliding-window": 1}
    for name, sinks in (("h2o", 4), ("streaming-llm", 4), ("sliding-window", 0)):
        assert make_policy(name, block_size=16, recent_tokens=10).floor_tokens == sinks + 11
    windows = {name: make_policy(name, block_size=32).recent(100) for name in BUILT_IN}
    one_block = dict.fromkeys(BUILT_IN, 32)
    assert windows == {**one_block, "h2o": 50, "streaming-llm": 96, "sliding-window": 100}
    # At the floor the sinks leave h2o and streaming-llm one recent token.
    assert make_policy("h2o", block_size=16).recent(5) == 1
    assert make_policy("streaming-llm", block_size=16).recent(5) == 1


@pytest.mark.parametrize("name", BUILT_IN)
def test_docstring_names_paper_and_what_sharing_a_block_table_changes(name):
    text = " ".join(policy_class(name).__doc__.split())
    for part in ("Source: ", "What differs here", "block table"):
        assert part in text, part


@pytest.mark.parametrize("name", BUILT_IN)
def test_readme_lists_the_policy(name):
    from pathlib import Path

    import vtoken.policies

    readme = Path(vtoken.policies.__file__).with_name("README.md").read_text()
    kind = policy_class(name).score_kind.value
    row = next(line for line in readme.splitlines() if line.startswith(f"| `{name}` "))
    assert row.split("|")[3].strip() == kind


def test_bench_measures_an_eviction():
    from vtoken.policies.bench import one_eviction, time_us

    call = one_eviction(make_policy("h2o", block_size=16), live_tokens=128, victims=16)
    assert len(call()) == 16
    fastest, median = time_us(call, number=2, repeats=3)
    assert 0 < fastest <= median

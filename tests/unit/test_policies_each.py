"""Each policy on requests worked out by hand, and the errors its parameters can raise."""

from __future__ import annotations

import numpy as np
import pytest

from vtoken.errors import ConfigError
from vtoken.policies import Policy, RequestView
from vtoken.policies.fastgen import punctuation_ids
from vtoken.policies.registry import make_policy
from vtoken.policies.snapkv import pool_max

NAN = float("nan")


def evict(policy: Policy, scores=None, *, live=None, budget=None, evict=2, prompt=0, **fields):
    """Victims, sorted, for a request whose live ids are 0..n-1 unless given."""
    count = len(scores) if scores is not None else 20
    live = np.arange(count, dtype=np.int32) if live is None else np.array(live, np.int32)
    view = RequestView(
        live_ids=live,
        num_computed_tokens=int(live[-1]) + 1,
        num_prompt_tokens=prompt,
        budget_tokens=len(live) - evict if budget is None else budget,
        num_evict=evict,
        scores=None if scores is None else np.array(scores, np.float32),
        **fields,
    )
    return sorted(policy.evict(view).tolist())


def bare(name: str, **parameters) -> Policy:
    """A policy without sinks and recent window, so that scores alone decide."""
    return make_policy(name, block_size=16, sink_tokens=0, recent_tokens=0, **parameters)


def test_streaming_llm_drops_the_oldest_after_the_sinks():
    policy = make_policy("streaming-llm", block_size=16)
    assert evict(policy, evict=3) == [4, 5, 6]
    live = [0, 1, 2, 3, 9, 10, 11, 12, 13]
    assert evict(policy, live=live, evict=2) == [9, 10]
    # Eight protected tokens, twelve others, nine of which the budget holds.
    assert evict(policy, evict=3, budget=9, protected_tokens=8) == [8, 9, 10]


def test_streaming_llm_leaves_an_explicit_recent_window_alone():
    policy = make_policy("streaming-llm", block_size=16, recent_tokens=14)
    assert evict(policy, evict=5) == [4, 5]


def test_sliding_window_has_no_sinks_and_says_what_has():
    assert evict(make_policy("sliding-window", block_size=16), evict=3) == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"--sink-tokens 4: 0.*streaming-llm"):
        make_policy("sliding-window", block_size=16, sink_tokens=4)


def test_random_depends_on_seed_prompt_and_length_alone():
    policy = make_policy("random", block_size=16, recent_tokens=2)
    live = list(range(300))

    def draw(seed=1, prompt_hash=2, live=live):
        return evict(policy, live=live, evict=20, seed=seed, prompt_hash=prompt_hash)

    assert draw() == draw()
    assert draw() != draw(seed=2) and draw() != draw(prompt_hash=3)
    assert draw() != draw(live=[*live, 300])


def test_random_draws_evenly_over_the_candidates():
    policy = make_policy("random", block_size=16, recent_tokens=2)
    hits = np.zeros(24)
    for seed in range(3000):
        hits[evict(policy, live=list(range(24)), evict=6, seed=seed)] += 1
    assert not hits[:4].any() and not hits[22:].any()
    # 18 candidates, each expected 1,000 times; 6 standard deviations are 155.
    assert np.abs(hits[4:22] - 1000).max() < 155


def test_h2o_keeps_half_recent_and_the_heavy_hitters():
    policy = make_policy("h2o", block_size=16, sink_tokens=1)
    scores = [0.0, 5, 1, 4, 2, 3, 0, 0, 0, 0, 0]  # budget 8: ids 7..10 are recent
    assert evict(policy, scores, evict=3, budget=8) == [2, 4, 6]


def test_h2o_breaks_ties_by_the_lower_id_and_waits_for_scores():
    assert evict(bare("h2o"), [1, 0, 2, 0, 0, 3], evict=2) == [1, 3]
    assert evict(bare("h2o"), [1, NAN, 2, NAN, 0, 3], evict=2) == [0, 4]
    assert evict(bare("h2o"), [NAN, NAN, 2, NAN], evict=3) == [2]


def test_tova_drops_the_lowest_and_knorm_the_highest():
    scores = [3, 1, 2, 5, 4]
    assert evict(bare("tova"), scores) == [1, 2]
    assert evict(bare("knorm"), scores) == [3, 4]
    assert evict(bare("knorm"), [2, 2, 2, NAN, 1]) == [0, 1]


def test_scissorhands_counts_what_each_token_could_have_been_counted_in():
    # Four prompt tokens, four generated: the prompt was looked at in 5 steps, then 4, 3, 2, 1.
    # Unimportant steps: 0, 2, 3, 3, 4, 0, 0, 0.
    counts = [5, 3, 2, 2, 0, 3, 2, 1]
    assert evict(bare("scissorhands"), counts, prompt=4, evict=1) == [4]
    assert evict(bare("scissorhands"), counts, prompt=4, evict=2) == [2, 4]
    # The plain count would drop the newest token; it was important whenever it could be.
    assert 7 not in evict(bare("scissorhands"), counts, prompt=4, evict=4)


def test_scissorhands_window_forgives_an_old_token_its_distant_past():
    counts = np.zeros(100)
    counts[0] = 60  # of 100 steps: 40 unimportant ones, of which 20 steps remember 8
    counts[1:90] = 100
    assert evict(bare("scissorhands", history_tokens=20), counts, evict=11)[-1] == 99
    assert 0 not in evict(bare("scissorhands", history_tokens=20), counts, evict=2)
    assert 0 in evict(bare("scissorhands", history_tokens=100), counts, evict=1)


def test_scissorhands_knows_that_a_chunked_prompt_was_looked_at_more_often():
    # All prompt, so one step by the formula; but id 2 was counted 3 times, hence so could 0 and 1.
    assert evict(bare("scissorhands"), [3, 1, 3, 1], prompt=4, evict=1) == [1]


def test_snapkv_keeps_the_neighbours_of_a_peak():
    scores = [1, 1, 1, 1, 9, 1, 1, 1, 1, 1]
    assert evict(bare("snapkv", pool_tokens=3), scores, evict=7) == [0, 1, 2, 6, 7, 8, 9]
    assert evict(bare("snapkv", pool_tokens=1), scores, evict=9) == [0, 1, 2, 3, 5, 6, 7, 8, 9]


def test_snapkv_pools_over_positions_not_over_survivors():
    ids = np.array([0, 1, 5, 6, 7], np.int32)
    scores = np.array([1, 9, 1, NAN, 2], np.float32)
    np.testing.assert_array_equal(pool_max(ids, scores, 2), [9, 9, 2, NAN, 2])
    np.testing.assert_array_equal(pool_max(ids, scores, 0), scores)


def test_snapkv_window_lends_its_neighbours_nothing():
    policy = make_policy("snapkv", block_size=16, sink_tokens=0, recent_tokens=2, pool_tokens=3)
    assert evict(policy, [2, 2, 2, 1, 9, 9], evict=1) == [0]  # 3 pools to 2; with id 4 to 9
    assert evict(policy, [3, 3, 3, 3, 1, 1, 9, 9], evict=1) == [5]


def fastgen(**parameters) -> Policy:
    return bare("fastgen", special_ids=(1,), punctuation_ids=(2,), **parameters)


#         special, punctuation, and eight plain words
TOKEN_IDS = np.array([1, 2, 9, 9, 9, 9, 9, 9, 9, 9], np.int32)


def test_fastgen_protects_punctuation_only_if_special_tokens_are_not_enough():
    drawn_by_special = [99, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert evict(fastgen(recovery_frac=0.9), drawn_by_special, evict=1, token_ids=TOKEN_IDS) == [1]
    drawn_by_both = [60, 0.5, 1, 1, 1, 1, 1, 1, 1, 1]
    assert evict(fastgen(recovery_frac=0.9), drawn_by_both, evict=1, token_ids=TOKEN_IDS) == [2]


def test_fastgen_widens_to_frequent_and_local_tokens():
    # Without a budget for frequent tokens the newest three (local) are safe despite their scores.
    scores = [0, 0, 5, 5, 5, 5, 5, 1, 1, 1]
    policy = fastgen(frequent_frac=0.0, local_frac=0.3)
    assert evict(policy, scores, evict=2, budget=10, token_ids=TOKEN_IDS) == [2, 3]
    # With local off, score decides, and special and punctuation stay.
    policy = fastgen(frequent_frac=0.3, local_frac=0.0)
    assert evict(policy, scores, evict=3, budget=10, token_ids=TOKEN_IDS) == [7, 8, 9]


def test_fastgen_drops_its_classes_in_the_order_it_added_them():
    scores = [0, 0, 9, 8, 7, 1, 1, 1, 1, 1]
    policy = fastgen(frequent_frac=0.3, local_frac=0.2, recovery_frac=1.0)

    def gone(count):
        return evict(policy, scores, evict=count, budget=10, token_ids=TOKEN_IDS)

    assert gone(3) == [5, 6, 7]  # neither frequent (2, 3, 4) nor local (8, 9)
    assert gone(5) == [5, 6, 7, 8, 9]
    assert gone(6) == [4, 5, 6, 7, 8, 9]
    assert gone(9) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert gone(10) == list(range(10))


def test_fastgen_counts_sinks_and_recent_tokens_as_kept():
    # The sink holds nearly all attention: the cheapest profile is enough.
    scores = [99, 0, 1, 1, 1, 1]
    policy = make_policy(
        "fastgen", block_size=16, sink_tokens=1, recent_tokens=0, punctuation_ids=(2,),
        recovery_frac=0.9,
    )  # fmt: skip
    token_ids = np.array([9, 2, 9, 9, 9, 9], np.int32)
    assert evict(policy, scores, evict=1, token_ids=token_ids) == [1]


def test_fastgen_is_content_with_a_profile_that_holds_everything_but_for_rounding():
    # Full recovery asked for; special tokens hold all there is, in parts that do not add up.
    scores = [0.1, 0, 0, 0.2, 0.3, 0.7]
    token_ids = np.array([1, 2, 9, 1, 1, 1], np.int32)
    assert evict(fastgen(recovery_frac=1.0), scores, evict=1, token_ids=token_ids) == [1]


def test_fastgen_takes_unknown_and_missing_token_ids_as_plain():
    scores = [5, 4, 3, 2, 1]
    for token_ids in (None, [], [7_000_000, -1], [9] * 9):
        given = None if token_ids is None else np.array(token_ids, np.int32)
        assert evict(fastgen(), scores, evict=2, token_ids=given) == [3, 4]


def test_punctuation_ids_reads_byte_level_and_sentencepiece_vocabularies():
    vocabulary = {",": 1, "\u0120.": 2, "\u2581?!": 3, "a.": 4, "\u0120": 5, "+": 6, "x": 7}
    assert punctuation_ids(vocabulary) == (1, 2, 3)


def test_parameters_start_at_the_documented_defaults():
    assert make_policy("scissorhands", block_size=16).history_tokens == 400
    assert make_policy("snapkv", block_size=16).pool_tokens == 7
    policy = make_policy("fastgen", block_size=16)
    assert (policy.frequent_frac, policy.local_frac, policy.recovery_frac) == (0.3, 0.3, 0.95)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("scissorhands", {"history_tokens": 0}, "history_tokens 0: tokens, 1 or more"),
        ("scissorhands", {"history_tokens": "a"}, "history_tokens 'a': tokens, 1 or more"),
        ("snapkv", {"pool_tokens": 4}, "pool_tokens 4: an odd number of tokens"),
        ("fastgen", {"local_frac": 1.5}, "local_frac 1.5: a fraction from 0 to 1"),
        ("fastgen", {"recovery_frac": "x"}, "recovery_frac 'x': a fraction from 0 to 1"),
        ("fastgen", {"special_ids": [1, -2]}, "special_ids .* a list of vocabulary ids"),
        ("fastgen", {"special_ids": 3}, "special_ids 3: a list of vocabulary ids"),
        ("fastgen", {"local": 0.1}, "policy_args of fastgen 'local': did you mean 'local_frac'"),
    ],
)
def test_wrong_parameters_name_themselves_and_what_is_allowed(name, parameters, message):
    with pytest.raises(ConfigError, match=message):
        make_policy(name, block_size=16, **parameters)


def test_fastgen_takes_lists_as_yaml_gives_them():
    policy = make_policy("fastgen", block_size=16, special_ids=[1, 2])
    assert policy.special_ids == (1, 2) and hash(policy)

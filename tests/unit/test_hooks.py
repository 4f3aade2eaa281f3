"""A step in vLLM's scheduler: sharing, the prefix cache, admission, what is forgotten.

Every engine here checks itself after every step (`vtoken.testing.engines`); the tests below add
what a check of the state alone cannot see.
"""

from __future__ import annotations

import numpy as np
import pytest
from policy_references import reference_victims

pytest.importorskip("vllm")

from vtoken.config import VTokenConfig
from vtoken.engine.dry import DryEngine, DrySettings
from vtoken.errors import ConfigError
from vtoken.scheduling.naming import Victims
from vtoken.testing.engines import CheckedDryEngine
from vtoken.testing.random_work import finish_all

N = 4
PREFIX = [20 + i % 5 for i in range(24)]


def settings(**changes) -> DrySettings:
    base = {
        "num_kv_blocks": 60, "block_size": N, "max_model_len": 256, "max_num_seqs": 8,
        "max_num_batched_tokens": 32, "num_kv_heads": 1, "head_size": 8,
    }  # fmt: skip
    return DrySettings(**(base | changes))


def engine(changes=None, **config) -> CheckedDryEngine:
    config = {"policy": "random", "kv_budget_tokens": 12, **config}
    return CheckedDryEngine(
        settings(**(changes or {})), VTokenConfig.from_mapping(config), victims=reference_victims
    )


def steps(e, count: int) -> None:
    for _ in range(count):
        e.step()


def blocks_of(e, req_id):
    return e._manager.req_to_blocks[req_id]


class TestSharedPrefixes:
    def shared(self, **config):
        """Two requests that hold the prefix's six blocks together, b with a tail of its own."""
        e = engine({"enable_prefix_caching": True, "max_num_batched_tokens": 64}, **config)
        e.add("a", [*PREFIX, 1], 60)
        e.add("b", [*PREFIX, 2, 3], 60)
        e.step()  # b hits blocks that a fills in this same step
        assert e.num_hits == 6
        return e

    def test_shared_tokens_stay_and_do_not_count(self):
        e = self.shared()
        steps(e, 30)
        for req_id in ("a", "b"):
            live = set(e.oracle.requests[req_id].live)
            assert set(range(24)) <= live  # protected
            assert len(live) - 24 < 12 + N + 1  # the budget is for the rest
        assert all(b.ref_cnt == 2 for b in blocks_of(e, "a")[:6])

    def test_they_are_evicted_once_the_other_has_left(self):
        e = self.shared()
        steps(e, 20)
        e.abort(["b"])
        steps(e, 3)
        live = set(e.oracle.requests["a"].live)
        assert len(live) <= 12 + N and not set(range(24)) <= live
        finish_all(e)

    def test_naive_protects_them_too(self):
        e = self.shared(mode="naive")
        steps(e, 20)
        assert set(range(24)) <= set(e.oracle.requests["b"].live)
        finish_all(e)


class TestPrefixCache:
    def test_released_whole_blocks_can_still_be_hit(self):
        """Reclaiming must not empty the cache: what was not rewritten keeps its hash."""
        e = engine({"enable_prefix_caching": True}, policy="streaming-llm", kv_budget_tokens=16)
        e.add("a", [*PREFIX, *range(100, 108)], 4)
        finish_all(e)
        assert e.counters.released_blocks > 0
        e.add("b", [*PREFIX, 1], 2)
        finish_all(e)
        assert e.num_hits >= 1

    def test_blocks_with_a_hole_leave_the_cache_before_they_are_rewritten(self):
        e = engine({"enable_prefix_caching": True})
        e.add("a", [*PREFIX, *range(100, 108)], 40)
        steps(e, 1)
        cached = [b.block_id for b in e.block_pool.blocks if b.block_hash is not None]
        assert len(cached) == 8
        steps(e, 1)
        table = e.hooks.requests.by_id["a"].table
        for b in blocks_of(e, "a"):
            if b.block_hash is not None:
                # Still a hit: then all its tokens are there, in their order.
                handle = int(np.flatnonzero(table.block_ids() == b.block_id)[0])
                ids = table.ids_by_physical_index()[handle * N : handle * N + N]
                assert (np.diff(ids) == 1).all()

    def test_nothing_computed_after_an_eviction_is_cached(self):
        e = engine({"enable_prefix_caching": True})
        e.add("a", PREFIX, 40)
        finish_all(e)
        hashes = sum(b.block_hash is not None for b in e.block_pool.blocks)
        assert hashes <= len(PREFIX) // N  # of the prompt; none of 40 tokens of output

    def test_indirection_caches_like_vllm(self):
        counts = []
        for config in (None, VTokenConfig(mode="indirection")):
            e = CheckedDryEngine(settings(enable_prefix_caching=True), config)
            e.add("a", PREFIX, 40)
            finish_all(e)
            counts.append(sum(b.block_hash is not None for b in e.block_pool.blocks))
        assert counts[0] == counts[1] == (24 + 39) // N


class TestSteps:
    @pytest.mark.parametrize("is_decoding", [True, False])
    def test_execution_is_idempotent_within_a_step(self, is_decoding):
        """A decoding request loses its tokens at the head of a step, a prompt in between."""
        e = engine({"max_num_batched_tokens": 32 if is_decoding else 16})
        e.add("a", PREFIX, 20)
        e.step()
        hooks = e.hooks
        hooks.begin()
        assert ("a" in hooks.selector.waiting) == (not is_decoding)
        assert (hooks.counters.evicted_tokens > 0) == is_decoding
        request = e.scheduler.requests["a"]
        hooks.on_allocate(request, 1 if is_decoding else 8)
        evicted, free = hooks.counters.evicted_tokens, e.block_pool.get_num_free_blocks()
        assert evicted > 0
        hooks.on_allocate(request, 1 if is_decoding else 8)
        assert hooks.counters.evicted_tokens == evicted
        assert e.block_pool.get_num_free_blocks() == free

    def test_a_request_that_was_not_reached_keeps_its_tokens(self):
        """The token budget of a step ran out before it: its plan must not take effect later."""
        e = engine({"max_num_batched_tokens": 8, "max_num_seqs": 8})
        e.add("a", PREFIX, 30)
        steps(e, 4)
        e.add("b", list(range(100, 160)), 30)
        finish_all(e)

    def test_requests_leave_nothing_behind(self):
        e = engine({"num_kv_blocks": 16, "enable_prefix_caching": True})
        for i in range(6):
            e.add(f"r{i}", [*PREFIX[: 4 * i + 1], i], 50)
        steps(e, 12)
        e.abort(["r0", "r3"])
        requests = e.hooks.requests
        assert not {"r0", "r3"} & (set(requests.by_id) | {t.req_id for t in requests.tables})
        finish_all(e)
        hooks = e.hooks
        assert not (hooks.requests.by_id or len(hooks.requests.tables))
        assert not (hooks.selector.waiting or hooks.prefix.sharing)

    def test_preempted_requests_start_from_nothing(self):
        e = engine({"num_kv_blocks": 12, "max_num_batched_tokens": 16}, mode="naive")
        for i in range(4):
            e.add(f"r{i}", PREFIX[:9], 36)
        finish_all(e)
        assert e.counters.preemptions > 0


class TestScores:
    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_a_decision_waits_for_the_report_of_two_steps_ago(self, asynchronous):
        e = engine({"async_scheduling": asynchronous}, policy="h2o", eviction_interval_tokens=2)
        e.add("a", PREFIX, 50)
        evicted = []
        while e.has_unfinished():
            e.step()
            evicted.append(e.oracle.num_evicted)
        steps_with = np.flatnonzero(np.diff([0, *evicted]))
        assert len(steps_with) > 10
        first_output = -(-len(PREFIX) // 32)
        assert steps_with[0] >= first_output + 1

    def test_sync_and_async_evict_the_same(self):
        seen = []
        for asynchronous in (False, True):
            e = engine({"async_scheduling": asynchronous}, policy="tova", kv_budget_tokens=14)
            e.add("a", PREFIX, 50)
            live = []
            while e.has_unfinished():
                e.step()
                if "a" in e.oracle.requests:
                    request = e.oracle.requests["a"]
                    live.append((request.num_computed, tuple(sorted(request.live))))
            seen.append(sorted(set(live)))
        assert seen[0] == seen[1]


class TestAdmission:
    def test_a_request_that_can_never_fit_is_refused_with_the_numbers(self):
        e = engine({"num_kv_blocks": 6}, kv_budget_tokens=20)
        with pytest.raises(ConfigError, match=r"40 prompt \+ 60 output.*needs 7 KV blocks.*has 6"):
            e.add("a", list(range(40)), 60)
        assert not e.has_unfinished()
        e.add("b", list(range(8)), 10)
        finish_all(e)

    def test_modes_that_give_nothing_back_need_room_for_every_token(self):
        for config in ({"mode": "naive"}, {"mode": "indirection"}):
            e = engine({"num_kv_blocks": 12}, **config)
            with pytest.raises(ConfigError, match="needs 13 KV blocks"):
                e.add("a", list(range(20)), 32)

    def test_longer_than_the_model_takes(self):
        e = DryEngine(settings(max_model_len=64), VTokenConfig(mode="indirection"))
        with pytest.raises(ConfigError, match="at least 70"):
            e.add("a", list(range(40)), 30)

    def test_more_requests_fit_at_a_smaller_budget(self):
        peaks = {}
        for mode in ("naive", "vtoken"):
            e = engine({"num_kv_blocks": 24, "max_num_batched_tokens": 64}, mode=mode)
            for i in range(6):
                e.add(f"r{i}", list(range(4)), 60)
            most = 0
            while e.has_unfinished():
                e.step()
                running = len(e.scheduler.running)
                most = max(most, running if e.scheduler.waiting.__len__() == 0 else 0)
            peaks[mode] = (most, e.counters.preemptions)
        assert peaks["vtoken"] == (6, 0)
        assert peaks["naive"][1] > 0

    def test_admission_counts_the_peak_not_the_whole_prompt(self):
        e = engine({"num_kv_blocks": 12, "max_num_batched_tokens": 8, "max_num_seqs": 8})
        # 20 blocks of prompt pass through a pool of 12, evicted between chunks of two blocks.
        e.add("a", [1 + i % 9 for i in range(80)], 4)
        finish_all(e)
        assert e.counters.preemptions == 0


def test_scored_policies_need_a_source_of_scores():
    with pytest.raises(ConfigError, match="score"):
        DryEngine(settings(), VTokenConfig(policy="h2o"))


def test_a_prompt_that_waits_keeps_the_report_it_is_evicted_by():
    """The same report serves it in every step until its next chunk; a decode's has served."""
    served: dict[str, int] = {}
    e = engine(policy="h2o", kv_budget_tokens=16)
    for req_id in ("decodes", "waits"):
        e.add(req_id, PREFIX, 30)
    e.step()
    step = e.hooks
    step.scheduler.requests["waits"].is_prefill_chunk = True
    step.reports.hold = lambda req_id, step_seq=-1: served.update({req_id: step_seq})
    parts = [(step.requests.by_id[r], np.array([8, 9])) for r in ("decodes", "waits")]
    step.evictor._note(Victims.of(parts))
    assert served == {"decodes": step.clock.seq - 2, "waits": -1}

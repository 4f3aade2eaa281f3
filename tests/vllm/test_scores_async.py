"""A real engine with asynchronous scheduling decides as a synchronous one does."""

from __future__ import annotations

import pytest
from one_engine import engine_for, live_sets, prompts, run, traces

from vtoken.config import VTokenConfig
from vtoken.vllm_plugin.scheduler import VTokenAsyncScheduler, VTokenScheduler

pytestmark = pytest.mark.vllm

POLICIES = ["h2o", "tova", "knorm", "streaming-llm"]


def test_sync_and_async_evict_the_same_ids_from_the_same_reports():
    """One engine of each kind for all policies: opening them is what takes time."""
    seen: dict[bool, dict] = {}
    for is_async in (False, True):
        for policy in POLICIES:
            config = VTokenConfig(
                policy=policy, eviction_ratio=0.5, eviction_interval_tokens=6, trace=True
            )
            engine = engine_for(config, **({"async_scheduling": True} if is_async else {}))
            expected = VTokenAsyncScheduler if is_async else VTokenScheduler
            assert type(engine.scheduler) is expected
            assert engine.core.batch_queue_size == (2 if is_async else 1)
            used: list[int] = []
            scored_ids = engine.hooks.reports.scored_ids

            def spy(req_id, step_seq, engine=engine, used=used, look_up=scored_ids):
                found = look_up(req_id, step_seq)
                if found is not None:
                    used.append(engine.hooks.clock.seq - step_seq)
                return found

            engine.hooks.reports.scored_ids = spy
            done = run(engine, prompts(2), max_tokens=28)
            if policy != "streaming-llm":
                assert len(used) >= 5 and set(used) == {2}
            sets = {name: live_sets(e) for name, e in traces(engine).items()}
            known = {f"r{i}": len(f.prompt_token_ids) + 27 for i, f in enumerate(done)}
            # Async schedules one step beyond the end before it knows.
            sets = {n: {t: s for t, s in x.items() if t < known[n]} for n, x in sets.items()}
            seen.setdefault(is_async, {})[policy] = (sets, [f.output_token_ids for f in done])
    for policy in POLICIES:
        assert seen[False][policy] == seen[True][policy], policy

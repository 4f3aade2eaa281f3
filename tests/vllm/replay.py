"""Hold what an engine did against a masked Hugging Face model and against policies written anew."""

from __future__ import annotations

from zlib import crc32

import numpy as np
from one_engine import traces
from policy_references import reference_victims

from vtoken.verify.oracle import Rules
from vtoken.verify.reference import ReferenceResult, compare

CLOSE = 5e-5  # natural log; float32 sums in another order


def against_reference(engine, model, done) -> ReferenceResult:
    """Compare every generated token of finished requests with the reference."""
    entries, total = traces(engine), ReferenceResult()
    for f in done:
        mine = entries[f.req_id.split("-")[0]]
        total.add(compare(model, f.prompt_token_ids, f.output_token_ids, f.logprobs, mine))
    return total


def assert_equals_reference(engine, model, done) -> ReferenceResult:
    result = against_reference(engine, model, done)
    assert result.tokens >= sum(len(f.output_token_ids) for f in done)
    assert not result.mismatches, result.mismatches[:3]
    assert result.max_abs_logprob_diff < CLOSE
    return result


def assert_live_sets(engine, config, done) -> int:
    """Recompute every live set from lengths alone; for policies without scores, nothing shared.

    Returns:
        How many evictions there were.
    """
    rules, entries, count = Rules(config, engine.block_size), traces(engine), 0
    for f in done:
        prompt_hash = crc32(np.array(f.prompt_token_ids, np.int32).tobytes())
        live: set[int] = set()
        epoch = -1
        for e in entries[f.req_id.split("-")[0]]:
            if e.num_preemptions != epoch:  # computed again, from nothing
                epoch, live, started = e.num_preemptions, set(range(e.first_id)), True
            over = len(live) - rules.budget(e.first_id)
            if over >= rules.interval and not started:
                live -= reference_victims(
                    config.policy, live=sorted(live), L=e.first_id,
                    prompt_len=len(f.prompt_token_ids), budget=rules.budget(e.first_id),
                    seed=config.seed, prompt_hash=prompt_hash, num_evict=over,
                    sinks=rules.sinks, recent=config.recent_tokens, block=engine.block_size,
                )  # fmt: skip
                count += 1
            assert e.live_ids.tolist() == sorted(live), (f.req_id, e.first_id)
            live |= set(range(e.first_id, e.first_id + e.num_new_tokens))
            started = False
    return count

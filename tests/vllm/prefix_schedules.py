"""Random work over shared prefixes on a real engine, and what its cache is worth afterwards.

    check = check_schedule(engine, seed=3)     # raises AssertionError
    check.num_blocks, check.num_hit_tokens     # what was compared

A schedule is random arrivals over two prefixes under a random policy, mode, budget and threshold,
with evictions, moves and preemptions. Two things must hold:

* From the step in which a block enters the cache until it leaves, not one bit of its K and V
  changes, whoever evicts, copies or moves meanwhile.
* Requests that come afterwards and hit those blocks generate what an engine with an empty cache
  does, and every block they hit holds the K and V that such an engine computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from vtoken.config import VTokenConfig

POLICIES = (
    "random", "streaming-llm", "sliding-window", "h2o", "scissorhands", "snapkv", "tova", "knorm",
    "fastgen",
)  # fmt: skip
CLOSE = 1e-4  # K, V and natural logs of float32 models; sums in another order


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Tokens and counts of one schedule."""

    prefix_tokens: int = 64
    num_requests: int = 6
    max_output_tokens: int = 28
    probe_output_tokens: int = 8
    num_probes: int = 3
    vocab_size: int = 500


@dataclass
class ScheduleCheck:
    """Attributes:
    num_blocks: cached blocks compared with an empty cache's engine.
    num_bit_checks: comparisons of a cached block's bits with those it was cached with.
    num_hit_tokens: of the probes' prompts, from the cache.
    evicted_tokens, moved_tokens, preemptions: during the schedule.
    """

    config: VTokenConfig
    num_blocks: int = 0
    num_bit_checks: int = 0
    num_hit_tokens: int = 0
    max_kv_diff: float = 0.0
    max_logprob_diff: float = 0.0
    evicted_tokens: int = 0
    moved_tokens: int = 0
    preemptions: int = 0
    near_ties: int = 0
    _bits: dict[int, tuple] = field(default_factory=dict, repr=False)


def random_config(rng: np.random.Generator, sizes: Sizes) -> VTokenConfig:
    """A mode, policy and budget under which the schedule evicts."""
    budget = int(rng.integers(26, 60))
    return VTokenConfig.from_mapping(
        {
            "mode": "naive" if rng.random() < 0.2 else "vtoken",
            "policy": POLICIES[int(rng.integers(len(POLICIES)))],
            "kv_budget_tokens": budget,
            "eviction_interval_tokens": int(rng.integers(1, 9)),
            "shared_prefix": "copy" if rng.random() < 0.5 else "protect",
            "fragmentation_threshold": 0.4 if rng.random() < 0.25 else 0.0,
            "seed": int(rng.integers(1000)),
        }
    )


def check_schedule(engine, seed: int, sizes: Sizes | None = None) -> ScheduleCheck:
    """Run one schedule and its probes on an idle real engine with prefix caching.

    Raises:
        AssertionError: says what differs.
    """
    sizes = sizes or Sizes()
    rng = np.random.default_rng([seed, 77])
    config = random_config(rng, sizes)
    check = ScheduleCheck(config)
    engine.reconfigure(config)  # empties the cache
    prefixes = [rng.integers(10, sizes.vocab_size, sizes.prefix_tokens).tolist() for _ in range(2)]
    _run_schedule(engine, rng, sizes, prefixes, check)
    counters = engine.counters
    check.evicted_tokens, check.moved_tokens = counters.evicted_tokens, counters.moved_tokens
    check.preemptions = counters.preemptions
    _stop_evicting(engine)
    probes = [
        [*prefixes[i % 2], *rng.integers(10, sizes.vocab_size, 6 + i).tolist()]
        for i in range(sizes.num_probes)
    ]
    warm = [_probe(engine, f"warm{i}", p, sizes, check) for i, p in enumerate(probes)]
    check_bits(engine, check)
    held = _cached_kv(engine)
    engine.reset_prefix_cache()
    assert not _cached_blocks(engine)
    for i, prompt in enumerate(probes):
        cold = _probe(engine, f"cold{i}", prompt, sizes, None)
        _compare(check, warm[i], cold, seed)
        _compare_blocks(check, held, _cached_kv(engine), seed)
        engine.reset_prefix_cache()
    return check


def _run_schedule(engine, rng, sizes: Sizes, prefixes, check: ScheduleCheck) -> None:
    """Arrivals at random steps; bits of cached blocks are looked at after every step."""
    todo = sizes.num_requests
    while todo or engine.has_unfinished():
        if todo and (not engine.has_unfinished() or rng.random() < 0.25):
            head = prefixes[int(rng.integers(2))]
            cut = len(head) if rng.random() < 0.6 else int(rng.integers(8, len(head)))
            tail = rng.integers(10, sizes.vocab_size, int(rng.integers(4, 40))).tolist()
            output = int(rng.integers(sizes.max_output_tokens // 2, sizes.max_output_tokens + 1))
            engine.add(f"r{todo}", [*head[:cut], *tail], output)
            todo -= 1
        engine.step()
        check_bits(engine, check)
    assert engine.check_idle() == []


def _stop_evicting(engine) -> None:
    """Other settings, the same cache: what a request generates is then a matter of its KV alone."""
    # Reconfiguring empties the cache, because scores start anew; the probes read none.
    engine.scheduler.reset_prefix_cache = lambda *args, **kwargs: True
    try:
        engine.reconfigure(VTokenConfig(mode="indirection"))
    finally:
        del engine.scheduler.__dict__["reset_prefix_cache"]


def _probe(engine, name: str, prompt: list[int], sizes: Sizes, check: ScheduleCheck | None):
    """Run one request alone; what it finds in the cache counts for `check`."""
    engine.add(name, prompt, sizes.probe_output_tokens, logprobs=True)
    done = []
    schedule, hits = engine.scheduler.schedule, []

    def noted(*args, **kwargs):
        output = schedule(*args, **kwargs)
        hits.extend(new.num_computed_tokens for new in output.scheduled_new_reqs)
        return output

    engine.scheduler.schedule = noted
    try:
        while engine.has_unfinished():
            done += engine.step()[1]
    finally:
        del engine.scheduler.__dict__["schedule"]
    if check is not None:
        check.num_hit_tokens += sum(hits)
    else:
        assert sum(hits) == 0
    return done[0]


def _compare(check: ScheduleCheck, warm, cold, seed: int) -> None:
    pairs = zip(warm.output_token_ids, cold.output_token_ids, strict=True)
    for i, (a, b) in enumerate(pairs):
        diff = abs(warm.logprobs[i] - cold.logprobs[i])
        check.max_logprob_diff = max(check.max_logprob_diff, diff)
        assert diff < CLOSE, (seed, check.config, i, diff)
        if a != b:  # equally likely to within float error: what follows is not comparable
            check.near_ties += 1
            return


# ---- blocks -------------------------------------------------------------------------------------


def _cached_blocks(engine) -> list:
    return [b for b in engine.block_pool.blocks if b.block_hash is not None]


def check_bits(engine, check: ScheduleCheck) -> None:
    """Compare every cached block with what it held when it was cached; learn new ones."""
    import torch

    blocks, known = _cached_blocks(engine), check._bits
    if not blocks:
        known.clear()
        return
    attention = engine.runner.vtoken_attention
    where = torch.tensor([b.block_id for b in blocks])
    # As integers, summed with position-dependent weights per layer: a flipped bit always shows.
    parts = [kv.index_select(0, where).reshape(len(blocks), -1) for kv in attention.kvs]
    cells = torch.cat(parts, 1).view(torch.int32)
    weights = (torch.arange(cells.shape[1], dtype=torch.int32) * 2 + 1) * 40503
    sums = (cells * weights).sum(1, dtype=torch.int32).tolist()
    now = {b.block_id: (b.block_hash, s) for b, s in zip(blocks, sums, strict=True)}
    for block_id, (block_hash, bits) in now.items():
        before = known.get(block_id)
        if before is not None and before[0] == block_hash:
            assert before[1] == bits, f"{check.config}: cached block {block_id} was written"
            check.num_bit_checks += 1
    check._bits = now


def _cached_kv(engine) -> dict:
    """{block hash: float[layers, ...] K and V of a block that holds it}."""
    import torch

    kvs = engine.runner.vtoken_attention.kvs
    return {
        b.block_hash: torch.stack([kv[b.block_id] for kv in kvs]) for b in _cached_blocks(engine)
    }


def _compare_blocks(check: ScheduleCheck, warm: dict, cold: dict, seed: int) -> None:
    """Blocks under the same hash, so of the same tokens after the same tokens."""
    for block_hash in warm.keys() & cold.keys():
        diff = float((warm[block_hash] - cold[block_hash]).abs().max())
        check.max_kv_diff = max(check.max_kv_diff, diff)
        assert diff < CLOSE, (seed, check.config, "a cached block holds other K and V", diff)
        check.num_blocks += 1

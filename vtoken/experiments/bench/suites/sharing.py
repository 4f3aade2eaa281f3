"""Sharing suite: what reclamation saves beside a prefix cache, by sharing degree.

Paper: section 5.7, Table 1, step by step. A prefix is run alone first, so that its blocks are
cached; then `degree` requests are submitted that share it and have a suffix of their own. Retained
blocks are distinct blocks in use, averaged over the steps in which all of them decode.

All sharers must be admitted in one step: a request whose sharers still wait holds the prefix alone,
and may evict from it and rewrite its blocks.

    vtoken bench --suite sharing --dry-run --model meta-llama/Llama-3.1-8B --policy random \\
        --prefix-len 8K --suffix-len 8K
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from vtoken.engine.base import StepEngine
from vtoken.engine.observe import Observer
from vtoken.experiments.bench.bench_options import Case
from vtoken.experiments.bench.context import Context, SuiteResult
from vtoken.experiments.bench.measure import HitCounter
from vtoken.experiments.bench.open_engines import Pool

PAPER = "section 5.7, Table 1"
DEFAULT_POLICIES = ("random",)
PREFIX_TOKENS, SUFFIX_TOKENS, OUTPUT_TOKENS = 1024, 1024, 64
VARIANTS = (("naive", "protect"), ("vtoken", "protect"), ("vtoken", "copy"))
CHECK_EVERY = 16  # steps between two looks at every table and the pool


@dataclass(frozen=True, kw_only=True)
class SharingCase:
    """`degree` requests over one prefix; lengths in tokens, prompts of random ids."""

    degree: int
    prefix_tokens: int
    suffix_tokens: int
    output_tokens: int
    vocab_size: int
    seed: int = 0

    def prefix(self) -> list[int]:
        rng = np.random.default_rng([self.seed, 0])
        return rng.integers(10, self.vocab_size, self.prefix_tokens).tolist()

    def suffix(self, i: int) -> list[int]:
        rng = np.random.default_rng([self.seed, 1, i])
        return [10 + i, *rng.integers(10, self.vocab_size, self.suffix_tokens - 1).tolist()]


class SharingObserver(Observer):
    """Also counts blocks in use while all of `degree` requests decode."""

    def __init__(self, engine: StepEngine, degree: int) -> None:
        super().__init__(engine)
        self.degree = degree
        self.retained_blocks: list[int] = []
        self.protected_tokens: list[int] = []  # the least of any request, per step

    def _record(self, output) -> None:
        super()._record(output)
        counts = output.num_scheduled_tokens
        if len(counts) == self.degree == output.total_num_scheduled_tokens:
            self.retained_blocks.append(self.engine.num_used_blocks())
            states = self.engine.hooks.requests.by_id
            self.protected_tokens.append(min(states[r].num_protected for r in counts))


def measure_sharing(engine: StepEngine, case: SharingCase) -> dict[str, object]:
    """Run one case on an idle engine, from an empty prefix cache.

    Returns:
        A flat row. `prefix_hit_frac`: share of the prefixes that came from the cache.
        `least_protected_tokens`: of any request, in any step in which all decode. `copies`,
        `copies_declined`, `shared_tokens_skipped`, `dropped_blocks` (references given up) and
        `released_blocks` (of those, back in the pool): see `vtoken.core.counters.Counters`.
        `cached_prefix_blocks`: of the prefix, still in the cache when all are done.
        `inconsistencies`: what checks of tables and pool found wrong, over the whole run.
    """
    config, prefix = engine.config, case.prefix()
    engine.reset_prefix_cache()
    engine.add("warm", prefix, 1)
    hashes = _block_hashes(engine)[: case.prefix_tokens // engine.block_size]
    wrong = _finish(engine)
    engine.counters.reset()
    observer = SharingObserver(engine, case.degree)
    try:
        with HitCounter(engine) as hits:
            for i in range(case.degree):
                engine.add(f"sharer{i}", [*prefix, *case.suffix(i)], case.output_tokens)
            wrong += _finish(engine)
    finally:
        stats = observer.stop()
    assert observer.retained_blocks, "the requests never decoded all at once: the pool is too small"
    counters, blocks = engine.counters, fmean(observer.retained_blocks)
    cached = sum(engine.block_pool.get_cached_block(h, [0]) is not None for h in hashes)
    return {
        "mode": config.mode, "policy": config.policy, "workload": f"shared-prefix-{case.degree}",
        "shared_prefix": config.shared_prefix,
        "sharing_degree": case.degree, "eviction_ratio": config.effective_ratio,
        "prefix_tokens": case.prefix_tokens, "suffix_tokens": case.suffix_tokens,
        "output_tokens": case.output_tokens, "block_size": engine.block_size,
        "retained_blocks": blocks, "vtoken_retained_blocks_per_request": blocks / case.degree,
        "prefix_hit_frac": hits.hit_tokens / (case.degree * case.prefix_tokens),
        "least_protected_tokens": min(observer.protected_tokens),
        "cached_prefix_blocks": cached,
        "vtoken_preemptions": stats.preemptions,
        "vtoken_evicted_tokens": counters.evicted_tokens,
        "vtoken_moved_tokens": counters.moved_tokens,
        "vtoken_released_blocks": counters.released_blocks,
        "dropped_blocks": counters.dropped_blocks,
        "shared_tokens_skipped": counters.shared_tokens_skipped,
        "copies": counters.copies, "copies_declined": counters.copies_declined,
        "copied_blocks": counters.copied_blocks,
        "inconsistencies": len(wrong),
    }  # fmt: skip


def run_sharing(context: Context, result: SuiteResult) -> None:
    """Run the suite, into the result: every variant at every sharing degree."""
    settings = context.settings
    case = SharingCase(
        degree=max(settings.degrees), prefix_tokens=settings.prefix_len or PREFIX_TOKENS,
        suffix_tokens=settings.suffix_len or SUFFIX_TOKENS,
        output_tokens=settings.output_len or OUTPUT_TOKENS, vocab_size=context.shape.vocab_size,
        seed=settings.engine.seed,
    )  # fmt: skip
    own = case.suffix_tokens + case.output_tokens
    context.check_length(case.prefix_tokens + own)
    most_tokens = case.prefix_tokens + case.degree * own
    N = context.block_size
    pool = Pool(
        num_kv_blocks=settings.engine.num_kv_blocks or most_tokens // N * 5 // 4 + 64, block_size=N
    )
    with context.session(
        max_tokens=case.prefix_tokens + own, max_num_seqs=case.degree, caching=True,
        max_batched_tokens=most_tokens,
    ) as session:  # fmt: skip
        for policy in context.policies(DEFAULT_POLICIES):
            for degree in settings.degrees:
                naive = None
                for mode, kind in VARIANTS:
                    if mode not in settings.modes:
                        continue
                    context.listener.note(f"degree {degree}, {mode} {kind}, {policy}")
                    changes = {"shared_prefix": kind}
                    engine = session.get(Case(mode=mode, policy=policy, changes=changes), pool)
                    row = measure_sharing(engine, replace(case, degree=degree))
                    naive = row["retained_blocks"] if mode == "naive" else naive
                    if naive is not None:
                        row["retained_reduction_frac"] = 1 - row["retained_blocks"] / naive
                    if settings.dry_run:
                        row["modelled"] = True
                    result.rows.append(row)


def sentences(rows: list[dict[str, object]]) -> list[str]:
    """Blocks saved against naive; and what checks found, where they found something."""
    lines = []
    for mode, kind in VARIANTS[1:]:
        saved = [
            f"{100 * row['retained_reduction_frac']:.1f} % at degree {row['sharing_degree']}"
            for row in rows
            if (row["mode"], row["shared_prefix"]) == (mode, kind)
            and row.get("retained_reduction_frac") is not None
        ]
        if saved:
            lines.append(f"{kind}: fewer blocks in use than naive: {', '.join(saved)}.")
    if wrong := sum(row["inconsistencies"] for row in rows):
        lines.append(f"Checks of tables and pool found {wrong} inconsistencies.")
    return lines


def _block_hashes(engine: StepEngine) -> list:
    """Hashes of the one waiting request's full blocks."""
    (request,) = engine.scheduler.requests.values()
    return list(request.block_hashes)


def _finish(engine: StepEngine) -> list[str]:
    """Step to the end; what is wrong with tables and pool on the way, and at the end."""
    wrong, steps = [], 0
    while engine.has_unfinished():
        engine.step()
        steps += 1
        if steps % CHECK_EVERY == 0:
            wrong += engine.check_invariants()
    return wrong + engine.check_idle()

"""Shared prefixes: what reclamation saves beside a prefix cache, by sharing degree.

The paper's Table 1. A prefix is run alone first, so that its blocks are cached; then `degree`
requests are submitted that share it and have a suffix of their own. Retained blocks are distinct
blocks in use, averaged over the steps in which all of them decode.

All sharers must be admitted in one step (`max_num_batched_tokens`): a request whose sharers still
wait holds the prefix alone, and may evict from it and rewrite its blocks.

    python -m vtoken.experiments.bench.suites.sharing                     dry, 8K + 8K tokens, random
    python -m vtoken.experiments.bench.suites.sharing --model smollm2-135m --prefix-len 2048 \\
        --suffix-len 2048 --policy h2o                            measured
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Self

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.engine.base import StepEngine
from vtoken.engine.observe import Observer
from vtoken.engine.run import run_requests

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


class HitCounter:
    """Counts prompt tokens that requests found in the prefix cache when they started."""

    def __init__(self, engine: StepEngine) -> None:
        self.hit_tokens = self.prompt_tokens = 0
        self._scheduler = engine.scheduler

    def __enter__(self) -> Self:
        # Not around `schedule`: that is where observers are, one inside the other.
        update = self._scheduler._update_after_schedule

        def counted(output):
            self.hit_tokens += sum(r.num_computed_tokens for r in output.scheduled_new_reqs)
            self.prompt_tokens += sum(len(r.prompt_token_ids) for r in output.scheduled_new_reqs)
            return update(output)

        self._scheduler._update_after_schedule = counted
        return self

    def __exit__(self, *exc) -> None:
        del self._scheduler.__dict__["_update_after_schedule"]

    @property
    def hit_frac(self) -> float:
        return self.hit_tokens / self.prompt_tokens


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
            states = self.engine.hooks.states
            self.protected_tokens.append(min(states[r].num_protected for r in counts))


def measure_sharing(engine: StepEngine, case: SharingCase) -> dict[str, object]:
    """Run one case on an idle engine, from an empty prefix cache.

    Returns:
        A flat row. `prefix_hit_frac`: share of the prefixes that came from the cache.
        `least_protected_tokens`: of any request, in any step in which all decode. `copies`,
        `copies_declined`, `shared_tokens_skipped`, `dropped_blocks` (references given up) and
        `released_blocks` (of those, back in the pool): see `vtoken.core.events.Counters`.
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
        "mode": config.mode, "policy": config.policy, "shared_prefix": config.shared_prefix,
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


def prefix_table(
    engine_for: Callable[[VTokenConfig], StepEngine],
    config: VTokenConfig,
    case: SharingCase,
    degrees: Sequence[int] = (1, 2, 4, 8),
    *,
    variants: Iterable[tuple[str, str]] = VARIANTS,
    advance: Callable[[dict[str, object]], None] = lambda row: None,
) -> list[dict[str, object]]:
    """Measure every variant at every sharing degree; the paper's Table 1.

    Args:
        engine_for: gives an idle engine with these settings and prefix caching on; the same one
            again with other settings, or a new one.
        config: policy, budget and all else that the variants share.
        case: its degree is replaced.
        variants: pairs of mode and `shared_prefix`.
        advance: told each row when it is measured.

    Returns:
        Rows of `measure_sharing`, with `retained_reduction_frac`: blocks below naive's at the
        same degree, None where naive was not measured.
    """
    rows: list[dict[str, object]] = []
    for degree in degrees:
        naive = None
        for mode, shared_prefix in variants:
            changes = {"mode": mode, "shared_prefix": shared_prefix}
            engine = engine_for(config.model_copy(update=changes))
            row = measure_sharing(engine, replace(case, degree=degree))
            if mode == "naive":
                naive = row["retained_blocks"]
            row["retained_reduction_frac"] = None
            if naive is not None:
                row["retained_reduction_frac"] = 1 - row["retained_blocks"] / naive
            rows.append(row)
            advance(row)
    return rows


def measure_hits(
    engine: StepEngine, requests: Sequence, *, max_concurrency: int
) -> dict[str, object]:
    """Run requests closed loop from an empty prefix cache; how much of their prompts it gave.

    Returns:
        A flat row with `prefix_hit_frac`, a share of all prompt tokens.
    """
    engine.reset_prefix_cache()
    with HitCounter(engine) as hits:
        run = run_requests(engine, requests, max_concurrency=max_concurrency)
    config, counters, stats = engine.config, run.counters, run.stats
    return {
        "mode": "native" if config is None else config.mode,
        "policy": "" if config is None else config.policy,
        "shared_prefix": "" if config is None else config.shared_prefix,
        "num_requests": len(run.finished), "max_concurrency": max_concurrency,
        "prefix_hit_frac": hits.hit_frac,
        "vtoken_peak_blocks": stats.peak_blocks, "vtoken_preemptions": stats.preemptions,
        "vtoken_evicted_tokens": counters.evicted_tokens,
        "copies": counters.copies, "copies_declined": counters.copies_declined,
    }  # fmt: skip


def show_prefix_table(rows: Sequence[dict[str, object]]):
    """The rows as a Rich table."""
    from rich.table import Table

    first = rows[0]
    table = Table(
        title=f"Shared prefixes: {first['policy']}, {first['prefix_tokens']:,} shared and "
        f"{first['suffix_tokens']:,} own tokens, ratio {first['eviction_ratio']}"
    )
    table.add_column("degree", justify="right")
    table.add_column("mode", no_wrap=True)
    for name in (
        "blocks", "below naive", "hits", "protected", "skipped", "dropped", "released", "copies",
        "declined", "cached", "wrong",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for r in rows:
        saved = r["retained_reduction_frac"]
        table.add_row(
            str(r["sharing_degree"]), f"{r['mode']} {r['shared_prefix']}",
            f"{r['retained_blocks']:,.1f}", "" if saved is None else f"{saved:.1%}",
            f"{r['prefix_hit_frac']:.0%}", f"{r['least_protected_tokens']:,}",
            f"{r['shared_tokens_skipped']:,}", f"{r['dropped_blocks']:,}",
            f"{r['vtoken_released_blocks']:,}", f"{r['copies']:,}", f"{r['copies_declined']:,}",
            f"{r['cached_prefix_blocks']:,}", str(r["inconsistencies"]),
        )  # fmt: skip
    return table


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


# ---- as a script --------------------------------------------------------------------------------


def dry_engines(**limits) -> Callable[[VTokenConfig], StepEngine]:
    """A new dry engine for every row; scored policies get made-up scores."""
    from vtoken.engine.dry import DryEngine, DrySettings
    from vtoken.experiments.planning.dry_engines import random_scores

    settings = DrySettings(enable_prefix_caching=True, **limits)
    return lambda config: DryEngine(settings, config, score_source=random_scores)


def one_real_engine(engine: StepEngine) -> Callable[[VTokenConfig], StepEngine]:
    """The same real engine for every row."""

    def engine_for(config: VTokenConfig) -> StepEngine:
        engine.reconfigure(config)
        return engine

    return engine_for


def main(arguments: Sequence[str] | None = None) -> None:
    import argparse

    from rich.console import Console

    parser = argparse.ArgumentParser(description="Retained blocks by sharing degree.")
    parser.add_argument("--model", help="measure on this model; without it: dry, 8K + 8K")
    parser.add_argument("--policy", default="random")
    parser.add_argument("--eviction-ratio", type=float, default=0.5)
    parser.add_argument("--prefix-len", type=int, default=8192)
    parser.add_argument("--suffix-len", type=int, default=8192)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--degrees", type=int, nargs="+", default=[1, 2, 4, 8])
    args = parser.parse_args(arguments)
    config = VTokenConfig(policy=args.policy, eviction_ratio=args.eviction_ratio)
    total = args.prefix_len + args.suffix_len + args.output_len
    most_tokens = args.prefix_len + max(args.degrees) * (args.suffix_len + args.output_len)
    limits = {
        "num_kv_blocks": most_tokens // 16 * 5 // 4 + 64, "max_model_len": total,
        "max_num_batched_tokens": most_tokens,
    }  # fmt: skip
    case = SharingCase(
        degree=1, prefix_tokens=args.prefix_len, suffix_tokens=args.suffix_len,
        output_tokens=args.output_len, vocab_size=32000,
    )  # fmt: skip
    console = Console(width=140)

    def advance(row) -> None:
        name = f"{row['mode']} {row['shared_prefix']}"
        console.print(
            f"degree {row['sharing_degree']} {name}: {row['retained_blocks']:,.1f} blocks"
        )

    if args.model is None:
        rows = prefix_table(dry_engines(**limits), config, case, args.degrees, advance=advance)
    else:
        from vtoken.engine import EngineSettings, open_engine

        settings = EngineSettings(
            model=args.model, block_size=16, enable_prefix_caching=True, **limits
        )
        with open_engine(settings, config) as engine:
            rows = prefix_table(
                one_real_engine(engine), config, case, args.degrees, advance=advance
            )
    console.print(show_prefix_table(rows))


if __name__ == "__main__":
    main()

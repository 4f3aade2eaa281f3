"""One run of a list of requests, as one flat record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from vtoken.engine import StepEngine, run_requests
from vtoken.errors import InvariantViolation
from vtoken.experiments.bench.layouts import LayoutWatch

EVICTED_NOTHING = "evicted nothing: the requests stayed within their budget"


@dataclass(kw_only=True)
class Record:
    """What one run gave.

    Attributes:
        values: flat fields, those of `vllm bench serve` and `vtoken_*`.
        shares: rows over time of `LayoutWatch`; histogram: blocks by live tokens.
        outputs: generated vocabulary ids by request.
    """

    values: dict[str, object]
    shares: list[dict[str, float]] = field(default_factory=list)
    histogram: list[int] = field(default_factory=list)
    outputs: dict[str, list[int]] = field(default_factory=dict)


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
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def measure(
    engine: StepEngine,
    requests: Sequence,
    *,
    max_concurrency: int | None = None,
    by_arrival: bool = False,
    ignore_eos: bool = True,
    goodput_ms: Mapping[str, float] | None = None,
    timed: bool = True,
    watch_layouts: bool = False,
    on_tokens: Callable[[int], None] | None = None,
    clock: Callable[[], float] | None = None,
) -> Record:
    """Run requests on an idle engine.

    Args:
        timed: there is a model, and times mean something.
        watch_layouts: look at blocks while it runs, at some cost.
        on_tokens: told the output tokens so far.
        clock: as in `run_requests`.

    Raises:
        ConfigError: a request can never fit the pool.
        InvariantViolation: blocks or tables are left over.
    """
    watch = LayoutWatch(engine) if watch_layouts else None
    if watch is not None and engine.config is not None and engine.config.mode == "naive":
        watch.budget = engine.hooks.budgets.common  # where nothing moves, chance has an expectation

    def on_step(num_finished: int, num_tokens: int) -> None:
        if watch is not None:
            watch.on_step(num_finished, num_tokens)
        if on_tokens is not None:
            on_tokens(num_tokens)

    with HitCounter(engine) as hits:
        run = run_requests(
            engine, requests, max_concurrency=max_concurrency, by_arrival=by_arrival,
            ignore_eos=ignore_eos, on_step=on_step, clock=clock,
        )  # fmt: skip
    if wrong := engine.check_idle():
        raise InvariantViolation("conservation", f"after a run: {wrong[0]}")
    values = _values(run, timed, goodput_ms)
    values["prefix_hit_frac"] = hits.hit_frac
    record = Record(values=values)
    if engine.config is not None and engine.config.evicts and not run.counters.evicted_tokens:
        values["note"] = EVICTED_NOTHING
    record.outputs = {r: f.output_token_ids for r, f in run.finished.items()}
    if watch is not None:
        record.shares, record.histogram = watch.over_time, watch.histogram.tolist()
        for prefix, shares in (("", watch.shares), ("expected_", watch.expected)):
            for name, value in (shares.fracs() or {}).items():
                values[f"vtoken_blocks_{prefix}{name}_frac"] = value
    return record


def _values(run, timed: bool, goodput_ms) -> dict[str, object]:
    if timed:
        from vtoken.engine.benchmark_metrics import benchmark_metrics

        values: dict[str, object] = dict(benchmark_metrics(run, goodput_ms))
    else:
        values = {
            "completed": len(run.finished),
            "total_input_tokens": run.num_prompt_tokens,
            "total_output_tokens": run.num_output_tokens,
        }
    stats, counters = run.stats, run.counters
    return values | {
        "num_steps": stats.num_steps,
        "vtoken_retained_blocks_per_request": stats.retained_blocks_per_request,
        "ideal_blocks_per_request": stats.ideal_blocks_per_request,
        "vtoken_memory_utilization": stats.memory_utilization,
        "vtoken_peak_blocks": stats.peak_blocks,
        "vtoken_peak_residents": stats.peak_running,
        "vtoken_preemptions": stats.preemptions,
        "vtoken_evicted_tokens": counters.evicted_tokens,
        "vtoken_moved_tokens": counters.moved_tokens,
        "vtoken_released_blocks": counters.released_blocks,
        "vtoken_relocation_events": counters.relocation_events,
        "vtoken_shared_tokens_skipped": counters.shared_tokens_skipped,
        "vtoken_copied_blocks": counters.copied_blocks,
    }

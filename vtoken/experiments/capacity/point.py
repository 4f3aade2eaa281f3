"""One point of a capacity scan: N requests at once on an engine, repeated, made into a row.

Does not know whether the engine is a real one or a dry one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from vtoken.engine import RunResult, RunStats, StepEngine, run_requests
from vtoken.errors import InvariantViolation
from vtoken.experiments.planning.series import Series
from vtoken.experiments.report.results import plain
from vtoken.modes import MODES

Requests = Callable[[int, int], Sequence]  # (number, repeat) -> requests, distinct per repeat


@dataclass(frozen=True, kw_only=True)
class ScanPoint:
    """One (mode, policy, concurrency) of a capacity scan; field names are the file's keys.

    Attributes:
        feasible: all requests were resident at once and none was preempted.
        reason: why not; "" where feasible.
        output_throughput: generated tokens per second, None where nothing was timed.
        vtoken_retained_blocks_per_request: mean over decode steps of blocks in use (a shared
            block once) over running requests.
        ideal_blocks_per_request: blocks of one request if its live tokens were packed.
        vtoken_memory_utilization: live tokens over slots of allocated blocks, a time average.
        vtoken_relocation_events: one request in one step whose KV moved or blocks were released.
        modelled: nothing here was measured on an engine with a model in it.
        metrics: further flat fields (`mean_ttft_ms`, ...), put beside the others.
    """

    mode: str
    policy: str
    concurrency: int
    feasible: bool
    reason: str = ""
    output_throughput: float | None = None
    vtoken_preemptions: int = 0
    vtoken_evicted_tokens: int = 0
    vtoken_moved_tokens: int = 0
    vtoken_released_blocks: int = 0
    vtoken_peak_blocks: int = 0
    vtoken_retained_blocks_per_request: float | None = None
    ideal_blocks_per_request: float | None = None
    vtoken_memory_utilization: float | None = None
    vtoken_relocation_events: int = 0
    modelled: bool = False
    metrics: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.mode in MODES, self.mode
        assert self.concurrency >= 1, self.concurrency
        assert self.feasible == (not self.reason), (self.feasible, self.reason)
        clash = set(self.metrics) & {f.name for f in fields(self)}
        assert not clash, clash

    def row(self) -> dict[str, object]:
        """A flat row of plain values; `modelled` only where it is true, as the contract says."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values.update(values.pop("metrics"))
        if not values["modelled"]:
            del values["modelled"]
        return plain(values)


@dataclass(slots=True)
class PointRun:
    """A point and what else was seen while it ran.

    Attributes:
        num_steps, num_tokens: of all repeats; prompt and output tokens together.
        seconds: the same, wall time.
        demand: (step, blocks in use, running requests) of the first repeat, thinned.
    """

    point: ScanPoint
    num_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    demand: list[tuple[int, int, int]] = field(default_factory=list)


class ResidencyWatch:
    """Ends a run as soon as its point is infeasible for certain.

    That is at the first preemption, or when a request has finished before all were resident:
    from then on they never can be.
    """

    def __init__(self, target: int, on_tokens: Callable[[int], None] | None = None) -> None:
        self.target, self.on_tokens = target, on_tokens
        self.num_finished = self._num_told = 0

    def on_step(self, num_finished: int, num_output_tokens: int) -> None:
        self.num_finished = num_finished
        if self.on_tokens is not None and num_output_tokens > self._num_told:
            self._num_told = num_output_tokens
            self.on_tokens(num_output_tokens)

    def should_stop(self, stats: RunStats) -> bool:
        if stats.preemptions > 0:
            return True
        return self.num_finished > 0 and stats.peak_running < self.target


def run_point(
    engine: StepEngine,
    line: Series,
    concurrency: int,
    requests: Requests,
    *,
    repeats: int = 1,
    modelled: bool = False,
    on_tokens: Callable[[int], None] | None = None,
) -> PointRun:
    """Run one point.

    Args:
        requests: gives the requests of each repeat.
        modelled: there is no model behind the engine: times mean nothing.
        on_tokens: told the output tokens so far, over all repeats, after every step.

    Returns:
        The point. An infeasible repeat is the last one: the others could not change the answer.

    Raises:
        InvariantViolation: blocks or tables are left over after a run.
        ConfigError: a request can never fit the pool.
    """
    runs: list[RunResult] = []
    counters: list[dict[str, float]] = []
    reason, done_tokens = "", 0
    for repeat in range(repeats):
        engine.reset_prefix_cache()  # a warm prefix would hide block demand and prefill time
        watch = ResidencyWatch(
            concurrency, on_tokens and (lambda n, before=done_tokens: on_tokens(before + n))
        )
        runs.append(
            run_requests(
                engine, requests(concurrency, repeat), should_stop=watch.should_stop,
                on_step=watch.on_step,
            )
        )  # fmt: skip
        counters.append(runs[-1].counters.as_dict())  # the engine's own object: reset by the next
        if wrong := engine.check_idle():
            raise InvariantViolation("conservation", f"after {line} at {concurrency}: {wrong[0]}")
        done_tokens += runs[-1].num_output_tokens
        reason = why_infeasible(runs[-1], concurrency)
        if reason:
            break
    return PointRun(
        point=_make_point(line, concurrency, runs, counters, reason, modelled),
        num_steps=sum(run.stats.num_steps for run in runs),
        num_tokens=sum(run.num_prompt_tokens + run.num_output_tokens for run in runs),
        seconds=sum(run.wall_s for run in runs),
        demand=runs[0].stats.demand,
    )


def why_infeasible(run: RunResult, concurrency: int) -> str:
    """Say why a run's point is infeasible, or "" if it is feasible."""
    stats = run.stats
    if stats.preemptions:
        return f"preempted at step {stats.num_steps:,} with {stats.peak_running} resident"
    if stats.peak_running < concurrency:
        return f"at most {stats.peak_running} of {concurrency} were resident at once"
    assert len(run.finished) == concurrency, (len(run.finished), concurrency)
    return ""


def infeasible_by_size(line: Series, needed: int, pool_blocks: int, modelled: bool) -> PointRun:
    """The row of a mode in which the pool does not hold a single request."""
    reason = f"one request needs {needed:,} blocks, the pool has {pool_blocks:,}"
    return PointRun(
        ScanPoint(
            mode=line.mode, policy=line.policy, concurrency=1, feasible=False, reason=reason,
            modelled=modelled,
        )
    )  # fmt: skip


def _make_point(
    line: Series,
    concurrency: int,
    runs: list[RunResult],
    counters: list[dict[str, float]],
    reason: str,
    modelled: bool,
) -> ScanPoint:
    stats = [run.stats for run in runs]
    feasible = not reason

    def count(name: str) -> int:
        return round(sum(values[name] for values in counters) / len(counters))

    throughput = None
    if feasible and not modelled:
        throughput = _mean([run.output_throughput for run in runs])
    return ScanPoint(
        mode=line.mode,
        policy=line.policy,
        concurrency=concurrency,
        feasible=feasible,
        reason=reason,
        output_throughput=throughput,
        vtoken_preemptions=sum(s.preemptions for s in stats),
        vtoken_evicted_tokens=count("evicted_tokens"),
        vtoken_moved_tokens=count("moved_tokens"),
        vtoken_released_blocks=count("released_blocks"),
        vtoken_peak_blocks=max(s.peak_blocks for s in stats),
        vtoken_retained_blocks_per_request=_mean([s.retained_blocks_per_request for s in stats]),
        ideal_blocks_per_request=_mean([s.ideal_blocks_per_request for s in stats]),
        vtoken_memory_utilization=_mean([s.memory_utilization for s in stats]),
        vtoken_relocation_events=count("relocation_events"),
        modelled=modelled,
        metrics=_metrics(runs, timed=feasible and not modelled),
    )


def _metrics(runs: list[RunResult], timed: bool) -> dict[str, object]:
    """Further fields, named as in `vllm bench serve`; counts are means over the repeats."""
    metrics: dict[str, object] = {
        "repeats": len(runs),
        "num_steps": round(_mean([run.stats.num_steps for run in runs])),
        "total_input_tokens": round(_mean([run.num_prompt_tokens for run in runs])),
        "total_output_tokens": round(_mean([run.num_output_tokens for run in runs])),
    }
    if timed:
        times = [t for run in runs for t in run.times.values()]
        gaps_s = [gap for t in times for gap in t.itl_s]
        metrics["duration"] = _mean([run.wall_s for run in runs])
        metrics["mean_ttft_ms"] = 1000 * _mean([t.ttft_s for t in times])
        metrics["mean_e2el_ms"] = 1000 * _mean([t.e2el_s for t in times])
        if gaps_s:
            metrics["mean_itl_ms"] = 1000 * _mean(gaps_s)
            metrics["p95_itl_ms"] = 1000 * float(np.percentile(gaps_s, 95))
    return metrics


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None

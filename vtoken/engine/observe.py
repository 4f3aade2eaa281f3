"""Watch a scheduler from outside: the same yardstick for stock vLLM and for every mode."""

from __future__ import annotations

from dataclasses import dataclass, field

from vtoken.units import cdiv


@dataclass(slots=True)
class RunStats:
    """What was seen over a run.

    Attributes:
        num_steps, num_decode_steps: all steps with work; those in which every request got 1 token.
        peak_running: most requests holding blocks in one step.
        peak_blocks: most distinct blocks in use.
        sum_*: over decode steps, per running request: blocks in use, ideally packed blocks; and
            over all steps: live tokens, slots of blocks in use.
        preemptions: how often a request lost its blocks and had to be computed again.
        demand: (step, blocks in use, running requests) samples for plots, thinned.
    """

    num_steps: int = 0
    num_decode_steps: int = 0
    peak_running: int = 0
    peak_blocks: int = 0
    sum_blocks_per_request: float = 0.0
    sum_ideal_blocks_per_request: float = 0.0
    sum_utilization: float = 0.0
    preemptions: int = 0
    first_all_resident_step: int | None = None
    demand: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def retained_blocks_per_request(self) -> float | None:
        """Mean over decode steps of blocks in use over running requests."""
        n = self.num_decode_steps
        return self.sum_blocks_per_request / n if n else None

    @property
    def ideal_blocks_per_request(self) -> float | None:
        """The same if every request's live tokens were packed and nothing were shared."""
        n = self.num_decode_steps
        return self.sum_ideal_blocks_per_request / n if n else None

    @property
    def memory_utilization(self) -> float | None:
        """Mean over steps of live tokens over slots of blocks in use."""
        return self.sum_utilization / self.num_steps if self.num_steps else None


class Observer:
    """Wraps a scheduler's `schedule` and `_preempt_request` on the instance; `stop` undoes it."""

    MAX_SAMPLES = 2000

    def __init__(self, engine) -> None:
        self.engine, self.stats = engine, RunStats()
        scheduler = engine.scheduler
        self._schedule, self._preempt = scheduler.schedule, scheduler._preempt_request
        self._stride = 1
        scheduler.schedule = self._observed_schedule
        scheduler._preempt_request = self._observed_preempt
        # A dry engine may take many steps at once, past `schedule`.
        self._listeners = getattr(engine, "bulk_listeners", [])
        self._listeners.append(self.record_bulk)

    def stop(self) -> RunStats:
        """Take the wrappers off."""
        for name in ("schedule", "_preempt_request"):
            del self.engine.scheduler.__dict__[name]
        self._listeners.remove(self.record_bulk)
        return self.stats

    def _observed_preempt(self, *args, **kwargs):
        self.stats.preemptions += 1
        return self._preempt(*args, **kwargs)

    def _observed_schedule(self, *args, **kwargs):
        output = self._schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            self._record(output)
        return output

    def _record(self, output) -> None:
        stats, engine = self.stats, self.engine
        used, running = engine.num_used_blocks(), len(engine.scheduler.running)
        N = engine.block_size
        stats.num_steps += 1
        stats.peak_running = max(stats.peak_running, running)
        stats.peak_blocks = max(stats.peak_blocks, used)
        live = [self._live_tokens(r) for r in engine.scheduler.running]
        stats.sum_utilization += sum(live) / (used * N) if used else 0.0
        if running and output.total_num_scheduled_tokens == len(output.num_scheduled_tokens):
            stats.num_decode_steps += 1
            stats.sum_blocks_per_request += used / running
            stats.sum_ideal_blocks_per_request += sum(cdiv(n, N) for n in live) / running
        if stats.num_steps % self._stride == 0:
            self._sample(stats.num_steps, used, running)

    def record_bulk(self, steps) -> None:
        """Take in a stretch of decode steps (`vtoken.engine.fast_forward.BulkSteps`)."""
        stats, used, running = self.stats, steps.used_blocks, steps.num_running
        first = stats.num_steps
        stats.num_steps += steps.num_steps
        stats.peak_running = max(stats.peak_running, running)
        stats.peak_blocks = max(stats.peak_blocks, int(used.max()))
        stats.sum_utilization += float((steps.live_tokens / (used * self.engine.block_size)).sum())
        stats.num_decode_steps += steps.num_steps
        stats.sum_blocks_per_request += int(used.sum()) / running
        stats.sum_ideal_blocks_per_request += int(steps.ideal_blocks.sum()) / running
        step = (first // self._stride + 1) * self._stride
        while step <= stats.num_steps:
            self._sample(step, int(used[step - first - 1]), running)
            step = (step // self._stride + 1) * self._stride

    def _sample(self, step: int, used: int, running: int) -> None:
        stats = self.stats
        stats.demand.append((step, used, running))
        if len(stats.demand) > self.MAX_SAMPLES:
            stats.demand = stats.demand[::2]
            self._stride *= 2

    def _live_tokens(self, request) -> int:
        """Tokens whose KV the request holds after this step."""
        hooks = self.engine.hooks
        state = hooks.requests.by_id.get(request.request_id) if hooks is not None else None
        evicted = state.table.num_evicted_tokens if state is not None else 0
        return request.num_computed_tokens - evicted

"""Run a list of requests on an engine, closed loop or by arrival times, and time every token."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vtoken.core.counters import Counters
from vtoken.engine.base import FinishedRequest, StepEngine
from vtoken.engine.observe import Observer, RunStats


@dataclass(slots=True)
class RequestTimes:
    """Seconds on the run's clock; `tokens` has one entry per output token."""

    submitted_s: float
    tokens_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.tokens_s[0] - self.submitted_s

    @property
    def e2el_s(self) -> float:
        return self.tokens_s[-1] - self.submitted_s

    @property
    def itl_s(self) -> list[float]:
        return [b - a for a, b in zip(self.tokens_s, self.tokens_s[1:], strict=False)]


@dataclass(slots=True)
class RunResult:
    """Attributes:
    finished: per request id.
    times: per request id; on a dry engine these are host seconds and mean nothing.
    wall_s: from the first submission to the last token.
    counters: what vToken did during this run.
    stopped_early: the caller's `should_stop` ended it.
    """

    finished: dict[str, FinishedRequest]
    times: dict[str, RequestTimes]
    wall_s: float
    stats: RunStats
    counters: Counters
    num_prompt_tokens: int
    num_output_tokens: int
    stopped_early: bool = False

    @property
    def output_throughput(self) -> float:
        """Output tokens per second."""
        return self.num_output_tokens / self.wall_s if self.wall_s else 0.0


def run_requests(
    engine: StepEngine,
    requests: Sequence,
    *,
    max_concurrency: int | None = None,
    by_arrival: bool = False,
    logprobs: bool = False,
    ignore_eos: bool = True,
    should_stop: Callable[[RunStats], bool] | None = None,
    on_step: Callable[[int, int], None] | None = None,
    check_every: int = 0,
    clock: Callable[[], float] | None = None,
) -> RunResult:
    """Run requests to their end.

    Args:
        requests: objects with request_id, prompt_token_ids and output_len (WorkloadRequest).
        max_concurrency: how many are in the engine at a time; None: all at once.
        by_arrival: open loop: a request enters at its `arrival_s`, and its times count from
            then, however long a step kept it waiting. Requests are sorted by arrival.
        should_stop: asked after every step; True aborts what is left.
        on_step: told (finished requests, output tokens so far) after every step.
        check_every: check all invariants after every this many steps; 0: never.
        clock: seconds; None: wall time. `time.process_time` leaves out what other processes take,
            and what this one waits.

    Raises:
        ConfigError: a request can never fit the pool.
        InvariantViolation: a check failed.
    """
    clock = clock or time.perf_counter  # looked up now: tests move the clock of this module
    engine.counters.reset()
    observer = Observer(engine)
    waiting = list(reversed(requests))
    run = RunResult({}, {}, 0.0, observer.stats, engine.counters, 0, 0)
    start = clock()
    steps = in_flight = 0
    try:
        while waiting or engine.has_unfinished():
            while waiting and (max_concurrency is None or in_flight < max_concurrency):
                now = clock() - start
                if by_arrival and waiting[-1].arrival_s > now:
                    break
                request = waiting.pop()
                run.times[request.request_id] = RequestTimes(
                    request.arrival_s if by_arrival else now
                )
                engine.add(
                    request.request_id, request.prompt_token_ids, request.output_len,
                    logprobs=logprobs, ignore_eos=ignore_eos,
                )  # fmt: skip
                in_flight += 1
                run.num_prompt_tokens += len(request.prompt_token_ids)
            if not in_flight and waiting:  # nothing to do before the next arrival
                time.sleep(max(0.0, waiting[-1].arrival_s - (clock() - start)))
                continue
            new_tokens, finished = engine.step()
            now = clock() - start
            for req_id, count in new_tokens.items():
                run.times[req_id].tokens_s.extend([now] * count)
                run.num_output_tokens += count
            for f in finished:
                run.finished[f.req_id] = f
            in_flight -= len(finished)
            steps += 1
            if on_step is not None:
                on_step(len(run.finished), run.num_output_tokens)
            if check_every and steps % check_every == 0:
                _raise_on(engine.check_invariants())
            if should_stop is not None and should_stop(observer.stats):
                run.stopped_early = True
                waiting.clear()
                engine.abort([r for r in run.times if r not in run.finished])
                while engine.has_unfinished():
                    engine.step()
    finally:
        observer.stop()
        run.wall_s = clock() - start
    return run


def _raise_on(wrong: list[str]) -> None:
    if wrong:
        from vtoken.errors import InvariantViolation

        raise InvariantViolation("conservation", "; ".join(wrong))

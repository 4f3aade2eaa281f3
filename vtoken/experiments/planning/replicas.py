"""One server of a planned fleet: vLLM's scheduler and block pool, fed by arrivals in modelled time.

    replica = Replica(settings, config, cost)
    replica.submit(request, index)      # at its arrival time
    replica.advance(until_s)            # all steps that begin before then
    replica.finish()

Prompts need no token ids: equal prefix hash ids of a trace become equal block hashes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vtoken.core.budget import peak_tokens
from vtoken.engine.dry import DryEngine, DrySettings
from vtoken.engine.observe import Observer
from vtoken.errors import EngineError
from vtoken.experiments.planning.modelled_clock import ModelledClock, StepCost
from vtoken.units import cdiv
from vtoken.workloads.request import WorkloadRequest

DEMAND_SAMPLES = 600


@dataclass(slots=True)
class RequestOutcome:
    """Modelled seconds on the trace's clock; None where it did not come to that.

    Attributes:
        cached_tokens: of the prompt, found in the prefix cache when it was first admitted.
        rejected: it can never fit the pool.
    """

    request: WorkloadRequest
    arrival_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    cached_tokens: int = 0
    rejected: bool = False

    @property
    def queue_s(self) -> float:
        return self.admitted_s - self.arrival_s

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def e2el_s(self) -> float:
        return self.finished_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first; 0 where there is one only."""
        more = self.request.output_len - 1
        return (self.finished_s - self.first_token_s) / more if more else 0.0


class TraceEngine(DryEngine):
    """A dry engine whose prefix cache is keyed by a trace's prefix hash ids."""

    def __init__(self, *args, **kwargs) -> None:
        self.prefixes: dict[str, WorkloadRequest] = {}
        super().__init__(*args, **kwargs)

    def _make_hasher(self):
        if not self.settings.enable_prefix_caching:
            return None
        N = self.block_size

        def hash_blocks(request) -> list[bytes]:
            first, last = len(request.block_hashes), request.num_tokens // N
            if first >= last:
                return []
            known = self.prefixes[request.request_id]
            ids, per = known.prefix_hash_ids, known.prefix_block_tokens
            # Equal ids mean an equal prefix up to and including their block; generated tokens
            # and prompts without ids are shared with no request.
            in_prompt = known.prompt_len // N if ids else 0
            return [
                b"p%d.%d" % (ids[((i + 1) * N - 1) // per], i)
                if i < in_prompt
                else b"o%s.%d" % (request.request_id.encode(), i)
                for i in range(first, last)
            ]

        return hash_blocks


@dataclass
class Replica:
    """A scheduler, its pool, its modelled clock, and what became of its requests.

    Attributes:
        outcomes: by request id, in the order of submission.
        demand: (time_s, blocks in use, running, waiting), thinned.
    """

    settings: DrySettings
    config: object
    cost: StepCost
    outcomes: dict[str, RequestOutcome] = field(default_factory=dict)
    demand: list[tuple[float, int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = TraceEngine(self.settings, self.config)
        self.clock = ModelledClock(self.engine, self.cost)
        self.observer = Observer(self.engine)
        self.engine.step_listeners.append(self._note_admitted)
        self._step_start_s = 0.0
        self.num_outstanding = self.num_finished = 0
        self.outstanding_tokens = 0
        self._sample_every_s, self._next_sample_s = 1.0, 0.0

    @property
    def stats(self):
        return self.observer.stats

    @property
    def load(self) -> tuple[int, int]:
        """What a router goes by: tokens of all requests it has not finished, and their number."""
        return self.outstanding_tokens, self.num_outstanding

    def fits(self, request: WorkloadRequest) -> bool:
        """Whether the pool could hold the request at all."""
        total = request.prompt_len + request.output_len
        if self.config is not None and self.config.mode == "vtoken":
            N = self.settings.block_size
            total = peak_tokens(self.config.make_budget(N), total, N)
        return cdiv(total, self.settings.block_size) <= self.settings.num_kv_blocks

    def submit(self, request: WorkloadRequest, index: int) -> None:
        """Take a request in at its arrival time; the replica must have been advanced to it."""
        outcome = RequestOutcome(request, request.arrival_s)
        self.outcomes[request.request_id] = outcome
        if not self.fits(request):
            outcome.rejected = True
            return
        if not self.num_outstanding:
            self.clock.now_s = max(self.clock.now_s, request.arrival_s)
        # Only the first tokens differ: what a policy draws depends on the prompt.
        head = [index % 65536, index // 65536 % 65536][: request.prompt_len]
        ids = head + [7] * (request.prompt_len - len(head))
        self.engine.prefixes[request.request_id] = request
        self.engine.add(request.request_id, ids, request.output_len)
        self.num_outstanding += 1
        self.outstanding_tokens += request.prompt_len + request.output_len

    def advance(self, until_s: float = float("inf")) -> None:
        """Take all steps that begin before a time.

        Raises:
            EngineError: requests wait and nothing can ever let them in.
        """
        idle = 0
        while self.num_outstanding and self.clock.now_s < until_s:
            limit = None if until_s == float("inf") else self.clock.steps_before(until_s)
            busy_s = self.clock.busy_s
            self._take_step(limit)
            idle = idle + 1 if self.clock.busy_s == busy_s else 0
            if idle > 3:
                raise EngineError("the scheduler has requests and schedules none of them")

    def _take_step(self, limit: int | None) -> None:
        start_s = self._step_start_s = self.clock.now_s
        new_tokens, finished = self.engine.step(max_steps=limit)
        now_s = self.clock.now_s
        for req_id in new_tokens:
            outcome = self.outcomes[req_id]
            if outcome.first_token_s is None:
                outcome.first_token_s = now_s
        for done in finished:
            outcome = self.outcomes[done.req_id]
            outcome.finished_s = now_s
            self.num_outstanding -= 1
            self.num_finished += 1
            self.outstanding_tokens -= outcome.request.prompt_len + outcome.request.output_len
            del self.engine.prefixes[done.req_id]
        if start_s >= self._next_sample_s:
            self._sample(start_s)

    def _note_admitted(self, output) -> None:
        for new in output.scheduled_new_reqs:
            outcome = self.outcomes[new.req_id]
            outcome.admitted_s = self._step_start_s
            outcome.cached_tokens = new.num_computed_tokens

    def _sample(self, time_s: float) -> None:
        scheduler = self.engine.scheduler
        self.demand.append(
            (time_s, self.engine.num_used_blocks(), len(scheduler.running), len(scheduler.waiting))
        )
        self._next_sample_s = time_s + self._sample_every_s
        if len(self.demand) > DEMAND_SAMPLES:
            self.demand = self.demand[::2]
            self._sample_every_s *= 2

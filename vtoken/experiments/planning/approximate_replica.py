"""A quick approximate model of one replica, for fleets too large for real schedulers.

It admits first come, first served; shares a step's tokens between decodes and prompt chunks; counts
blocks by arithmetic (live tokens over the block size, half a block for the last one); preempts the
newest when the pool is full; and jumps over stretches of decode steps. It knows no prefix cache,
and no chance in what naive eviction frees. Two figures are taken from a run of the real scheduler
on the same trace (`calibrate`): a factor on step times and the share of blocks that `naive` keeps.
How far the two were apart in that run is reported with every result.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from vtoken.core.budget import peak_tokens
from vtoken.engine.observe import RunStats
from vtoken.experiments.planning.cost_model import StepWork
from vtoken.experiments.planning.replicas import RequestOutcome
from vtoken.experiments.planning.series import Series
from vtoken.modes import EVICTING_MODES
from vtoken.units import cdiv
from vtoken.workloads.request import WorkloadRequest


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What the real scheduler told, and how far the calibrated model is from it on that sample.

    Attributes:
        step_factor: on modelled step times.
        kept_frac: blocks in use over those of full retention (1 where nothing is evicted).
        *_error_frac: relative error of the model on the sample.
    """

    step_factor: float = 1.0
    kept_frac: float = 1.0
    num_requests: int = 0
    throughput_error_frac: float = 0.0
    e2el_error_frac: float = 0.0

    def row(self) -> dict[str, object]:
        return {f"calibration_{k}": getattr(self, k) for k in self.__dataclass_fields__}


class _Job:
    __slots__ = ("computed", "generated", "outcome", "request")

    def __init__(self, outcome: RequestOutcome) -> None:
        self.outcome, self.request = outcome, outcome.request
        self.computed = self.generated = 0

    @property
    def known(self) -> int:
        """Tokens that must be computed before the next one is sampled."""
        return self.request.prompt_len + self.generated


class ReplicaModel:
    """Has the interface of `replicas.Replica`."""

    approximate = True

    def __init__(self, setup, line: Series, calibration: Calibration) -> None:
        self.setup, self.cost, self.calibration = setup, setup.cost, calibration
        self.N, self.num_blocks = setup.plan.block_size, setup.plan.num_usable_blocks
        config = line.config(setup.config)
        self.budget = config.make_budget(self.N) if line.mode in EVICTING_MODES else None
        self.packs = line.mode == "vtoken"
        self.outcomes: dict[str, RequestOutcome] = {}
        self.demand: list[tuple[float, int, int, int]] = []
        self.stats = RunStats()
        self.waiting: deque[_Job] = deque()
        self.running: list[_Job] = []
        self.now_s = self.busy_s = 0.0
        self.num_outstanding = self.outstanding_tokens = 0

    @property
    def load(self) -> tuple[int, int]:
        return self.outstanding_tokens, self.num_outstanding

    def live(self, tokens: int) -> float:
        """Live tokens of a request that has computed so many, between two evictions on average."""
        if self.budget is None:
            return tokens
        kept, interval = int(self.budget.tokens(tokens)), self.budget.interval_tokens
        return tokens if tokens < kept + interval else kept + interval / 2

    def blocks(self, tokens: int) -> float:
        """Blocks such a request holds."""
        if self.packs:
            return self.live(tokens) / self.N + 0.5
        full = tokens / self.N + 0.5
        return full * self.calibration.kept_frac if self.budget is not None else full

    def submit(self, request: WorkloadRequest, index: int) -> None:
        """Take a request in; see `Replica.submit`."""
        outcome = self.outcomes[request.request_id] = RequestOutcome(request, request.arrival_s)
        total = request.prompt_len + request.output_len
        peak = peak_tokens(self.budget, total, self.N) if self.packs else total
        if cdiv(peak, self.N) > self.num_blocks:
            outcome.rejected = True
            return
        if not self.num_outstanding:
            self.now_s = max(self.now_s, request.arrival_s)
        self.waiting.append(_Job(outcome))
        self.num_outstanding += 1
        self.outstanding_tokens += total

    def advance(self, until_s: float = float("inf")) -> None:
        """Take all steps that begin before a time."""
        while self.num_outstanding and self.now_s < until_s:
            chunks = self._plan_chunks()
            if chunks:
                self._mixed_step(chunks)
            else:
                self._decode_steps(until_s)

    def _used(self) -> float:
        return sum(self.blocks(job.computed) for job in self.running)

    def _plan_chunks(self) -> dict[_Job, int]:
        """Prompt chunks of the next step; admits what fits."""
        decodes = sum(job.known - job.computed == 1 and job.computed > 0 for job in self.running)
        left = self.setup.max_num_batched_tokens - decodes
        chunks: dict[_Job, int] = {}
        for job in self.running:
            missing = job.known - job.computed
            if (missing > 1 or job.computed == 0) and left > 0:
                chunks[job] = min(missing, left)
                left -= chunks[job]
        free = None
        while self.waiting and left > 0 and len(self.running) < self.setup.max_num_seqs:
            job = self.waiting[0]
            if free is None:
                held = sum(self.blocks(max(j.computed, j.known - 1)) for j in self.running)
                free = self.num_blocks - held
            need = self.blocks(job.known)
            # Those that run go first: a request that was just preempted must not get back in
            # with the blocks that it gave up.
            if need + (1 + len(self.running) / self.N if self.running else 0) > free:
                break
            free -= need
            self.running.append(self.waiting.popleft())
            if job.outcome.admitted_s is None:
                job.outcome.admitted_s = self.now_s
            chunks[job] = min(job.known, left)
            left -= chunks[job]
        return chunks

    def _mixed_step(self, chunks: dict[_Job, int]) -> None:
        new = read = pairs = sampled = 0.0
        advanced = []
        for job in self.running:
            n = chunks.get(job) or (1 if job.known - job.computed == 1 and job.computed else 0)
            if not n:
                continue
            kv = self.live(job.computed + n)
            new, read = new + n, read + kv
            pairs += n * max(0.0, kv - n) + n * (n + 1) / 2
            job.computed += n
            if job.computed == job.known:
                sampled += 1
                advanced.append(job)
        work = StepWork(num_seqs=sampled, num_new_tokens=new, kv_read_tokens=read, attn_pairs=pairs)
        self._spend(float(self.cost.seconds(work)), 1)
        self._sample(advanced, 1)

    def _decode_steps(self, until_s: float) -> None:
        R = len(self.running)
        assert R, "requests wait, none runs, and the first does not fit"
        if self._used() + R / self.N > self.num_blocks and R > 1:
            self._preempt()
            return
        steps = min(job.request.output_len - job.generated for job in self.running)
        growth = sum(self.blocks(j.computed + 256) - self.blocks(j.computed) for j in self.running)
        if growth > 0:
            room = (self.num_blocks - self._used()) / growth * 256
            steps = min(steps, max(1, int(room)))
        kv = sum(self.live(job.computed) for job in self.running)
        later = sum(self.live(job.computed + steps) for job in self.running)
        step_s = self.calibration.step_factor * self.cost.decode_s(R, (kv + later) / 2)
        if until_s != float("inf"):
            steps = max(1, min(steps, int((until_s - self.now_s) / step_s) + 1))
        for job in self.running:
            job.computed += steps
        self._spend(steps * step_s / self.calibration.step_factor, steps)
        self._sample(list(self.running), steps)

    def _preempt(self) -> None:
        job = self.running.pop()
        job.computed = 0
        self.waiting.appendleft(job)
        self.stats.preemptions += 1

    def _spend(self, seconds: float, steps: int) -> None:
        seconds *= self.calibration.step_factor
        self.now_s += seconds
        self.busy_s += seconds
        stats, used = self.stats, round(self._used())
        stats.num_steps += steps
        stats.peak_running = max(stats.peak_running, len(self.running))
        stats.peak_blocks = max(stats.peak_blocks, used)

    def _sample(self, jobs: list[_Job], tokens: int) -> None:
        done = set()
        for job in jobs:
            job.generated += tokens
            outcome = job.outcome
            if outcome.first_token_s is None:
                outcome.first_token_s = self.now_s
            if job.generated >= job.request.output_len:
                outcome.finished_s = self.now_s
                done.add(job)
                self.num_outstanding -= 1
                self.outstanding_tokens -= job.request.prompt_len + job.request.output_len
        if done:
            self.running = [job for job in self.running if job not in done]

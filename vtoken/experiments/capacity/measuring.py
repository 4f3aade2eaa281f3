"""Measure the points of a scan on real engines, and keep to its time limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from vtoken.engine import StepEngine, run_requests
from vtoken.experiments.capacity.engines import RealEngines
from vtoken.experiments.capacity.point import PointRun, run_point
from vtoken.experiments.capacity.prompts import PromptSource
from vtoken.experiments.capacity.time_limit import Deadline, LeftOut, StepTimes
from vtoken.experiments.planning.series import Series
from vtoken.experiments.report.listener import Listener

WARM_UP_STEPS, WARM_UP_PROMPT_LEN = 4, 16
# Where time is short: vtoken against native is the answer, the others explain it.
RANK = {"native": 0, "vtoken": 1, "naive": 2, "indirection": 3}


@dataclass
class Measuring:
    """Runs points on real engines within a time limit.

    Attributes:
        first_points: of each line, the point that its answer cannot do without. Time for those of
            later lines is kept back: from points that only confirm, and from first points of
            modes that matter less.
    """

    engines: RealEngines
    times: StepTimes
    deadline: Deadline
    prompts: PromptSource
    repeats: int
    listener: Listener
    expected_work: Callable[[Series, int], tuple[int, int]]
    first_points: dict[Series, int]
    _started: set[Series] = field(default_factory=set)

    def run(self, line: Series, concurrency: int) -> PointRun | LeftOut:
        """Measure a point, or say why it was left out."""
        if refused := self._refusal(line, concurrency):
            return refused
        must_load = self.engines.must_load(line)
        if must_load:
            self.listener.note(f"starting an engine in mode {line.mode}")
        engine = self.engines.get(line, concurrency)
        self._started.add(line)
        if must_load:
            self._warm_up(engine, line, concurrency)
            if refused := self._refusal(line, concurrency):
                return refused
            engine = self.engines.get(line, concurrency)
        output_tokens = sum(r.output_len for r in self.prompts(concurrency, 0)) * self.repeats
        with self.listener.progress(output_tokens, f"{line} at {concurrency}") as bar:
            run = run_point(
                engine, line, concurrency, self.prompts, repeats=self.repeats, on_tokens=bar.update
            )
        self.times.record(line.mode, run.num_steps, run.num_tokens, run.seconds)
        return run

    def _refusal(self, line: Series, concurrency: int) -> LeftOut | None:
        predicted_s = self._predict(line, concurrency)
        is_first = self.first_points.get(line) == concurrency
        reserved_s = self._needed_later(line, RANK[line.mode] if is_first else len(RANK))
        if self.deadline.has_room(predicted_s, reserved_s):
            return None
        return LeftOut(
            mode=line.mode, policy=line.policy, concurrency=concurrency, predicted_s=predicted_s,
            left_s=self.deadline.left_s, reserved_s=reserved_s,
        )  # fmt: skip

    def _predict(self, line: Series, concurrency: int, after: Series | None = None) -> float:
        """Seconds for a point, its engine's start included; 0 before anything was measured."""
        steps, tokens = self.expected_work(line, concurrency)
        seconds = self.times.predict(line.mode, steps * self.repeats, tokens * self.repeats) or 0.0
        if self.engines.must_load(line, after):
            seconds += self.engines.load_s or 0.0
        return seconds

    def _needed_later(self, line: Series, rank: int) -> float:
        """Seconds for the first points of other lines that rank before this."""
        seconds, before = 0.0, line
        for later, concurrency in self.first_points.items():
            if later != line and later not in self._started and RANK[later.mode] < rank:
                seconds += self._predict(later, concurrency, after=before)
                before = later
        return seconds

    def _warm_up(self, engine: StepEngine, line: Series, concurrency: int) -> None:
        """Run a few steps on a new engine.

        The first ones are slow, and the first prediction needs something to go by.
        """
        requests = self.prompts(concurrency, 0)
        short = [
            replace(
                r, prompt=None, prompt_token_ids=r.prompt_token_ids[:WARM_UP_PROMPT_LEN],
                prompt_len=min(r.prompt_len, WARM_UP_PROMPT_LEN), output_len=WARM_UP_STEPS,
            )
            for r in requests
        ]  # fmt: skip
        one = [replace(requests[0], output_len=1)]
        # Decodes; then one prompt alone and decodes again: what a token and what a step cost.
        for batch, counts in ((short, False), (one, True), (short, True)):
            run = run_requests(engine, batch)
            engine.reset_prefix_cache()
            if counts:
                tokens = run.num_prompt_tokens + run.num_output_tokens
                self.times.record(line.mode, run.stats.num_steps, tokens, run.wall_s)

"""Where a step's time goes, phase by phase, with every request decoding."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from vtoken.engine import StepEngine
from vtoken.experiments.profile.boundaries import ATTENTION, PHASES, SCORES, watch_engine
from vtoken.experiments.profile.profile_options import ProfileSettings
from vtoken.experiments.profile.rows import Row, Say, make_row
from vtoken.experiments.profile.running import side_by_side, start_requests, stop_requests
from vtoken.experiments.profile.timer import PhaseTimer, Span, StepTimes
from vtoken.modes import MODES

SCORE_PRICE_STEPS, WARM_UP_STEPS = 3, 4


@dataclass
class StepProfile:
    """One mode's decode steps.

    Attributes:
        plans: (bytes, seconds to pickle and unpickle) of each step's StepPlan that was there.
        score_share: of the time in our attention kernels, what the score sums took; None where
            no scores are summed there.
    """

    mode: str
    concurrency: int
    steps: list[StepTimes] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    plans: list[tuple[int, float]] = field(default_factory=list)
    num_events: int = 0
    score_share: float | None = None

    def phase_ms(self, phase: str) -> np.ndarray:
        """float64[steps], milliseconds; score sums fused into attention count as scores."""
        ms = np.array([1e3 * s.phases_s.get(phase, 0.0) for s in self.steps])
        fused = self.score_share or 0.0
        if phase == ATTENTION:
            return ms * (1 - fused)
        return ms + fused * self.phase_ms(ATTENTION) / (1 - fused) if phase == SCORES else ms

    @property
    def total_ms(self) -> np.ndarray:
        return np.array([1e3 * s.total_s for s in self.steps])

    def rows(self, stock: float | None) -> list[Row]:
        """Flat rows; `frac` is the phase's share of all steps' time.

        Args:
            stock: milliseconds of a step of stock vLLM, see `stock_ms`.
        """
        at, all_ms = f"c{self.concurrency}", self.total_ms
        against = None if stock is None else all_ms.mean() / stock
        rows = [make_row(f"{self.mode}/step/{at}", "ms", samples=all_ms, ratio_to_stock=against)]
        for phase in PHASES:
            ms, name = self.phase_ms(phase), phase.replace(" ", "_")
            if ms.any():
                frac = float(ms.sum() / all_ms.sum())
                rows.append(make_row(f"{self.mode}/{name}/{at}", "ms", samples=ms, frac=frac))
        rows.append(
            make_row(f"{self.mode}/relocation_events/{at}", "events", value=self.num_events)
        )
        if self.plans:
            sizes, seconds = zip(*self.plans, strict=True)
            rows.append(make_row(f"{self.mode}/step_plan_size/{at}", "bytes", samples=sizes))
            us = np.array(seconds) * 1e6
            rows.append(make_row(f"{self.mode}/step_plan_pickling/{at}", "us", samples=us))
        return rows


def run_step(profile: ProfileSettings, say: Say) -> Iterator[StepProfile]:
    """Profile each mode in turn, stock vLLM first and in an engine of its own.

    Raises:
        ConfigError: the requests do not fit at once, or the model cannot be evicted from.
    """
    c = profile.concurrencies[0]
    length = profile.num_steps + SCORE_PRICE_STEPS + WARM_UP_STEPS + 8
    with side_by_side(profile, c, profile.prompt_len + length + 64) as engines:
        for mode in sorted(profile.modes, key=MODES.index):
            say(f"phases of a step, {mode}, {c} running")
            name = "stock" if mode == "native" else "first"
            engine = engines.get(name, profile.mode_config(mode))
            yield profile_steps(engine, mode, profile, c, length + 32)


def stock_ms(profiles: Sequence[StepProfile]) -> float | None:
    """Mean milliseconds of a step of stock vLLM, if it is among them."""
    return next((float(p.total_ms.mean()) for p in profiles if p.mode == "native"), None)


def profile_steps(
    engine: StepEngine, mode: str, profile: ProfileSettings, c: int, output_len: int
) -> StepProfile:
    """Time the phases of `num_steps` decode steps."""
    seed = profile.config.seed
    names = start_requests(engine, c, profile.prompt_len, output_len, tag=f"step-{mode}", seed=seed)
    for _ in range(WARM_UP_STEPS):
        engine.step()
    found = StepProfile(mode, c)
    timer = PhaseTimer(keep_spans=profile.trace is not None)
    watch_engine(timer, engine)
    before = engine.counters.relocation_events
    plans = _watch_plans(engine)
    with timer:
        for _ in range(profile.num_steps):
            timer.run_step(engine.step)
            found.plans += [_pickled(plan) for plan in plans]
            plans.clear()
    del engine.scheduler.schedule
    found.steps, found.spans = timer.steps, timer.spans
    found.num_events = engine.counters.relocation_events - before
    if engine.hooks is not None:
        found.score_share = price_of_scores(engine, SCORE_PRICE_STEPS)
    stop_requests(engine, names)
    return found


def _watch_plans(engine: StepEngine) -> list:
    """A list that gets every step's StepPlan; ends with `del engine.scheduler.schedule`."""
    plans: list = []
    schedule = engine.scheduler.schedule

    def watched(*args, **kwargs):
        output = schedule(*args, **kwargs)
        plan = getattr(output, "vtoken", None)
        if plan is not None:
            plans.append(plan)
        return output

    engine.scheduler.schedule = watched
    return plans


def _pickled(plan) -> tuple[int, float]:
    """Bytes of a plan on its way to another process, and seconds for both ends of the way."""
    start = time.perf_counter()
    data = pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)
    pickle.loads(data)  # our own object, made a line above
    return len(data), time.perf_counter() - start


def price_of_scores(engine: StepEngine, num_steps: int) -> float | None:
    """Share of our attention kernels' time that their score sums take; None: no scores summed.

    For some steps every layer's attention runs twice, with and without scores, either one first in
    every other layer: what runs second finds K and V in the processor's cache. Medians: single
    calls may be interrupted by other programs.
    """
    kernels = engine.runner.vtoken_attention.kernels
    run, calls = kernels.attention, 0
    spent: tuple[list[float], list[float]] = ([], [])  # without sums, with

    def both(*args, step_scores=None, **kwargs):
        nonlocal calls
        if step_scores is None:
            return run(*args, step_scores=None, **kwargs)
        calls += 1
        for scored in (True, False) if calls % 2 else (False, True):
            start = time.perf_counter()
            run(*args, step_scores=step_scores if scored else None, **kwargs)
            spent[scored].append(time.perf_counter() - start)

    kernels.attention = both
    try:
        for _ in range(num_steps):
            engine.step()
    finally:
        del kernels.attention
    if not calls:
        return None
    plain_s, scored_s = (float(np.median(s)) for s in spent)
    return max(0.0, 1 - plain_s / scored_s)

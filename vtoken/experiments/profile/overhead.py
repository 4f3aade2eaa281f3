"""What the hooks cost while nothing is evicted, what an event costs, and reclaim against naive.

Pairs of engines hold the same requests at the same lengths and step in turn, so a pair of
neighbouring steps differs in the mode alone, and other work on the machine hits both alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from vtoken.engine import StepEngine
from vtoken.experiments.profile.boundaries import (
    APPLY,
    FINALISE,
    HOOKS,
    LAYOUTS,
    MOVES,
    OURS,
    PLAN,
    watch_engine,
)
from vtoken.experiments.profile.profile_options import ProfileSettings
from vtoken.experiments.profile.rows import Row, Say, make_row
from vtoken.experiments.profile.running import (
    Engines,
    side_by_side,
    start_requests,
    stop_requests,
)
from vtoken.experiments.profile.timer import PhaseTimer
from vtoken.experiments.report.statistics import median_interval

WARM_UP_STEPS = 4
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def num_event_steps(profile: ProfileSettings) -> int:
    """Decode steps within which `num_events` happen: an eviction per interval and request.

    A ratio lets a budget grow with its request, so that the interval is longer by 1 / ratio.
    """
    ratio = profile.config.effective_ratio
    interval = profile.config.interval_tokens(profile.block_size)
    grown = interval if ratio is None else interval / max(ratio, 0.05)
    rounds = -(-profile.num_events // profile.concurrencies[0]) + 1
    return int(rounds * grown) + profile.num_steps


def run_overhead(profile: ProfileSettings, say: Say) -> Iterator[Row]:
    """Measure the suite; rows come as they are done.

    Raises:
        ConfigError: the requests do not fit at once, or the model cannot be evicted from.
    """
    steps = WARM_UP_STEPS + max(2 * profile.num_steps, num_event_steps(profile))
    longest = profile.prompt_len + steps + 64
    with side_by_side(profile, max(profile.concurrencies), longest) as engines:
        for c in profile.concurrencies:
            say(f"indirection against native, {c} running")
            yield from _pair_rows(engines, profile, c, "native", "indirection", steps)
        for c in profile.concurrencies:
            say(f"reclaim against naive, {c} running")
            yield from _pair_rows(engines, profile, c, "naive", "vtoken", steps)
        say(f"time per relocation event, {profile.concurrencies[0]} running")
        yield from event_rows(engines, profile, steps)


# ---- pairs ---------------------------------------------------------------------------------


def _engine(engines: Engines, profile: ProfileSettings, mode: str) -> StepEngine:
    # Only stock vLLM needs an engine of its own; the two others take any settings.
    name = {"native": "stock", "naive": "second"}.get(mode, "first")
    return engines.get(name, profile.mode_config(mode))


def _pair_rows(
    engines: Engines, profile: ProfileSettings, c: int, base: str, mode: str, output_len: int
) -> Iterator[Row]:
    pair = {m: _engine(engines, profile, m) for m in (base, mode)}
    with _decoding(pair, profile, c, output_len):
        seconds = paired_steps(pair, profile.num_steps, CLOCKS[profile.clock])
        yield from pair_rows(seconds, base, mode, c)
        if mode == "indirection":
            timer = watch_steps(pair[mode], profile.num_steps)
            shares = [s.share(OURS) for s in timer.steps]
            used_s = [s.sum_s(OURS) for s in timer.steps]
            yield make_row(
                f"indirection/hook_share/c{c}", "frac", samples=shares,
                value=sum(used_s) / sum(s.total_s for s in timer.steps),
            )  # fmt: skip
            yield make_row(f"indirection/hook_time/c{c}", "ms", samples=np.array(used_s) * 1e3)


@contextmanager
def _decoding(pair: dict[str, StepEngine], profile: ProfileSettings, c: int, output_len: int):
    """The engines with the same requests in them, past their prompts."""
    names = {}
    for mode, engine in pair.items():
        names[mode] = start_requests(
            engine, c, profile.prompt_len, output_len, tag=f"{mode}{c}",
            seed=profile.config.seed,
        )  # fmt: skip
    # A chunk of the prompts may end in different steps: bring both to the same length.
    longest = max(_num_computed(e) for e in pair.values())
    for engine in pair.values():
        while _num_computed(engine) < longest:
            engine.step()
    yield
    for mode, engine in pair.items():
        stop_requests(engine, names[mode])


def _num_computed(engine: StepEngine) -> int:
    return min(r.num_computed_tokens for r in engine.scheduler.running)


def paired_steps(
    pair: dict[str, StepEngine], num: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, np.ndarray]:
    """Step two engines in turn, the order changing from pair to pair.

    Returns:
        float64[num], seconds of each engine's steps; entry i of both is one pair.
    """
    names = list(pair)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(WARM_UP_STEPS + num):
        for name in names if i % 2 else reversed(names):
            start = clock()
            pair[name].step()
            seconds[name].append(clock() - start)
    return {name: np.array(s[WARM_UP_STEPS:]) for name, s in seconds.items()}


def pair_rows(seconds: dict[str, np.ndarray], base: str, mode: str, c: int) -> Iterator[Row]:
    """Rows of a pair of engines that made a token for each of `c` requests in every step.

    `.../slowdown` is the median over pairs of one step's time over the other's, less one; a
    negative one is a gain. Throughputs are over all measured steps.
    """
    ratio, low, high = median_interval(seconds[mode] / seconds[base])
    stock = base == "native"
    yield make_row(
        f"{mode}/slowdown_from_{base}/c{c}", "frac", value=ratio - 1, ci95_low=low - 1,
        ci95_high=high - 1, num_samples=len(seconds[mode]),
        ratio_to_stock=ratio if stock else None,
    )  # fmt: skip
    for name in (base, mode):
        against = seconds[name].mean() / seconds[base].mean() if stock else None
        ms = seconds[name] * 1e3
        yield make_row(f"{name}/step/c{c}", "ms", samples=ms, ratio_to_stock=against)
        throughput = c / seconds[name].mean()
        yield make_row(f"{name}/output_throughput/c{c}", "tok/s", value=throughput)


def watch_steps(engine: StepEngine, num_steps: int) -> PhaseTimer:
    """Run decode steps with every phase timed."""
    timer = PhaseTimer()
    watch_engine(timer, engine)
    with timer:
        for _ in range(num_steps):
            timer.run_step(engine.step)
    return timer


# ---- relocation events ---------------------------------------------------------------------


def event_rows(engines: Engines, profile: ProfileSettings, output_len: int) -> list[Row]:
    """Planner, launch and rewrite time per relocation event, in steps that have one.

    planner: naming victims, choosing blocks, placing tokens; launch: copying K and V (on a CPU
    the launch is the copy); rewrite: block-table rows, lengths, masks and the kernel's plan in the
    worker.
    """
    c, engine = profile.concurrencies[0], _engine(engines, profile, "vtoken")
    samples = measure_events(engine, profile, c, output_len)
    if not samples["events"]:
        return []
    what = {"planner": "us/event", "launch": "us/event", "rewrite": "us/event"}
    rows = [make_row(f"event/{n}/c{c}", unit, samples=samples[n]) for n, unit in what.items()]
    return [
        *rows,
        make_row(f"event/share_of_step/c{c}", "frac", samples=samples["share"]),
        make_row(f"event/moved_tokens/c{c}", "tokens/event", value=samples["moved"]),
        make_row(f"event/count/c{c}", "events", value=samples["events"]),
    ]


def measure_events(engine: StepEngine, profile: ProfileSettings, c: int, output_len: int) -> dict:
    """Per event in each step with events, microseconds by kind of work; and how many there were."""
    names = start_requests(
        engine, c, profile.prompt_len, output_len, tag="events", seed=profile.config.seed
    )
    timer = PhaseTimer()
    watch_engine(timer, engine)
    found: dict = {"planner": [], "launch": [], "rewrite": [], "share": [], "events": 0}
    moved_before = engine.counters.moved_tokens
    with timer:
        for _ in range(output_len - WARM_UP_STEPS - 1):
            before = engine.counters.relocation_events
            timer.run_step(engine.step)
            events = engine.counters.relocation_events - before
            if events:
                step = timer.steps[-1]
                us = 1e6 / events
                found["planner"].append(us * step.sum_s((PLAN, FINALISE, HOOKS)))
                found["launch"].append(us * step.sum_s((MOVES,)))
                found["rewrite"].append(us * step.sum_s((APPLY, LAYOUTS)))
                found["share"].append(step.share(OURS))
                found["events"] += events
            if found["events"] >= profile.num_events:
                break
    moved = engine.counters.moved_tokens - moved_before
    found["moved"] = moved / max(1, found["events"])
    stop_requests(engine, names)
    return found

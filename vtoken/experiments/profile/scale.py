"""What the scheduler's side costs as requests and contexts grow; dry engines, no model.

A step of a dry engine is vLLM's scheduling and ours, nothing else. Engines take turns in short
stretches, and each one's fastest stretch counts, in processor time: other work on the machine
only ever adds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.engine.dry import DryEngine, DrySettings
from vtoken.experiments.planning.dry_engines import random_scores
from vtoken.experiments.profile.boundaries import FINALISE, PLAN, SCORES, watch_scheduler
from vtoken.experiments.profile.metadata import LookupCounts, device_rows, host_bytes
from vtoken.experiments.profile.profile_options import ProfileSettings
from vtoken.experiments.profile.rows import Row, Say, fit_slope, make_row
from vtoken.experiments.profile.running import side_by_side, start_requests, stop_requests
from vtoken.experiments.profile.timer import PhaseTimer
from vtoken.units import cdiv

REQUESTS = (1, 4, 16, 64, 256, 1024)
CONTEXTS = tuple(1024 << i for i in range(8))  # 1K .. 128K live tokens
POLICIES = ("streaming-llm", "random", "h2o")
BLOCK_SIZE, BUDGET_TOKENS, PROMPT_TOKENS = 16, 128, 160
STRETCH_STEPS = 16  # as many as the interval: every stretch has one eviction of each request
EVENTS_PER_CONTEXT = 24
ROUNDS, MAX_REQUEST_ROUNDS = (6, 32), 1536  # fewer stretches where a step has many requests
WORK = (PLAN, FINALISE, SCORES)

HOOKED = {
    "indirection": VTokenConfig(mode="indirection"),
    "budget_not_reached": VTokenConfig(policy="random", kv_budget_tokens=1_000_000),
    "evicting": VTokenConfig(policy="random", kv_budget_tokens=BUDGET_TOKENS),
}


def run_scale(
    profile: ProfileSettings,
    say: Say,
    *,
    requests: Sequence[int] = REQUESTS,
    contexts: Sequence[int] = CONTEXTS,
    policies: Sequence[str] = POLICIES,
) -> Iterator[Row]:
    """Measure the suite; a real engine of the profile's model is opened for its metadata."""
    with _quiet_vllm():
        yield from _rows_by_requests(say, requests)
        yield from _rows_by_context(say, contexts, policies)
    say("metadata on the device")
    yield from _device_rows(profile)


@contextmanager
def _quiet_vllm():
    """Keep what vLLM says about made-up models to errors."""
    logger = logging.getLogger("vllm")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


# ---- running requests ----------------------------------------------------------------------


def open_decoding(
    config: VTokenConfig | None, num_requests: int, num_tokens: int, num_steps: int
) -> DryEngine:
    """A dry engine whose requests all decode.

    Args:
        num_tokens: of each prompt; they are up to a block longer, so that evictions spread.
        num_steps: that the requests will have.
    """
    length = num_tokens + num_steps + 2 * BLOCK_SIZE + 64
    settings = DrySettings(
        num_kv_blocks=num_requests * (cdiv(length, BLOCK_SIZE) + 2),
        block_size=BLOCK_SIZE,
        max_model_len=length,
        max_num_seqs=num_requests,
        max_num_batched_tokens=num_requests * min(length, 8192),
    )
    engine = DryEngine(settings, config, score_source=random_scores)
    for i in range(num_requests):
        prompt = [5 + i % 1000] * (num_tokens + i % BLOCK_SIZE)
        engine.add(f"r{i}", prompt, num_steps + 48)
    while not all_decode(engine, num_requests):
        engine.step()
    return engine


def all_decode(engine: DryEngine, num_requests: int) -> bool:
    running = engine.scheduler.running
    return len(running) == num_requests and all(r.num_output_tokens for r in running)


def cpu_s(engine: DryEngine, num_steps: int) -> float:
    """Processor seconds per step."""
    start = time.thread_time()
    for _ in range(num_steps):
        engine.step()
    return (time.thread_time() - start) / num_steps


def step_seconds(num_requests: int) -> tuple[dict[str, float], LookupCounts]:
    """Seconds per step, by configuration, fastest stretch; and what the evicting one changed."""
    fewest, most = ROUNDS
    rounds = min(most, max(fewest, MAX_REQUEST_ROUNDS // num_requests))
    num_steps = STRETCH_STEPS * (rounds + 2)
    configs = {"native": None} | HOOKED
    engines = {
        n: open_decoding(c, num_requests, PROMPT_TOKENS, num_steps) for n, c in configs.items()
    }
    for engine in engines.values():
        cpu_s(engine, STRETCH_STEPS)
    best = dict.fromkeys(engines, float("inf"))
    counts = LookupCounts(engines["evicting"])
    for _ in range(rounds):
        for name, engine in engines.items():
            best[name] = min(best[name], cpu_s(engine, STRETCH_STEPS))
    counts.stop()
    return best, counts


def _rows_by_requests(say: Say, requests: Sequence[int]) -> Iterator[Row]:
    above: dict[str, list[float]] = {name: [] for name in HOOKED}
    for n in requests:
        say(f"cost per step, {n} running requests")
        seconds, counts = step_seconds(n)
        stock = seconds["native"]
        yield make_row(f"native/step/r{n}", "us", value=1e6 * stock, num_requests=n)
        for name in HOOKED:
            us = 1e6 * (seconds[name] - stock)
            above[name].append(us)
            yield make_row(
                f"{name}/above_native/r{n}", "us", value=us, ratio_to_stock=seconds[name] / stock,
                num_requests=n, series=name,
            )  # fmt: skip
        yield from counts.rows(f"r{n}")
    if len(requests) > 1:
        for name, values in above.items():
            slope, fixed = fit_slope(requests, values)
            yield make_row(f"{name}/slope", "us/request", value=slope, fixed_us=fixed)


# ---- context -------------------------------------------------------------------------------


def _rows_by_context(say: Say, contexts: Sequence[int], policies: Sequence[str]) -> Iterator[Row]:
    for policy in policies:
        medians = []
        for tokens in contexts:
            say(f"cost of an eviction, {policy}, {tokens:,} live tokens")
            us, engine = event_us(policy, tokens)
            medians.append(float(np.median(us)))
            yield make_row(
                f"event/{policy}/ctx{tokens}", "us/event", samples=us, value=medians[-1],
                context_tokens=tokens, series=policy,
            )  # fmt: skip
            if policy == policies[0]:
                yield from _metadata_rows(engine, tokens)
            engine.close()
        if len(contexts) > 1:
            slope, fixed = fit_slope([t / 1024 for t in contexts], medians)
            yield make_row(f"event/{policy}/slope", "us/1K tokens", value=slope, fixed_us=fixed)


def event_us(policy: str, num_tokens: int) -> tuple[list[float], DryEngine]:
    """Microseconds of planning, finalising and taking in scores, per eviction of a block's worth.

    Work on an eviction is spread over the steps before it (asking for scores), so an eviction's
    is all of an interval's less what the same number of quiet steps takes.
    """
    config = VTokenConfig(policy=policy, kv_budget_tokens=num_tokens)
    num_steps = (EVENTS_PER_CONTEXT + 1) * BLOCK_SIZE
    engine = open_decoding(config, 1, num_tokens, num_steps)
    timer = PhaseTimer(clock_ns=time.thread_time_ns)
    watch_scheduler(timer, engine)
    found, spent, quiet_s = [], [], 0.0
    with timer:
        for _ in range(num_steps):
            before = engine.counters.eviction_events
            timer.run_step(engine.step)
            spent.append(timer.steps[-1].sum_s(WORK))
            if engine.counters.eviction_events > before:
                quiet_s = float(np.median(spent)) if len(spent) > 3 else quiet_s
                found.append(1e6 * (sum(spent) - quiet_s * (len(spent) - 1)))
                spent.clear()
    assert len(found) > 1, (policy, num_tokens)
    return found[1:], engine  # the first interval began in the prompt


def _metadata_rows(engine: DryEngine, tokens: int) -> Iterator[Row]:
    """Bytes of the token tables per token of the request's length, dead ones included."""
    length = sum(r.num_computed_tokens for r in engine.scheduler.running)
    yield make_row(
        f"metadata/host/ctx{tokens}", "bytes/token", value=host_bytes(engine.hooks) / length,
        context_tokens=tokens,
    )  # fmt: skip


def _device_rows(profile: ProfileSettings) -> list[Row]:
    """Metadata of a real engine in which requests have holes and scores."""
    config = VTokenConfig(policy="h2o", kv_budget_tokens=64, fragmentation_threshold=0.9)
    num_requests, num_steps = 2, 8
    with side_by_side(profile, num_requests, max(profile.prompt_len, 128) + 128) as engines:
        engine = engines.get("first", config)
        names = start_requests(
            engine, num_requests, max(profile.prompt_len, 128), num_steps + 8, tag="metadata"
        )
        for _ in range(num_steps):
            engine.step()
        rows = list(device_rows(engine))
        stop_requests(engine, names)
    return rows

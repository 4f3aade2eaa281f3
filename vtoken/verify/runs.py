"""Engines with the checks on: run to their end, or to the first violation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from vtoken.checks.base import Tally
from vtoken.checks.checker import Checker
from vtoken.config import VTokenConfig
from vtoken.engine import RunResult, StepEngine, open_engine, run_requests
from vtoken.engine.settings import EngineSettings
from vtoken.errors import InvariantViolation, UnsupportedError
from vtoken.recording.trace import TraceEntry


@dataclass
class Outcome:
    """Attributes:
    run: None where a violation stopped it.
    violation: what stopped it.
    tally: of both sides; empty where checks were off.
    trace: what each request attended to, where the config asked for it.
    """

    run: RunResult | None
    violation: InvariantViolation | None
    tally: Tally
    trace: list[TraceEntry]


def checkers(engine: StepEngine) -> list[Checker]:
    """Both sides' checkers of an in-process engine; a dry one has no worker, checks may be off."""
    runner = getattr(engine, "runner", None)
    found = [getattr(engine.hooks, "checker", None), getattr(runner, "vtoken_checker", None)]
    return [c for c in found if c is not None]


def tallies(engine: StepEngine) -> Tally:
    """The sum of both sides' tallies of an in-process engine."""
    total = Tally()
    for checker in checkers(engine):
        total.add(checker.tally)
    return total


def open_checked_engine(settings: EngineSettings, config: VTokenConfig) -> StepEngine:
    """Open a real engine on which both halves of the checks can run.

    Raises:
        UnsupportedError: the worker keeps K and V where its half cannot read them.
    """
    engine = open_engine(settings, config)
    if config.hash_kv_every and len(checkers(engine)) < 2:
        device = engine.vllm_config.device_config.device_type
        engine.close()
        raise UnsupportedError(
            "--hash-kv", device, "a device whose KV the worker's half of the checks can read (cpu)"
        )
    return engine


def run_checked(
    engine: StepEngine,
    config: VTokenConfig,
    requests: Sequence,
    *,
    logprobs: bool = False,
    off: Iterable[str] = (),
    before_run: Callable[[StepEngine], None] = lambda engine: None,
) -> Outcome:
    """Run requests under other settings, from an empty prefix cache; no report is written.

    Args:
        config: `hash_kv_every` says whether, and how often, to check.
        off: checks to leave out.
        before_run: called once the engine has the settings.
    """
    engine.reconfigure(config)
    engine.reset_prefix_cache()
    for checker in checkers(engine):
        checker.report_dir, checker.tally.off = None, frozenset(off)
    before_run(engine)
    run = violation = None
    try:
        run = run_requests(engine, requests, logprobs=logprobs)
        wrong = engine.check_idle()
        if wrong:
            raise InvariantViolation("conservation", "; ".join(wrong[:4]))
    except InvariantViolation as error:
        violation = without_frames(error)
    return Outcome(run, violation, tallies(engine), list(engine.trace))


def without_frames(error: InvariantViolation) -> InvariantViolation:
    """Drop an exception's traceback: its frames hold the engine.

    vLLM tears down process-wide state when an engine is collected. An engine kept alive by a
    traceback would take that state from the next one.
    """
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def recover(engine: StepEngine, req_ids: Iterable[str]) -> bool:
    """Abort what a violation left behind.

    Returns:
        Whether the engine can be used again: nothing is held, nothing is left.
    """
    try:
        engine.abort(list(req_ids))
        for _ in range(8):
            if not engine.has_unfinished():
                break
            engine.step()
        if engine.has_unfinished() or engine.check_idle():
            return False
        return all(b.ref_cnt == 0 for b in engine.block_pool.blocks if not b.is_null)
    except Exception:  # noqa: BLE001 - whatever a fault broke: a new engine is opened
        return False


class EngineHolder:
    """One engine at a time, opened when it is needed and replaced when a fault broke it."""

    def __init__(self, settings: EngineSettings, config: VTokenConfig) -> None:
        self.settings, self.config = settings, config
        self._engine: StepEngine | None = None

    def get(self) -> StepEngine:
        if self._engine is None:
            self._engine = open_checked_engine(self.settings, self.config)
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

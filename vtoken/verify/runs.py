"""Engines with the checks on: run to their end, or to the first violation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from vtoken.config import VTokenConfig
from vtoken.engine.base import StepEngine
from vtoken.engine.run import RunResult, run_requests
from vtoken.engine.settings import EngineSettings
from vtoken.errors import InvariantViolation
from vtoken.recording.trace import TraceEntry
from vtoken.verify.base import Tally


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


def open_checked_engine(settings: EngineSettings, config: VTokenConfig) -> StepEngine:
    """Open a real engine whose violations are raised and not also written to a file."""
    from vtoken.engine import open_engine

    return open_engine(settings, config)


def run_checked(
    engine: StepEngine,
    config: VTokenConfig,
    requests: Sequence,
    *,
    max_concurrency: int | None = None,
    logprobs: bool = False,
    on_step: Callable[[int, int], None] | None = None,
    off: Iterable[str] = (),
    before_run: Callable[[StepEngine], None] | None = None,
) -> Outcome:
    """Run requests under other settings, from an empty prefix cache.

    Args:
        config: `hash_kv_every` says whether, and how often, to check.
        off: checks to leave out.
        before_run: called once the engine has the settings.
    """
    from vtoken.vllm_plugin.checks import checkers, tallies

    engine.reconfigure(config)
    engine.reset_prefix_cache()
    for checker in checkers(engine):
        checker.report_dir, checker.tally.off = None, frozenset(off)
    if before_run is not None:
        before_run(engine)
    run = violation = None
    try:
        run = run_requests(
            engine, requests, max_concurrency=max_concurrency, logprobs=logprobs, on_step=on_step
        )
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

"""Engines that run a vLLM scheduler one step at a time: real ones with a model, dry ones without.

    with open_engine(EngineSettings(model="smollm2-135m", num_kv_blocks=208), config) as engine:
        run = run_requests(engine, requests)

Both kinds drive vLLM's own scheduler and block pool; `run_requests` and `Observer` do not know
which they have. vLLM and torch are imported when an engine is opened, not before.
"""

from vtoken.engine.base import FinishedRequest, StepEngine
from vtoken.engine.observe import Observer, RunStats
from vtoken.engine.run import RunResult, run_requests
from vtoken.engine.settings import EngineSettings

__all__ = [
    "EngineSettings",
    "FinishedRequest",
    "Observer",
    "RunResult",
    "RunStats",
    "StepEngine",
    "open_dry_engine",
    "open_engine",
    "run_requests",
]


def open_engine(settings: EngineSettings, config=None) -> StepEngine:
    """Load a model in this process; see `vtoken.engine.real.RealEngine`."""
    from vtoken.engine.real import RealEngine

    return RealEngine(settings, config)


def open_dry_engine(settings, config=None) -> StepEngine:
    """Build a scheduler and block pool with no model; see `vtoken.engine.dry.DryEngine`."""
    from vtoken.engine.dry import DryEngine

    return DryEngine(settings, config)

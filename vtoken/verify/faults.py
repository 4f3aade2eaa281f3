"""Faults put into a real engine, each with the check that must see it.

A fault replaces one inner part of the scheduler's or the worker's side (a kernel call, a table
update, a release) by a wrong one, below the places where the checks record what happens. A check
that nothing can trip proves nothing: `run_fault` must end in a violation, reported by the check
that the fault names. Importing this registers all of them, the worker's and the scheduler's.
"""

from __future__ import annotations

from dataclasses import dataclass

from vtoken.verify import scheduler_faults, worker_faults  # noqa: F401 - they register themselves
from vtoken.verify.base import invariant_of
from vtoken.verify.fault_base import FAULTS, Fault

__all__ = ["FAULTS", "Fault", "FaultResult", "run_fault"]


@dataclass(frozen=True)
class FaultResult:
    """Attributes:
    reported_check: the check that stopped the run; None: nothing did.
    report: the violation's report.
    """

    fault: Fault
    reported_check: str | None
    report: dict

    @property
    def detected(self) -> bool:
        """Whether the right check saw it."""
        return self.reported_check == self.fault.check

    def row(self) -> dict[str, object]:
        reported = self.reported_check
        return {
            "name": self.fault.name,
            "detected": self.detected,
            "reported_as": None if reported is None else invariant_of(reported),
            "expected": self.fault.invariant,
            "check": reported,
        }


def run_fault(holder, this: Fault, *, off=(), seed: int = 0) -> FaultResult:
    """Run one fault on the holder's engine; leaves the holder with an engine that works.

    Args:
        holder: vtoken.verify.runs.EngineHolder.
        off: checks to leave out.
    """
    from vtoken.verify.runs import recover, run_checked

    engine = holder.get()
    vocab_size = engine.vllm_config.model_config.get_vocab_size()
    requests = this.requests(vocab_size, seed)
    injected = []

    def put_in(engine) -> None:
        context = this.inject(engine)
        context.__enter__()
        injected.append(context)

    failed: str | None = None
    report: dict = {}
    try:
        outcome = run_checked(engine, this.settings(), requests, off=off, before_run=put_in)
        if outcome.violation is not None:
            report = outcome.violation.report
            failed = report.get("check", outcome.violation.invariant)
    except Exception as error:  # noqa: BLE001 - the engine's own assertions, where a check is off
        failed, report = None, {"message": f"{type(error).__name__}: {error}"}
    finally:
        for context in injected:
            context.__exit__(None, None, None)
    if not recover(engine, [r.request_id for r in requests]):
        holder.close()
    return FaultResult(this, failed, report)

"""What a verification found, and when that is a failure."""

from __future__ import annotations

from dataclasses import dataclass, field

from vtoken.checks.base import Tally, invariant_of
from vtoken.errors import InvariantViolation
from vtoken.verify.fault import Fault
from vtoken.verify.matrix import Cell
from vtoken.verify.reference import ReferenceResult

MAX_LOGPROB_DIFF = 1e-3  # float32; what a wrong entry does is larger by orders of magnitude
NEAR_TIE = 1e-3  # gap between the two best logits below which either token is right


@dataclass
class CellResult:
    """One run of the coverage matrix."""

    cell: Cell
    tally: Tally
    reference: ReferenceResult
    num_moved_tokens: int = 0

    @property
    def name(self) -> str:
        return f"{self.cell.policy} {self.cell.layout}"

    def row(self) -> dict[str, object]:
        kind = self.cell.engine
        return {
            "policy": self.cell.policy,
            "layout": self.cell.layout,
            "block_size": kind.block_size,
            "prefix_caching": kind.prefix_caching,
            "scheduling": kind.scheduling,
            "relocation_events": self.tally.events["I1"],
            "changes": self.tally.changes,
            "moved_tokens": self.num_moved_tokens,
            "reference_tokens": self.reference.tokens,
            "mismatches": len(wrong_tokens(self.reference)),
            "max_abs_logprob_diff": self.reference.max_abs_logprob_diff,
        }


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


@dataclass
class Report:
    """All that a verification found.

    Attributes:
        tally: sum over runs. cells: the coverage. violation: what stopped it.
        cost_ratio: run time with checks over run time without, None where not measured.
        idle: policies whose rounds of many events had none.
        sensitivity: log-probability change when the reference loses one live token.
    """

    tally: Tally = field(default_factory=Tally)
    cells: list[CellResult] = field(default_factory=list)
    violation: InvariantViolation | None = None
    idle: list[str] = field(default_factory=list)
    cost_ratio: float | None = None
    sensitivity: float | None = None
    faults: list[FaultResult] = field(default_factory=list)
    quality: dict[str, object] | None = None

    @property
    def reference(self) -> ReferenceResult:
        total = ReferenceResult()
        for cell in self.cells:
            total.add(cell.reference)
        return total

    @property
    def passed(self) -> bool:
        return not self.failures()

    def failures(self) -> list[str]:
        """What went wrong, in sentences."""
        wrong, reference = [], self.reference
        if self.violation is not None:
            wrong.append(str(self.violation))
        if wrong_tokens(reference):
            wrong.append(f"{len(wrong_tokens(reference))} tokens differ from the reference")
        if reference.max_abs_logprob_diff > MAX_LOGPROB_DIFF:
            diff = reference.max_abs_logprob_diff
            wrong.append(
                f"a log-probability differs by {diff:.1e}, {MAX_LOGPROB_DIFF:.0e} is allowed"
            )
        if self.idle:
            wrong.append(
                f"nothing was relocated, so nothing was shown, for: {', '.join(self.idle)}"
            )
        idle = [c.name for c in self.cells if not c.tally.changes]
        if idle:
            wrong.append(f"nothing was evicted, so nothing was shown, for: {', '.join(idle)}")
        silent = [c.name for c in self.cells if not c.reference.tokens]
        if silent:
            wrong.append(f"no token was compared with the reference for: {', '.join(silent)}")
        if not (self.cells or self.faults or self.quality or self.tally.changes or wrong):
            wrong.append("nothing was checked")
        missed = [f.fault.name for f in self.faults if not f.detected]
        if missed:
            wrong.append(f"faults not seen by their check: {', '.join(missed)}")
        if self.quality is not None:
            wrong += self.quality["failures"]
        return wrong

    def sections(self) -> dict[str, object]:
        """The result's sections, by the contract's names; only what was run."""
        out: dict[str, object] = {"passed": self.passed, "invariants": self.tally.rows()}
        if self.cells:
            reference = self.reference
            out["reference"] = {
                "tokens": reference.tokens,
                "mismatches": len(wrong_tokens(reference)),
                "max_abs_logprob_diff": reference.max_abs_logprob_diff,
                "near_ties": len(reference.mismatches) - len(wrong_tokens(reference)),
                "sensitivity_logprob_diff": self.sensitivity,
            }
            out["coverage"] = [c.row() for c in self.cells]
        if self.faults:
            out["faults"] = [f.row() for f in self.faults]
        if self.quality is not None:
            out["quality"] = self.quality
        out["cost_ratio"] = self.cost_ratio
        out["hashed_tokens"] = self.tally.hashed_tokens
        return out


def wrong_tokens(result: ReferenceResult) -> list[tuple]:
    """Mismatches that no near-tie explains."""
    return [m for m in result.mismatches if m[3] > NEAR_TIE]

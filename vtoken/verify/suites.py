"""What `vtoken verify` runs: coverage with the masked reference, many events, faults, replay."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from vtoken.config import VTokenConfig
from vtoken.engine.cpu import import_engines
from vtoken.engine.settings import EngineSettings
from vtoken.errors import InvariantViolation
from vtoken.testing.reference import ReferenceResult, compare, load_reference
from vtoken.verify.base import Tally
from vtoken.verify.faults import FAULTS, Fault, FaultResult, run_fault
from vtoken.verify.matrix import Cell, EngineKind
from vtoken.verify.runs import EngineHolder, open_checked_engine, run_checked
from vtoken.verify.workloads import sharing_prompts, staggered_prompts

MAX_LOGPROB_DIFF = 1e-3  # float32; what a wrong entry does is larger by orders of magnitude
NEAR_TIE = 1e-3  # gap between the two best logits below which either token is right
NUM_REQUESTS = 2  # sharing prompts come two and two
OUTPUT_LEN = 16

Say = Callable[[str], None]


@dataclass
class CellResult:
    """One run of the coverage matrix."""

    cell: Cell
    tally: Tally
    reference: ReferenceResult
    num_moved_tokens: int = 0

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


@dataclass
class Report:
    """All that a verification found.

    Attributes:
        tally: sum over runs. cells: the coverage. violation: what stopped it.
        cost_ratio: run time with checks over run time without, None where not measured.
        sensitivity: log-probability change when the reference loses one live token.
    """

    tally: Tally = field(default_factory=Tally)
    cells: list[CellResult] = field(default_factory=list)
    violation: InvariantViolation | None = None
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
        idle = [f"{c.cell.policy} {c.cell.layout}" for c in self.cells if not c.tally.changes]
        if idle:
            wrong.append(f"nothing was evicted, so nothing was shown, for: {', '.join(idle)}")
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


# ---- coverage: invariants and reference together -------------------------------------------------


def run_coverage(
    report: Report,
    matrix: dict[EngineKind, list[Cell]],
    base: dict[str, object],
    user: dict[str, object],
    *,
    model_path: str,
    with_reference: bool = True,
    seed: int = 0,
    advance: Callable[[str], None] = lambda text: None,
) -> None:
    """Run every cell with all checks on, and compare every output token with the reference.

    Args:
        base: EngineSettings fields of all engines.
        user: VTokenConfig fields that the user gave.
        model_path: what Hugging Face loads.

    Stops at the first violation, which is then in `report.violation`.
    """
    model = load_reference(model_path) if with_reference else None
    import_engines()
    num_runs = 0
    for kind, cells in matrix.items():
        with open_checked_engine(kind.settings(base), cells[0].config(user)) as engine:
            vocab_size = engine.vllm_config.model_config.get_vocab_size()
            make = sharing_prompts if kind.prefix_caching else staggered_prompts
            for cell in cells:
                config = cell.config(user)
                reach = config.kv_budget_tokens or 64
                prompt_len = max(48, reach + config.interval_tokens(kind.block_size) - 6)
                requests = make(NUM_REQUESTS, prompt_len, OUTPUT_LEN, vocab_size, seed, num_runs)
                num_runs += 1
                outcome = run_checked(engine, config, requests, logprobs=model is not None)
                report.tally.add(outcome.tally)
                if outcome.violation is not None:
                    report.violation = outcome.violation
                    return
                found = CellResult(cell, outcome.tally, ReferenceResult())
                found.num_moved_tokens = outcome.run.counters.moved_tokens
                report.cells.append(found)
                if model is not None:
                    found.reference = _compare_all(model, outcome)
                    if report.sensitivity is None:
                        report.sensitivity = _sensitivity(model, outcome)
                advance(f"{cell.policy} {cell.layout}")


def _compare_all(model, outcome) -> ReferenceResult:
    total = ReferenceResult()
    for req_id, entries in _by_request(outcome.trace).items():
        f = _finished(outcome, req_id)
        total.add(compare(model, f.prompt_token_ids, f.output_token_ids, f.logprobs, entries))
    return total


def _by_request(trace) -> dict[str, list]:
    found: dict[str, list] = {}
    for entry in trace:
        found.setdefault(entry.req_id, []).append(entry)
    return found


def _finished(outcome, req_id: str):
    """vLLM appends random characters to request ids inside the engine."""
    finished = outcome.run.finished
    return finished[req_id] if req_id in finished else finished[req_id.rsplit("-", 1)[0]]


def _sensitivity(model, outcome) -> float:
    """How much one live token that goes missing changes the log-probabilities of one request."""
    req_id, entries = next(iter(_by_request(outcome.trace).items()))
    f = _finished(outcome, req_id)
    gone = int(entries[-1].live_ids[len(entries[-1].live_ids) // 2])
    short = [replace(e, live_ids=e.live_ids[e.live_ids != gone]) for e in entries]
    args = (f.prompt_token_ids, f.output_token_ids, f.logprobs)
    return compare(model, *args, short).max_abs_logprob_diff


# ---- many events --------------------------------------------------------------------------------


def run_events(
    report: Report,
    settings: EngineSettings,
    policies: Sequence[str],
    user: dict[str, object],
    num_events: int,
    *,
    seed: int = 0,
    update: Callable[[int, str], None] = lambda done, text: None,
) -> None:
    """Run rounds of requests, policies in turn, until there were enough relocation events.

    The first policy's round also runs without checks, by turns, for `report.cost_ratio`.
    """
    fields = {"mode": "vtoken", "kv_budget_tokens": 48, "eviction_interval_tokens": 2}
    if "eviction_ratio" in user:
        del fields["kv_budget_tokens"]

    def config(policy: str, every: int) -> VTokenConfig:
        return VTokenConfig.from_mapping(
            {**fields, "hash_kv_every": every, **user, "policy": policy}
        )

    every = int(user.get("hash_kv_every", 1)) or 1
    user = {k: v for k, v in user.items() if k not in ("hash_kv_every", "policy")}
    with open_checked_engine(settings, config(policies[0], every)) as engine:
        vocab_size = engine.vllm_config.model_config.get_vocab_size()

        def make(round_no: int, prompt_len: int = 40, output_len: int = 96):
            return staggered_prompts(8, prompt_len, output_len, vocab_size, seed, round_no)

        report.cost_ratio = _measure_cost(engine, config, policies[0], every, make(0, 48, 32))
        round_no = 1
        while report.tally.events["I1"] < num_events:
            policy = policies[round_no % len(policies)]
            outcome = run_checked(engine, config(policy, every), make(round_no))
            round_no += 1
            report.tally.add(outcome.tally)
            if outcome.violation is not None:
                report.violation = outcome.violation
                return
            update(min(report.tally.events["I1"], num_events), policy)
            assert outcome.tally.events["I1"], f"{policy}: no relocation event in a round"


def _measure_cost(engine, config, policy: str, every: int, requests) -> float:
    """Median over pairs of runs, without and with checks by turns, of the ratio of their times.

    Processor time: on a machine with other work the clock says more about that work.
    """
    run_checked(engine, config(policy, 0), requests[:2])  # warms up
    ratios = []
    for _ in range(3):
        seconds = []
        for n in (0, every):
            start = time.process_time()
            outcome = run_checked(engine, config(policy, n), requests)
            seconds.append(time.process_time() - start)
            if outcome.violation is not None:
                raise outcome.violation
        ratios.append(seconds[1] / seconds[0])
    return median(ratios)


# ---- faults -------------------------------------------------------------------------------------


def run_faults(
    report: Report,
    settings: EngineSettings,
    *,
    faults: Sequence[Fault] = FAULTS,
    off: Sequence[str] = (),
    advance: Callable[[str], None] = lambda text: None,
) -> None:
    """Put each fault into a real engine; every one must be reported by its check."""
    with EngineHolder(settings, VTokenConfig(policy="h2o", hash_kv_every=1)) as holder:
        for this in faults:
            report.faults.append(run_fault(holder, this, off=off))
            advance(this.name)


FAULT_SETTINGS = {"num_kv_blocks": 200, "max_model_len": 512, "block_size": 16, "dtype": "float32"}

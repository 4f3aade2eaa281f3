"""What `vtoken verify` runs: coverage with the masked reference, many events, faults."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median

from vtoken.config import VTokenConfig
from vtoken.engine.cpu import import_engines
from vtoken.engine.settings import EngineSettings
from vtoken.verify.catalogue import LIVE_FAULTS
from vtoken.verify.fault import Fault
from vtoken.verify.findings import CellResult, FaultResult, Report
from vtoken.verify.matrix import Cell, EngineKind
from vtoken.verify.reference import ReferenceResult, compare, load_reference
from vtoken.verify.runs import EngineHolder, open_checked_engine, recover, run_checked
from vtoken.verify.workloads import sharing_prompts, staggered_prompts

NUM_REQUESTS = 2  # sharing prompts come two and two
OUTPUT_LEN = 16
FAULT_SETTINGS = {"num_kv_blocks": 200, "max_model_len": 512, "block_size": 16, "dtype": "float32"}


# ---- coverage: invariants and reference together -------------------------------------------------


def run_coverage(
    report: Report,
    matrix: dict[EngineKind, list[Cell]],
    base: dict[str, object],
    user: dict[str, object],
    *,
    model_path: str,
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
    model = load_reference(model_path)
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
                outcome = run_checked(engine, config, requests, logprobs=True)
                report.tally.add(outcome.tally)
                if outcome.violation is not None:
                    report.violation = outcome.violation
                    return
                moved = outcome.run.counters.moved_tokens
                compared = _compare_all(model, outcome)
                report.cells.append(CellResult(cell, outcome.tally, compared, moved))
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

    A policy whose round had none ends the suite: its settings never let it relocate.
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
            if not outcome.tally.events["I1"]:
                report.idle.append(policy)
                return
            update(min(report.tally.events["I1"], num_events), policy)


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
    faults: Sequence[Fault] = LIVE_FAULTS,
    advance: Callable[[str], None] = lambda text: None,
) -> None:
    """Put each fault into a real engine; every one must be reported by its check."""
    with EngineHolder(settings, VTokenConfig(policy="h2o", hash_kv_every=1)) as holder:
        for this in faults:
            report.faults.append(run_fault(holder, this))
            advance(this.name)


def run_fault(holder: EngineHolder, this: Fault, *, off: Sequence[str] = ()) -> FaultResult:
    """Run one fault on the holder's engine; leaves the holder with an engine that works.

    Args:
        off: checks to leave out.
    """
    engine = holder.get()
    requests = this.requests(engine.vllm_config.model_config.get_vocab_size())
    failed: str | None = None
    report: dict = {}
    try:
        with ExitStack() as injected:
            outcome = run_checked(
                engine, this.settings(), requests, off=off,
                before_run=lambda engine: injected.enter_context(this.inject(engine)),
            )  # fmt: skip
        if outcome.violation is not None:
            report = outcome.violation.report
            failed = report.get("check", outcome.violation.invariant)
    except Exception as error:  # noqa: BLE001 - the engine's own assertions, where a check is off
        report = {"message": f"{type(error).__name__}: {error}"}
    if not recover(engine, [r.request_id for r in requests]):
        holder.close()
    return FaultResult(this, failed, report)

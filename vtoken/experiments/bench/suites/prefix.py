"""Prefix suite: requests that share a prefix, with prefix caching on, by sharing degree.

Paper: section 5.7, Table 1: degrees 1, 2, 4, 8; retained blocks against naive with the same
caching. `vtoken` runs twice: `protect` leaves shared blocks alone, as in the paper, `copy` copies
survivors out of them where that releases more than it takes.

Both modes decide for themselves here: what may be evicted depends on which blocks are shared at
that moment, and that on the mode.
"""

from __future__ import annotations

from functools import lru_cache

from vtoken.experiments.bench.bench_options import Case
from vtoken.experiments.bench.context import Context, SuiteResult
from vtoken.experiments.bench.named_workloads import Workload
from vtoken.experiments.bench.pairing import Comparison
from vtoken.experiments.bench.rows import add_ratios, make_row
from vtoken.workloads import shared_prefix_prompts

PAPER = "section 5.7, Table 1"
DEFAULT_POLICIES = ("h2o",)
NUM_REQUESTS = 8
PREFIX_TOKENS, SUFFIX_TOKENS, OUTPUT_TOKENS = 96, 96, 48


def run_prefix(context: Context, result: SuiteResult) -> None:
    """Run the suite, into the result."""
    settings = context.settings
    num = settings.num_requests or NUM_REQUESTS
    workloads = {_workload(context, degree): degree for degree in settings.degrees}
    longest = max(w.max_tokens for w in workloads)
    context.check_length(longest)
    at_once = max(settings.points or (num,))
    with context.session(max_tokens=longest, max_num_seqs=at_once, caching=True) as session:
        comparisons = [
            Comparison(
                suite="prefix", workload=workload, pool=context.ample_pool(at_once, longest),
                cases=_cases(context, policy), num_requests=num,
                max_concurrency=None if at_once >= num else at_once, repeats=settings.repeats,
            )
            for policy in context.policies(DEFAULT_POLICIES)
            for workload in workloads
        ]  # fmt: skip
        for comparison, runs in context.runner(session).run_all(comparisons):
            degree = workloads[comparison.workload]
            result.rows += _rows(context, degree, comparison, runs)


def _workload(context: Context, degree: int) -> Workload:
    settings = context.settings
    prefix = settings.prefix_len or PREFIX_TOKENS
    suffix = settings.suffix_len or SUFFIX_TOKENS
    output = settings.output_len or OUTPUT_TOKENS
    tokenizer = None if settings.dry_run else context.tokenizer()

    def make(num: int, repeat: int):
        return shared_prefix_prompts(
            num, output, degree=degree, prefix_len=prefix, suffix_len=suffix, tokenizer=tokenizer,
            vocab_size=context.shape.vocab_size, seed=settings.engine.seed, repeat=repeat,
        )  # fmt: skip

    make(1, 0)  # lengths that no prompt can have are refused now
    return Workload(
        name=f"shared-prefix-{degree}", make=lru_cache(64)(make),
        max_tokens=prefix + suffix + output,
    )  # fmt: skip


def _cases(context: Context, policy: str) -> list[Case]:
    cases = []
    for case in context.cases(context.settings.modes, [policy]):
        kinds = ("protect", "copy") if case.mode == "vtoken" else ("protect",)
        for kind in kinds if case.policy else ("",):
            changes = {"shared_prefix": kind} if kind else {}
            cases.append(Case(mode=case.mode, policy=case.policy, changes=changes))
    return cases


def _rows(context: Context, degree: int, comparison: Comparison, runs) -> list[dict[str, object]]:
    rows = []
    by_mode = {case.mode: runs[case.key] for case in reversed(comparison.cases)}
    for case in comparison.cases:
        records = runs[case.key]
        if not records:
            continue
        row = make_row(
            case, comparison.workload.name, records, sharing_degree=degree,
            block_size=comparison.pool.block_size, concurrency=comparison.num_requests,
            **case.changes,
        )  # fmt: skip
        if context.settings.dry_run:
            row["modelled"] = True
        if case.mode == "vtoken":
            add_ratios(row, records, by_mode.get("naive"), "naive")
        if case.mode != "native":
            add_ratios(row, records, by_mode.get("native"), "native")
        rows.append(row)
    return rows


def sentences(rows: list[dict[str, object]]) -> list[str]:
    """Blocks saved against naive, per way of treating shared blocks."""
    lines = []
    for kind in ("protect", "copy"):
        group = [
            r for r in rows
            if r.get("shared_prefix") == kind and r.get("retained_over_naive") is not None
        ]  # fmt: skip
        if not group:
            continue
        fewer = ", ".join(
            f"{100 * (1 - r['retained_over_naive']):.1f} % at degree {r['sharing_degree']}"
            for r in group
        )
        paper = " (paper, degrees 2 to 8: 28.6 % to 42.2 %)" if kind == "protect" else ""
        lines.append(f"{kind}: fewer retained blocks than naive: {fewer}{paper}.")
    return lines

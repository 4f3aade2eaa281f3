"""`vtoken verify`: invariants online, masked-reference equality, faults, paired output quality."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtoken.errors import InvariantViolation
from vtoken_cli.command import command
from vtoken_cli.delivery import deliver
from vtoken_cli.given import Run
from vtoken_cli.options import ENGINE, VTOKEN, Opt
from vtoken_cli.parsers import choice, count

if TYPE_CHECKING:
    from vtoken.verify.findings import Report

SUITES = ("invariants", "reference", "quality", "faults", "all")
DEFAULT_EVENTS = 2000
DEFAULT_PAIRS = 24


@command(
    *VTOKEN,
    *ENGINE,
    Opt("suite", parse=choice(*SUITES), metavar="|".join(SUITES),
        default="invariants and reference", help="What to run."),
    Opt("events", parse=count, metavar="N", default=f"{DEFAULT_EVENTS} with --hash-kv",
        help="Relocation events to check, at least."),
    Opt("pairs", parse=count, metavar="N", default=str(DEFAULT_PAIRS),
        help="Matched prompts of the quality suite."),
    Opt("output_len", parse=count, metavar="TOKENS", default="128",
        help="Output length of the quality suite."),
    Opt("full", switch=True, help="Every combination of policy, layout and engine, not pairs."),
    Opt("replay", metavar="FILE", help="Run again what a violation's report holds."),
    many=("policy",),
    starts_engine=True,
)  # fmt: skip
def verify(run: Run) -> None:
    """Check, on your model and machine, that relocation changes nothing.

    Without options: invariants and masked-reference equality over all policies, layouts, two block
    sizes, prefix caching on and off, and both schedulers. Exit code 1: something is violated.
    """
    from vtoken.experiments.report.environment import collect_environment
    from vtoken.experiments.report.results import utc_now
    from vtoken.models import resolve_model
    from vtoken.verify.findings import Report
    from vtoken.verify.matrix import layouts_of

    started_at, start = utc_now(), time.monotonic()
    if run.own.get("replay"):
        _replay(run)
        return
    layouts_of(run.vtoken.get("mode"))  # refuses a mode without evictions before anything starts
    model = run.engine.pop("model", "smollm2-135m")
    model_path = resolve_model(model, run.out.note)
    plan = _what_to_run(run)
    report = Report()
    try:
        _run_suites(run, plan, report, model, model_path)
    finally:
        seconds = time.monotonic() - start
    result_config = {"model": model, "suites": sorted(plan), **run.engine, **run.vtoken, **run.own}
    result_config["policies"] = _policies(run)
    _finish(run, report, result_config, collect_environment(), started_at, seconds)


def _what_to_run(run: Run) -> dict[str, Any]:
    """Suite -> its size."""
    suite, events = run.own.get("suite"), run.own.get("events")
    if suite is None and (events or run.vtoken.get("hash_kv_every")):
        return {"invariants": events or DEFAULT_EVENTS}
    plan: dict[str, Any] = {}
    if suite in (None, "reference", "all"):
        plan["reference"] = True
    if suite in ("invariants", "all") or events:
        plan["invariants"] = events or DEFAULT_EVENTS
    if suite in ("faults", "all"):
        plan["faults"] = True
    if suite in ("quality", "all"):
        plan["quality"] = run.own.get("pairs") or DEFAULT_PAIRS
    return plan


def _policies(run: Run) -> list[str]:
    from vtoken.policies.registry import policy_names

    return run.many.get("policy") or list(policy_names())


def _run_suites(run: Run, plan: dict, report: Report, model: str, model_path: str) -> None:
    from vtoken.engine.settings import EngineSettings
    from vtoken.verify import suites

    user, seed = dict(run.vtoken), run.vtoken.get("seed", 0)
    base = {"num_kv_blocks": 512, "max_model_len": 1024, "dtype": "float32", **run.engine}
    vllm_args = run.vllm_args()
    base |= {"model": model_path, **({"vllm_args": vllm_args} if vllm_args else {})}
    if "reference" in plan:
        _coverage(run, report, base, user, model_path, seed)
    if "invariants" in plan and report.violation is None:
        num = plan["invariants"]
        settings = EngineSettings(**{"block_size": 16, **base})
        with run.out.progress(num, "relocation events") as bar:
            suites.run_events(
                report, settings, _policies(run), user, num, seed=seed,
                update=lambda done, text: bar.update(done, text),
            )  # fmt: skip
    if "faults" in plan and report.violation is None:
        from vtoken.models import resolve_model

        # Faults belong to our machinery, not to the user's model: the smallest one serves.
        settings = EngineSettings(
            model=resolve_model("tiny-llama", run.out.note), **suites.FAULT_SETTINGS
        )
        with run.out.progress(len(suites.LIVE_FAULTS), "faults") as bar:
            suites.run_faults(report, settings, advance=lambda text: bar.advance(text=text))
    if "quality" in plan and report.violation is None:
        from vtoken.experiments.bench.paired_outputs import run_quality

        with run.out.progress(None, "quality") as bar:
            report.quality = run_quality(
                base, _policies(run) if "policy" in run.many else ["h2o"], user,
                num_pairs=plan["quality"], output_len=run.own.get("output_len") or 128, seed=seed,
                model_path=model_path, advance=lambda text: bar.advance(text=text),
            )  # fmt: skip


def _coverage(run: Run, report: Report, base: dict, user: dict, model_path: str, seed: int) -> None:
    from vtoken.verify.matrix import build_matrix, layouts_of
    from vtoken.verify.suites import run_coverage

    user = {k: v for k, v in user.items() if k != "hash_kv_every"}
    layouts = layouts_of(user.pop("mode", None))
    base = {k: v for k, v in base.items() if k != "block_size"}
    matrix = build_matrix(_policies(run), layouts, full=bool(run.own.get("full")))
    total = sum(len(cells) for cells in matrix.values())
    with run.out.progress(total, "coverage") as bar:
        run_coverage(
            report, matrix, base, user, model_path=model_path, seed=seed,
            advance=lambda text: bar.advance(text=text),
        )  # fmt: skip


def _finish(run, report, config, environment, started_at, seconds) -> None:
    """Show, write, and end with the right exit code."""
    from vtoken.checks.report import save_report
    from vtoken.experiments.report.results import make_result, plain
    from vtoken.verify.show import show_report

    sections = report.sections() | {"duration_s": seconds}
    result = make_result(
        "verify", config, environment=environment, started_at=started_at, **sections
    )
    tables = {n: sections[n] for n in ("invariants", "coverage", "faults") if n in sections}
    deliver(run, plain(result), tables=tables, shown=show_report(report, seconds), files=None)
    if report.violation is not None:
        path = save_report(report.violation.report, run.output_dir or Path("."))
        run.out.warn(f"report: {path}; run it again with: vtoken verify --replay {path}")
        raise report.violation
    if not report.passed:
        raise InvariantViolation("verify", "; ".join(report.failures()))


def _replay(run: Run) -> None:
    from vtoken.verify.replay import load_report, replay

    report = load_report(run.own["replay"])
    violation, tally = replay(report)
    same = violation is not None and violation.report.get("check") == report["check"]
    passed = violation is None and tally.changes > 0
    result = {
        "schema_version": 1, "command": "verify", "replayed": run.own["replay"],
        "reproduced": same, "passed": passed, "invariants": tally.rows(),
        "violation": None if violation is None else violation.report,
    }  # fmt: skip
    run.out.result(result)
    if passed:
        run.out.print("The run went through: the violation did not come back.")
        return
    if violation is None:
        raise InvariantViolation(
            "verify", "the replayed run changed no layout: nothing was checked"
        )
    step = violation.report.get("step")
    was = f"as reported (step {report['step']})" if same else f"reported was {report['check']}"
    run.out.print(f"Violated again at step {step}: {violation.report.get('check')}, {was}.")
    raise violation

"""Where the plugin gets its checkers from (config `hash_kv_every`).

The checks are in vtoken.verify: `scheduler_checks` beside the scheduler, `worker_checks` beside the
runner. They keep books of their own and compare them at every relocation event.
"""

from __future__ import annotations

from vtoken.verify.base import Tally
from vtoken.verify.checker import Checker
from vtoken.verify.scheduler_checks import SchedulerChecker
from vtoken.verify.worker_checks import WorkerChecker


def make_worker_checker(runner, config) -> WorkerChecker | None:
    """A checker for a runner whose KV is set up, if the config asks for one."""
    if not config.hash_kv_every or runner.vtoken_attention is None:
        return None
    return WorkerChecker(runner, runner.vtoken_attention, runner.vllm_config, config)


def tallies(engine) -> Tally:
    """The sum of both sides' tallies of an in-process engine."""
    total = Tally()
    for checker in checkers(engine):
        total.add(checker.tally)
    return total


def checkers(engine) -> list[Checker]:
    """Both sides' checkers of an in-process engine; a dry one has no worker, checks may be off."""
    runner = getattr(engine, "runner", None)
    found = [getattr(engine.hooks, "checker", None), getattr(runner, "vtoken_checker", None)]
    return [c for c in found if c is not None]


__all__ = [
    "Checker", "SchedulerChecker", "WorkerChecker", "checkers", "make_worker_checker", "tallies",
]  # fmt: skip

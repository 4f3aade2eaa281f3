"""Puts the parts of a step together for one scheduler."""

from __future__ import annotations

from collections.abc import Callable

from vtoken.config import VTokenConfig
from vtoken.core.counters import Counters
from vtoken.core.ops import LayoutRules, TableOps
from vtoken.core.table import TokenTable
from vtoken.policies.base import ScoreKind
from vtoken.recording.run_log import RunLog
from vtoken.recording.trace import Trace
from vtoken.scheduling.admission import Admission
from vtoken.scheduling.asks import ScoreAsker
from vtoken.scheduling.budgets import RequestBudgets
from vtoken.scheduling.calendar import Calendar
from vtoken.scheduling.chunks import ChunkLimits
from vtoken.scheduling.clock import StepClock
from vtoken.scheduling.due import DueRequests
from vtoken.scheduling.evict import Evictor
from vtoken.scheduling.naming import VictimNamer
from vtoken.scheduling.ports import BlockManager, Pool, Request, Scheduler
from vtoken.scheduling.prefix import PrefixBlocks
from vtoken.scheduling.reports import ReportBook
from vtoken.scheduling.requests import RunningRequests
from vtoken.scheduling.select import Selector
from vtoken.scheduling.shortage import Shortage
from vtoken.scheduling.step import Step


def build_step(
    config: VTokenConfig,
    *,
    scheduler: Scheduler,
    manager: BlockManager,
    pool: Pool,
    ops: TableOps,
    is_running: Callable[[Request], bool],
    model: str,
    num_engines: int = 1,
) -> Step:
    """Build a step for a scheduler and its block manager.

    Args:
        ops: for one arena of token tables.
        is_running: whether a request that holds blocks is in the running queue.
        model: the model's name or path, for files that are recorded.
        num_engines: data-parallel replicas.

    Raises:
        ConfigError: a setting is wrong, or a file does not fit.
    """
    counters, clock, calendar = Counters(), StepClock(), Calendar()
    rules = LayoutRules(
        moves=config.mode == "vtoken", fragmentation_threshold=config.fragmentation_threshold
    )
    requests = RunningRequests(TokenTable(manager.block_size), ops, manager, rules)
    budgets = RequestBudgets(config, manager.block_size, pool.num_gpu_blocks - 1)
    log = RunLog.open(
        config, budgets.common, model=model, block_size=manager.block_size, num_engines=num_engines
    )
    scored = budgets.common is not None and budgets.common.policy.score_kind is not ScoreKind.NONE
    reports = ReportBook(lambda req_id: requests.by_id[req_id].sync())
    prefix = PrefixBlocks(config, requests, manager, pool, scheduler)
    due = DueRequests(
        requests, calendar, clock, prefix, scheduler, log, is_running,
        by_length=config.evict_when == "always",
    )  # fmt: skip
    namer = VictimNamer(ops, reports, clock, counters, config.seed)
    selector = Selector(config, requests, namer, prefix, due, pool, scheduler, log, counters)
    evictor = Evictor(requests, ops, prefix, reports, due, clock, pool, manager, log, counters)
    admission = Admission(budgets, requests, clock, pool, manager, scheduler)
    shortage = Shortage(
        config, requests, calendar, clock, prefix, reports, selector, evictor, admission, pool,
        manager, scheduler, log, collects_scores=scored,
    )  # fmt: skip
    chunks = ChunkLimits(requests, selector, shortage, clock, pool, manager, scheduler)
    asker = ScoreAsker(requests, calendar, clock, reports, shortage, scheduler)
    return Step(
        config=config, requests=requests, budgets=budgets, calendar=calendar, clock=clock,
        prefix=prefix, reports=reports, due=due, selector=selector, evictor=evictor,
        admission=admission, shortage=shortage, chunks=chunks, asker=asker, manager=manager,
        pool=pool, scheduler=scheduler, counters=counters, log=log,
        trace=Trace() if config.trace else None,
    )  # fmt: skip

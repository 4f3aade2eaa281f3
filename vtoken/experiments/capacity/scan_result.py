"""What a scan found: its points in one pool or two; and the two orders of working through searches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from vtoken.experiments.capacity.point import PointRun, ScanPoint
from vtoken.experiments.capacity.pools import Pool
from vtoken.experiments.capacity.scan_options import ScanSettings
from vtoken.experiments.capacity.time_limit import LeftOut
from vtoken.experiments.planning.search import Search
from vtoken.experiments.planning.series import Series

RunPoint = Callable[[Series, int], "PointRun | LeftOut"]


class ScanHalf:
    """Attributes:
    pool: where the points ran.
    modelled: they ran without a model.
    runs, left_out: in the order they came.
    """

    def __init__(self, pool: Pool, *, modelled: bool) -> None:
        self.pool, self.modelled = pool, modelled
        self.runs: list[PointRun] = []
        self.left_out: list[LeftOut] = []

    def add(self, run: PointRun | LeftOut) -> None:
        if isinstance(run, LeftOut):
            self.left_out.append(run)
        else:
            self.runs.append(run)

    @property
    def frontier(self) -> list[dict[str, object]]:
        """Rows of the contract, with `next_infeasible`: None where nothing above was tried."""
        rows = frontier_rows(run.point for run in self.runs)
        for row in rows:
            above = [
                run.point.concurrency
                for run in self.runs
                if (run.point.mode, run.point.policy) == (row["mode"], row["policy"])
                and not run.point.feasible
            ]
            row["next_infeasible"] = min(above, default=None)
        return rows

    def sections(self) -> dict[str, object]:
        return {
            "pool": self.pool.row(),
            "frontier": self.frontier,
            "points": [run.point for run in self.runs],
            "left_out": self.left_out,
        }


@dataclass
class ScanResult:
    """Attributes:
    main: the half that answers; `modelled`: the other half of a bare scan on a CPU.
    notes: what a reader must know besides the figures.
    interrupted: the user ended the scan; what is there is complete as far as it goes.
    """

    settings: ScanSettings
    started_at: str
    main: ScanHalf | None = None
    modelled: ScanHalf | None = None
    prompts: str = ""
    max_tokens: int = 0
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def is_feasible(self) -> bool:
        """Some point was."""
        return self.main is not None and any(run.point.feasible for run in self.main.runs)

    def sections(self) -> dict[str, object]:
        """The command's own part of a result file."""
        assert self.main is not None
        sections = self.main.sections()
        sections |= {"notes": self.notes, "interrupted": self.interrupted}
        sections["scores"] = self.settings.score_rows()
        if self.modelled is not None:
            sections["modelled"] = self.modelled.sections()
        return sections


def frontier_rows(points: Iterable[ScanPoint]) -> list[dict[str, object]]:
    """The largest feasible concurrency of each (mode, policy), in order of first appearance.

    Only concurrencies below the smallest infeasible one count: a lucky point above a failure is
    not a frontier. 0 where nothing was feasible.
    """
    groups: dict[tuple[str, str], list[ScanPoint]] = {}
    for point in points:
        groups.setdefault((point.mode, point.policy), []).append(point)
    rows = []
    for (mode, policy), group in groups.items():
        first_bad = min((p.concurrency for p in group if not p.feasible), default=math.inf)
        good = [p for p in group if p.feasible and p.concurrency < first_bad]
        row: dict[str, object] = {"mode": mode, "policy": policy}
        row["max_concurrency"] = max((p.concurrency for p in good), default=0)
        if any(p.modelled for p in group):
            row["modelled"] = True
        rows.append(row)
    return rows


def scan_in_order(half: ScanHalf, searches: Mapping[Series, Search], run: RunPoint) -> None:
    """One line after the other: changing the engine is dear."""
    for line, search in searches.items():
        while (concurrency := search.next()) is not None:
            _try(half, line, search, concurrency, run)


def scan_in_turn(half: ScanHalf, searches: Mapping[Series, Search], run: RunPoint) -> None:
    """One point of each line, then the next of each: what matters most comes first."""
    while todo := [(x, s, n) for x, s in searches.items() if (n := s.next()) is not None]:
        for line, search, concurrency in todo:
            _try(half, line, search, concurrency, run)


def _try(half: ScanHalf, line: Series, search: Search, concurrency: int, run: RunPoint) -> None:
    outcome = run(line, concurrency)
    half.add(outcome)
    if isinstance(outcome, LeftOut):
        search.leave_out(concurrency)
    else:
        search.report(concurrency, outcome.point.feasible)

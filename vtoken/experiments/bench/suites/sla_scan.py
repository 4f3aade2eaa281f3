"""One pool of the SLA suite: the limit, the scan over concurrencies, the choice of C_sel.

Every point of the grid is run once, the modes taking turns; points above two that miss the limit
are left out. Then the modes' C_sel are run again in turns until each has its repeats; what holds
at the end is the medians.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from vtoken.experiments.bench.bench_options import BenchSettings, Case
from vtoken.experiments.bench.context import Context
from vtoken.experiments.bench.measure import Record
from vtoken.experiments.bench.named_workloads import Workload
from vtoken.experiments.bench.open_engines import Pool
from vtoken.experiments.bench.pairing import Comparison, PairRunner, output_tokens
from vtoken.experiments.bench.rows import add_ratios, make_row, pair_ratios
from vtoken.experiments.planning.search import BisectSearch, GridSearch, Search

GRID = (4, 6, 8, 12, 16, 24)
MAX_CONCURRENCY = 64
ROUNDS = 2  # requests of a run, for each that is in the engine at a time
P95, THROUGHPUT = "p95_e2el_ms", "output_throughput"


def scanned_points(settings: BenchSettings) -> tuple[int, ...]:
    """Concurrencies of the grid; for `auto` the largest that is ever tried."""
    if settings.concurrency == "auto":
        return (MAX_CONCURRENCY,)
    return settings.points or GRID


def requests_of_run(settings: BenchSettings, concurrency: int) -> int:
    """How many requests a run with so many at once has."""
    return settings.num_requests or ROUNDS * concurrency


def auto_limit(settings: BenchSettings, workload: Workload) -> int:
    """The largest concurrency that `auto` tries: a dataset may have rows for fewer."""
    if workload.max_requests is None or settings.num_requests is not None:
        return MAX_CONCURRENCY
    return min(MAX_CONCURRENCY, workload.max_requests // (ROUNDS * settings.repeats))


@dataclass
class Line:
    """One mode in one pool.

    Attributes:
        records: by concurrency, one per repeat.
        left_out: concurrencies that were not run.
    """

    case: Case
    records: dict[int, list[Record]] = field(default_factory=dict)
    left_out: list[int] = field(default_factory=list)
    misses_in_a_row: int = 0

    def median(self, concurrency: int, key: str) -> float:
        return median(r.values[key] for r in self.records[concurrency])

    def meets(self, concurrency: int, limit_ms: float) -> bool:
        return self.median(concurrency, P95) <= limit_ms

    def selected(self, limit_ms: float) -> int | None:
        """The feasible concurrency of highest throughput; None: nothing meets the limit."""
        good = [c for c in self.records if self.meets(c, limit_ms)]
        return max(good, key=lambda c: self.median(c, THROUGHPUT), default=None)


class PoolScan:
    """All modes in one pool, for one policy and workload."""

    def __init__(
        self,
        context: Context,
        runner: PairRunner,
        workload: Workload,
        policy: str,
        pool: Pool,
        frac: float,
    ) -> None:
        self.context, self.runner, self.workload = context, runner, workload
        self.policy, self.pool, self.frac = policy, pool, frac
        cases = context.cases(context.settings.modes, [policy])
        self.lines = [Line(case) for case in cases]
        self.naive = next(line for line in self.lines if line.case.mode == "naive")
        self.limit_ms = 0.0
        self._planned = 0.0

    # ---- runs --------------------------------------------------------------------------------

    def run(self) -> None:
        """The limit, the scan, the confirmation of each mode's C_sel."""
        settings = self.context.settings
        self._announce()
        self.limit_ms = settings.slo_p95_e2el_ms or self._reference()
        searches = {line.case.key: self._search() for line in self.lines}
        while self._turn(searches):
            pass
        self._confirm()
        self.runner.plan(-self._planned)

    def _reference(self) -> float:
        ref = self.context.settings.ref_concurrency
        self._repeat_until(self.naive, ref, self.context.settings.repeats)
        return self.context.settings.sla_factor * self.naive.median(ref, P95)

    def _search(self) -> Search:
        settings = self.context.settings
        if settings.concurrency == "auto":
            limit = auto_limit(settings, self.workload)
            return BisectSearch(settings.ref_concurrency, limit=limit)
        return GridSearch(scanned_points(settings))

    def _turn(self, searches: dict[str, Search]) -> bool:
        """One point of every mode that has one left; False when none has."""
        is_any = False
        is_grid = self.context.settings.concurrency != "auto"
        for line in self.lines:
            search = searches[line.case.key]
            point = search.next()
            if point is None:
                continue
            is_any = True
            if is_grid and line.misses_in_a_row >= 2:
                line.left_out.append(point)
                search.leave_out(point)
                continue
            self._repeat_until(line, point, 1)
            meets = line.meets(point, self.limit_ms)
            line.misses_in_a_row = 0 if meets else line.misses_in_a_row + 1
            search.report(point, meets)
        return is_any

    def _confirm(self) -> None:
        """Repeat the selected points in turns; a point that falls out gives way to the next."""
        repeats = self.context.settings.repeats
        for number in range(2, repeats + 1):
            for line in self.lines:
                selected = line.selected(self.limit_ms)
                if selected is not None:
                    self._repeat_until(line, selected, number)
        for line in self.lines:  # a point may have fallen out in the last turn
            while (selected := line.selected(self.limit_ms)) is not None:
                if len(line.records[selected]) >= repeats:
                    break
                self._repeat_until(line, selected, repeats)

    def _repeat_until(self, line: Line, concurrency: int, repeats: int) -> None:
        while (done := len(line.records.get(concurrency, ()))) < repeats:
            comparison = self._comparison(line.case, concurrency, done)
            self._planned -= output_tokens(comparison)
            records = self.runner.run(comparison)[line.case.key]
            self.runner.raise_if_interrupted()
            line.records.setdefault(concurrency, []).extend(records)

    def _comparison(self, case: Case, concurrency: int, repeat: int) -> Comparison:
        num = requests_of_run(self.context.settings, concurrency)
        return Comparison(
            suite="sla", workload=self.workload, pool=self.pool, cases=[case],
            num_requests=num, max_concurrency=concurrency, repeats=1, first_repeat=repeat,
        )  # fmt: skip

    def _announce(self) -> None:
        """Plan for the grid and the confirmation; what is not needed is taken back at the end."""
        settings = self.context.settings
        points = GRID if settings.concurrency == "auto" else scanned_points(settings)
        per_point = [output_tokens(self._comparison(self.naive.case, c, 0)) for c in points]
        typical = sorted(per_point)[len(per_point) // 2]
        self._planned = (
            len(self.lines) * (sum(per_point) + (settings.repeats - 1) * typical)
            + (settings.repeats - 1) * typical
        )
        self.runner.plan(self._planned)

    # ---- rows --------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, object]]:
        """A row per mode and concurrency; the line's C_sel and gains stand in all of them."""
        if not self.limit_ms:
            return []  # interrupted before there was a limit
        return [row for line in self.lines for row in self._line_rows(line)]

    def _line_rows(self, line: Line) -> list[dict[str, object]]:
        selected = line.selected(self.limit_ms)
        common = {
            "pool_blocks": self.pool.num_kv_blocks,
            "pool_frac": self.frac,
            "pool_policy": self.policy,
            "block_size": self.pool.block_size,
            "sla_p95_e2el_ms": self.limit_ms,
            "c_sel": selected,
        }
        for name in ("naive", "native"):
            common[f"gain_over_{name}"] = self._gain(line, name)
        if line.left_out:
            common["left_out"] = ",".join(map(str, line.left_out))
        rows = []
        for point in sorted(line.records):
            records = line.records[point]
            row = make_row(
                line.case, self.workload.name, records, concurrency=point,
                feasible=line.meets(point, self.limit_ms), is_selected=point == selected, **common,
            )  # fmt: skip
            for name in ("naive", "native"):
                other = self._line(name)
                # At the same concurrency; the gains compare each mode's own C_sel.
                if other is not None and other is not line:
                    add_ratios(row, records, other.records.get(point), name)
            rows.append(row)
        return rows

    def _gain(self, line: Line, name: str) -> float | None:
        """Median over pairs of the throughput at C_sel over the other mode's at its own, less 1."""
        other = self._line(name)
        if other is None or other is line:
            return None
        points = line.selected(self.limit_ms), other.selected(self.limit_ms)
        if None in points:
            return None
        pairs = pair_ratios(line.records[points[0]], other.records[points[1]], THROUGHPUT)
        return median(pairs) - 1

    def _line(self, mode: str) -> Line | None:
        return next((line for line in self.lines if line.case.mode == mode), None)

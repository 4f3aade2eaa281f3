"""SLA suite: the throughput that each mode sustains within a latency limit, in the same pool.

Paper: section 5.3, Figure 8. The limit is 1.05 x naive's p95 end-to-end latency at 8 requests at
once, in the pool at hand. Two pools: naive's exact demand at 8, and 75 % of it. C_sel is the
concurrency of highest throughput among those that meet the limit, not the largest one.

Every point of the grid is run once, the modes taking turns; points above two that miss the limit
are left out. Then the modes' C_sel are run again in turns until each has its repeats; what holds
at the end is the medians.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from vtoken.errors import ConfigError
from vtoken.experiments.bench.context import Context, SuiteResult
from vtoken.experiments.bench.measure import Record
from vtoken.experiments.bench.pairing import Comparison, PairRunner, output_tokens
from vtoken.experiments.bench.rows import add_ratios, make_row, pair_ratios
from vtoken.experiments.bench.session import Pool
from vtoken.experiments.bench.settings import BenchSettings, Case
from vtoken.experiments.bench.workloads import Workload
from vtoken.experiments.capacity_search import BisectSearch, GridSearch, Search

PAPER = "section 5.3, Figure 8"
DEFAULT_WORKLOADS = ("text:96+64",)
GRID = (4, 6, 8, 12, 16, 24)
MAX_CONCURRENCY = 64
ROUNDS = 2  # requests of a run, for each that is in the engine at a time
P95, THROUGHPUT = "p95_e2el_ms", "output_throughput"
MARKED_PERCENT = 10  # by which steps get longer with more requests, where that is worth a word


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


def largest_run(settings: BenchSettings) -> int:
    """Requests of the largest run that there has to be: of the reference, or of a listed point.

    A point above two misses may be left out, but nobody knows that before. What `auto` tries
    beyond the reference follows the rows there are (`auto_limit`).
    """
    is_auto = settings.concurrency == "auto"
    points = set() if is_auto else set(_grid(settings))
    if is_auto or settings.slo_p95_e2el_ms is None:
        points.add(settings.ref_concurrency)
    return max(_num_requests(settings, point) for point in points)


def auto_limit(settings: BenchSettings, workload: Workload) -> int:
    """The largest concurrency that `auto` tries: a dataset may have rows for fewer."""
    if workload.max_requests is None or settings.num_requests is not None:
        return MAX_CONCURRENCY
    return min(MAX_CONCURRENCY, workload.max_requests // (ROUNDS * settings.repeats))


def _num_requests(settings: BenchSettings, concurrency: int) -> int:
    return settings.num_requests or ROUNDS * concurrency


def run_sla(context: Context, result: SuiteResult) -> None:
    """Run the suite, into the result.

    Raises:
        ConfigError: a setting is wrong.
        EngineError: an engine failed.
    """
    settings = context.settings
    if settings.request_rate is not None:
        raise ConfigError(
            "--request-rate", settings.request_rate, "not with --suite sla, which is closed loop"
        )
    if "naive" not in settings.modes:
        raise ConfigError("--mode", ",".join(settings.modes), "naive among them: it sets the limit")
    workloads = context.workloads(DEFAULT_WORKLOADS, largest_run(settings), result.notes)
    longest = max(w.max_tokens for w in workloads)
    is_auto = settings.concurrency == "auto"
    at_once = max(*_grid(settings), settings.ref_concurrency)
    with context.session(max_tokens=longest, max_num_seqs=at_once) as session:
        runner = context.runner(session)
        for workload in workloads:
            if is_auto and (limit := auto_limit(settings, workload)) < MAX_CONCURRENCY:
                result.notes.append(
                    f"{workload.name} has rows for at most {limit} requests at once: auto tries no "
                    "more."
                )
            for policy in context.policies():
                demand = _demand(context, runner, workload, policy)
                for frac in settings.pool_fracs:
                    _check_pool(context, demand, frac, workload, policy)
                    pool = Pool(num_kv_blocks=int(frac * demand), block_size=context.block_size)
                    scan = PoolScan(context, runner, workload, policy, pool, frac)
                    try:
                        scan.run()
                    finally:  # after Ctrl-C: the points there are
                        result.rows += scan.rows()
    result.nothing_met = bool(result.rows) and not any(row["feasible"] for row in result.rows)


def _grid(settings: BenchSettings) -> tuple[int, ...]:
    if settings.concurrency == "auto":
        return (MAX_CONCURRENCY,)
    return settings.points or GRID


def _demand(context: Context, runner: PairRunner, workload: Workload, policy: str) -> int:
    """Blocks that naive holds at most, with the reference number of requests at once."""
    num = context.settings.ref_concurrency
    comparison = Comparison(
        suite="sla-demand", workload=workload, pool=context.ample_pool(num, workload.max_tokens),
        cases=[Case(mode="naive", policy=policy)], num_requests=num, repeats=1,
    )  # fmt: skip
    runner.plan_comparison(comparison)
    records = runner.run(comparison)[comparison.cases[0].key]
    runner.raise_if_interrupted()
    (record,) = records
    return int(record.values["vtoken_peak_blocks"])


def _check_pool(context: Context, demand: int, frac: float, workload: Workload, policy: str):
    """Refuse a pool that cannot hold one request in every mode.

    Raises:
        ConfigError: it cannot.
    """
    needed = -(-workload.max_tokens // context.block_size)
    if int(frac * demand) < needed:
        raise ConfigError(
            "--pool-fracs", frac,
            f"a share that leaves {needed} blocks for one request; naive's demand with {policy} on "
            f"{workload.name} is {demand}",
        )  # fmt: skip


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
        return GridSearch(_grid(settings))

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
        num = _num_requests(self.context.settings, concurrency)
        return Comparison(
            suite="sla", workload=self.workload, pool=self.pool, cases=[case],
            num_requests=num, max_concurrency=concurrency, repeats=1, first_repeat=repeat,
        )  # fmt: skip

    def _announce(self) -> None:
        """Plan for the grid and the confirmation; what is not needed is taken back at the end."""
        settings = self.context.settings
        points = GRID if settings.concurrency == "auto" else _grid(settings)
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


PAPER_GAINS = {"h2o": 10, "random": 37, "scissorhands": 33}  # per cent, section 5.3


def sentences(rows: list[dict[str, object]]) -> list[str]:
    """What was selected, what it gains, and what did not meet the limit."""
    lines = []
    if rows and not any(row["feasible"] for row in rows):
        limits = sorted({round(row["sla_p95_e2el_ms"]) for row in rows})
        listed = ", ".join(f"{limit:,}" for limit in limits)
        lines.append(
            f"Nothing meets the limit of {listed} ms on p95 latency, in any mode and pool."
        )
        return lines
    met: dict[tuple, bool] = {}
    for row in rows:
        policy = "" if row["mode"] == "native" else f" {row['policy']}"
        what = (row["workload"], row["mode"] + policy, row["pool_blocks"])
        met[what] = met.get(what, False) or row["feasible"]
    lines += [
        f"{workload}, {blocks:,} blocks: {mode} meets the limit at no concurrency."
        for (workload, mode, blocks), is_met in met.items()
        if not is_met
    ]
    for row in rows:
        if row["mode"] != "vtoken" or not row["is_selected"]:
            continue
        where = f"{row['workload']}, {row['policy']}, {row['pool_blocks']:,} blocks"
        parts = []
        if (gain := row["gain_over_naive"]) is not None:
            paper = PAPER_GAINS.get(row["policy"])
            seen = f" (paper: {paper} %)" if paper else ""
            parts.append(f"{100 * gain:+.0f} % over naive at its C_sel{seen}")
        if (gain := row["gain_over_native"]) is not None:
            parts.append(f"{100 * gain:+.0f} % over native at its C_sel")
        if (ratio := row.get("p95_e2el_over_naive")) is not None:
            parts.append(f"p95 {100 * (ratio - 1):+.0f} % against naive at the same concurrency")
        lines.append(f"{where}: C_sel {row['concurrency']}, {', '.join(parts)}.")
        if bound := _bound(row, _selected_naive(rows, row)):
            lines.append(f"{where}: {bound}")
    return lines


def _selected_naive(rows: list[dict[str, object]], like: dict) -> dict[str, object] | None:
    """Naive's row at its own C_sel, of the same workload, policy and pool."""
    same = ("workload", "policy", "pool_blocks")
    for row in rows:
        is_naive = row["mode"] == "naive" and row["is_selected"]
        if is_naive and all(row[key] == like[key] for key in same):
            return row
    return None


def _bound(row: dict[str, object], naive: dict[str, object] | None) -> str | None:
    """What kept the gain from being that of the steps that were saved, where something did."""
    if naive is None or row["concurrency"] <= naive["concurrency"]:
        return None
    if not (row.get("num_steps") and naive.get("num_steps")):
        return None
    steps, step_s = (
        [r[of] / r[per] for r in (row, naive)]
        for of, per in (("num_steps", "completed"), ("duration", "num_steps"))
    )
    fewer, longer = 100 * (1 - steps[0] / steps[1]), 100 * (step_s[0] / step_s[1] - 1)
    if fewer <= 0 or longer < MARKED_PERCENT:
        return None
    return (
        f"a request takes {fewer:.0f} % fewer steps than in naive at its C_sel, but a step of "
        f"{row['concurrency']} requests takes {longer:.0f} % longer than one of "
        f"{naive['concurrency']}: compute, not memory, is the limit here; with steps as long the "
        f"gain would be {100 * (steps[1] / steps[0] - 1):.0f} %."
    )

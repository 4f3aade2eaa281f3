"""Paired runs: the cases of a comparison take turns over the same prompts, repeat by repeat.

    A B C  A B C  A B C      repeats 0, 1, 2, each with prompts of its own

What slows the machine down for a while then slows all cases alike, and the ratio of a pair is
worth more than a ratio of means. `naive` writes down which tokens died when, and `vtoken` follows;
where naive was preempted its record cannot be followed (it stops at the preemption), and vtoken
decides for itself, which the record says.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vtoken.experiments.bench.bench_options import BenchSettings, Case
from vtoken.experiments.bench.journal import Journal
from vtoken.experiments.bench.measure import Record, measure
from vtoken.experiments.bench.named_workloads import WARM_UP_REPEAT, Workload
from vtoken.experiments.bench.open_engines import Pool, Session
from vtoken.experiments.report.listener import Bar

Runs = dict[str, list[Record]]  # by case key, in order of repeats


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Attributes:
    suite: names the records.
    cases: in the order of their turns; naive before the vtoken that follows it.
    num_requests: of each run.
    max_concurrency: requests in the engine at a time; None: all.
    repeats: turns.
    first_repeat: number of the first one, so that a comparison can be extended.
    """

    suite: str
    workload: Workload
    pool: Pool
    cases: Sequence[Case]
    num_requests: int
    max_concurrency: int | None = None
    repeats: int = 3
    first_repeat: int = 0

    def key(self, case: Case, repeat: int) -> str:
        """Names a run in the journal."""
        pool = f"{self.pool_of(case).num_kv_blocks}x{self.pool_of(case).block_size}"
        load = f"n{self.num_requests}c{self.max_concurrency or 'all'}"
        return "|".join([self.suite, self.workload.name, pool, load, case.key, f"r{repeat}"])

    def pool_of(self, case: Case) -> Pool:
        """The comparison's pool, in blocks of the case's own size where it has one."""
        size = case.block_size
        if size is None or size == self.pool.block_size:
            return self.pool
        tokens = self.pool.num_kv_blocks * self.pool.block_size
        return Pool(num_kv_blocks=tokens // size, block_size=size)


class PairRunner:
    """Runs comparisons on a session.

    Args:
        folder: where decisions are written; removed by its owner.
    """

    def __init__(
        self,
        settings: BenchSettings,
        session: Session,
        journal: Journal,
        bar: Bar,
        folder: Path,
    ) -> None:
        self.settings, self.session, self.journal = settings, session, journal
        self.bar, self.folder = bar, folder
        self._planned_tokens = self._done_tokens = 0.0
        self._measured_tokens = self._measured_s = 0.0
        self._is_interrupted = False

    # ---- progress ----------------------------------------------------------------------------

    def plan(self, num_tokens: float) -> None:
        """Announce output tokens to come; negative ones were announced and are not needed."""
        self._planned_tokens += num_tokens

    def plan_comparison(self, comparison: Comparison) -> None:
        """Announce a comparison, all of whose runs will be run or read from the journal."""
        self.plan(len(comparison.cases) * comparison.repeats * output_tokens(comparison))

    def _tell(self, running_tokens: float, text: str) -> None:
        done = self._done_tokens + running_tokens
        if self._measured_tokens:
            left = max(0.0, self._planned_tokens - done)
            left_s = left * self._measured_s / self._measured_tokens
            text += f", about {duration_text(left_s)} left"
        # Never quite done: plans may grow.
        self.bar.update(round(done), text, total=round(max(self._planned_tokens, done + 1)))

    def note_done(self, num_tokens: float, text: str) -> None:
        """Count work that was announced as done."""
        self._done_tokens += num_tokens
        self._tell(0, text)

    # ---- runs --------------------------------------------------------------------------------

    def run(self, comparison: Comparison, *, watch_layouts: bool = False) -> Runs:
        """Run what the journal does not have yet; all records, by case.

        After Ctrl-C these are the records there are; call `raise_if_interrupted` when they are
        put away.
        """
        runs: Runs = {case.key: [] for case in comparison.cases}
        try:
            self._run_into(runs, comparison, watch_layouts)
        except KeyboardInterrupt:
            self._is_interrupted = True
        return runs

    def raise_if_interrupted(self) -> None:
        """Go on with the Ctrl-C that `run` held back."""
        if self._is_interrupted:
            raise KeyboardInterrupt

    def run_all(
        self, comparisons: Sequence[Comparison], *, watch_layouts: bool = False
    ) -> Iterator[tuple[Comparison, Runs]]:
        """Announce all, then run one after the other; after Ctrl-C the runs there are, and no more."""
        for comparison in comparisons:
            self.plan_comparison(comparison)
        for comparison in comparisons:
            yield comparison, self.run(comparison, watch_layouts=watch_layouts)
            self.raise_if_interrupted()

    def _run_into(self, runs: Runs, comparison: Comparison, watch_layouts: bool) -> None:
        for repeat in range(comparison.first_repeat, comparison.first_repeat + comparison.repeats):
            requests = None
            for case in comparison.cases:
                key = comparison.key(case, repeat)
                record = self.journal.get(key)
                if record is None or self._is_to_be_followed(comparison, case, repeat, record):
                    if requests is None:
                        requests = comparison.workload.make(comparison.num_requests, repeat)
                    record = self._measure(comparison, case, repeat, requests, watch_layouts)
                    self.journal.put(key, record)
                runs[case.key].append(record)
                self._done_tokens += output_tokens(comparison)
                self._tell(0, f"{comparison.workload.name}, {case.key}, {repeat + 1}")

    def _measure(
        self, comparison: Comparison, case: Case, repeat: int, requests, watch_layouts: bool
    ) -> Record:
        files, decisions = self._decisions(comparison, case, repeat)
        pool = comparison.pool_of(case)
        if not self.session.is_warm(case, pool):
            self._warm_up(comparison, case, pool)
        engine = self.session.get(case, pool, **files)
        label = f"{comparison.workload.name}, {case.key}, {repeat + 1}"
        start = time.monotonic()
        record = measure(
            engine, requests,
            max_concurrency=comparison.max_concurrency,
            by_arrival=self.settings.request_rate is not None,
            goodput_ms=self.settings.goodput_ms,
            timed=not self.session.dry_run,
            watch_layouts=watch_layouts,
            on_tokens=lambda n: self._tell(n, label),
            clock=time.process_time if self.settings.clock == "cpu" else None,
        )  # fmt: skip
        self._measured_s += time.monotonic() - start
        self._measured_tokens += sum(r.output_len for r in requests)
        if decisions:
            record.values["vtoken_decisions"] = decisions
        if decisions == "recorded" and record.values["vtoken_preemptions"]:
            Path(files["record_decisions"]).unlink()
        return record

    def _decisions(self, comparison: Comparison, case: Case, repeat: int) -> tuple[dict, str]:
        """Files for a run's decisions, and what that makes of them: a word for the record."""
        if not case.policy:
            return {}, ""
        if self.session.prefix_caching:
            return {}, "own"  # hits differ between modes, and so does what may be evicted
        twin = case.with_mode("naive")
        if not any(_same_decisions(twin, other) for other in comparison.cases):
            return {}, "own"
        path = self._decisions_path(comparison, twin, repeat)
        if case.mode == "naive":
            return {"record_decisions": str(path)}, "recorded"
        return ({"replay_decisions": str(path)}, "replayed") if path.exists() else ({}, "own")

    def _decisions_path(self, comparison: Comparison, naive: Case, repeat: int) -> Path:
        key = comparison.key(_stripped(naive), repeat)
        return self.folder / ("".join(c if c.isalnum() else "-" for c in key) + ".jsonl")

    def _is_to_be_followed(
        self, comparison: Comparison, case: Case, repeat: int, record: Record
    ) -> bool:
        """Whether a run's decisions are gone (an earlier process measured it) and still needed.

        It decides the same when it is measured again; runs that followed it before are kept.
        """
        is_whole = not record.values.get("vtoken_preemptions")
        if record.values.get("vtoken_decisions") != "recorded" or not is_whole:
            return False
        followers = [
            other
            for other in comparison.cases
            if other.mode == "vtoken" and _same_decisions(other.with_mode("naive"), case)
        ]
        is_missing = any(self.journal.get(comparison.key(c, repeat)) is None for c in followers)
        return is_missing and not self._decisions_path(comparison, case, repeat).exists()

    def _warm_up(self, comparison: Comparison, case: Case, pool: Pool) -> None:
        """Run a few requests that count for nothing: first steps allocate and load code."""
        num = min(2, comparison.num_requests)
        requests = comparison.workload.make(num, WARM_UP_REPEAT)
        engine = self.session.get(case, pool)
        measure(engine, requests, max_concurrency=num, timed=False)


def _stripped(case: Case) -> Case:
    """The case without what does not change decisions."""
    changes = {k: v for k, v in case.changes.items() if k != "fragmentation_threshold"}
    return replace(case, changes=changes)


def _same_decisions(a: Case, b: Case) -> bool:
    return _stripped(a) == _stripped(b)


def output_tokens(comparison: Comparison) -> float:
    """Output tokens of one run, about: datasets' repeats differ."""
    try:
        requests = comparison.workload.make(comparison.num_requests, comparison.first_repeat)
    except ValueError:
        return 0.0
    return float(sum(r.output_len for r in requests))


def duration_text(seconds: float) -> str:
    """A duration for people, rounded: "40 s", "6 min", "2.5 h"."""
    if seconds < 90:
        return f"{10 * round(seconds / 10):.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"

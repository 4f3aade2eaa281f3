"""How many requests are resident at once without a preemption, per mode, in the same block pool.

    result = CapacityScan(ScanSettings(modes=("native", "vtoken"))).run()
    rows = dry_frontier(num_kv_blocks=5427, prompt_len=4032, output_len=12288)

A point is N requests at once; it is feasible when all N were resident in one step and none was
preempted (paper, section 5.4). A bare scan answers twice: for the pool as vLLM would size it, by a
dry run where that pool is far too large to fill, and measured in a small pool. A dry run of that
small pool picks the measured points, so that one point at the frontier and one above it do.
"""

from __future__ import annotations

from collections.abc import Sequence

from vtoken.config import VTokenConfig
from vtoken.engine import EngineSettings
from vtoken.experiments.capacity.engines import DryEngines
from vtoken.experiments.capacity.measuring import Measuring
from vtoken.experiments.capacity.point import PointRun, run_point
from vtoken.experiments.capacity.pools import Pool
from vtoken.experiments.capacity.preparation import ScanSetup
from vtoken.experiments.capacity.recorded_scores import is_scored
from vtoken.experiments.capacity.scan_options import DEFAULT_POLICY, ScanSettings
from vtoken.experiments.capacity.scan_result import (
    ScanHalf,
    ScanResult,
    scan_in_order,
    scan_in_turn,
)
from vtoken.experiments.capacity.time_limit import Deadline, LeftOut
from vtoken.experiments.planning.search import parse_concurrency
from vtoken.experiments.planning.series import Series

MODELLED_SHARE = 0.25  # of the time limit, for the half that needs no model
# Above this a dry run of the pool takes longer than the points it would save.
MAX_TWIN_REQUEST_STEPS = 100_000


class CapacityScan(ScanSetup):
    """Runs one scan; see `ScanSetup` for what it takes."""

    def run(self) -> ScanResult:
        """Run the scan; after Ctrl-C the result holds the points there were."""
        try:
            self._prepare()
            if self.settings.dry_run:
                self._scan_dry(self.result.main, share=1.0)
                return self.result
            if self.result.modelled is not None:
                self._scan_dry(self.result.modelled, share=MODELLED_SHARE)
            self._scan_measured()
        except KeyboardInterrupt:
            if self.result.main is None:
                raise
            self.result.interrupted = True
        return self.result

    # ---- the two halves ----------------------------------------------------------------------

    def _deadline(self, share: float = 1.0) -> Deadline:
        """The time limit, or a share of it, from now: what came before does not count."""
        limit_s = self.settings.time_limit_s
        return Deadline(None if limit_s is None else share * limit_s, self._clock)

    def _scan_dry(self, half: ScanHalf, share: float) -> None:
        deadline = self._deadline(share)
        engines = self._dry_engines(half.pool)
        self._note_made_up_scores()
        self._listener.note(f"dry run: {half.pool} ({half.pool.how})")
        self._add_lines_that_do_not_fit(half)

        def run(line: Series, concurrency: int) -> PointRun | LeftOut:
            steps, tokens = self._expected_work(line, concurrency)
            predicted_s = self._dry_times.predict(line.mode, steps, tokens)
            if not deadline.has_room(predicted_s):
                return LeftOut(
                    mode=line.mode, policy=line.policy, concurrency=concurrency, modelled=True,
                    predicted_s=predicted_s or 0.0, left_s=deadline.left_s,
                )  # fmt: skip
            return self._run_dry(engines, line, concurrency)

        # All frontiers before any confirmation: time may run out.
        scan_in_turn(half, self._searches(half.pool, self._guesses(half.pool)), run)

    def _run_dry(self, engines: DryEngines, line: Series, concurrency: int) -> PointRun:
        output_tokens = sum(r.output_len for r in self._prompts(concurrency, 0))
        with (
            engines.get(line, concurrency) as engine,
            self._listener.progress(output_tokens, f"dry run, {line} at {concurrency}") as bar,
        ):
            run = run_point(
                engine, line, concurrency, self._prompts, modelled=True, on_tokens=bar.update
            )
        self._dry_times.record(line.mode, run.num_steps, run.num_tokens, run.seconds)
        return run

    def _note_made_up_scores(self) -> None:
        scored = [p for p in self.settings.policies if is_scored(p)]
        if scored and any(line.policy for line in self.settings.series):
            file = self.settings.replay_scores
            source = "random" if file is None else f"those recorded in {file}"
            note = f"dry runs have no attention: the scores for {', '.join(scored)} are {source}"
            if note not in self.result.notes:
                self.result.notes.append(note)

    def _pick_points(self, pool: Pool) -> dict[Series, int]:
        """Improve the guesses by a dry run of the very pool, step for step the real one."""
        guesses = self._guesses(pool)
        is_auto = parse_concurrency(self.settings.concurrency) is None
        work = max(guesses.values(), default=1) * self._prompts.max_tokens
        if not is_auto or work > MAX_TWIN_REQUEST_STEPS:
            return guesses
        self._listener.note(f"dry run of {pool}, to pick the points that are measured")
        twin = ScanHalf(pool, modelled=True)
        engines = self._dry_engines(pool)
        scan_in_turn(
            twin,
            self._searches(pool, guesses),
            lambda line, concurrency: self._run_dry(engines, line, concurrency),
        )
        for run in twin.runs:
            line = Series(run.point.mode, run.point.policy)
            self._twin[line, run.point.concurrency] = (run.num_steps, run.num_tokens)
        for row in twin.frontier:
            self._expected[Series(row["mode"], row["policy"])] = row["max_concurrency"]
        return {line: max(1, self._expected[line]) for line in guesses}

    def _scan_measured(self) -> None:
        half, settings = self.result.main, self.settings
        self._add_lines_that_do_not_fit(half)
        guesses = self._pick_points(half.pool)
        points = parse_concurrency(settings.concurrency)
        most = max(points) if points else 2 * max(guesses.values(), default=1)
        limits = self._limits(half.pool.usable_blocks, half.pool.block_size)
        measure = Measuring(
            engines=self._real_engines(limits, max_num_seqs=most),
            times=self._times,
            deadline=self._deadline(),
            prompts=self._prompts,
            repeats=settings.repeats,
            listener=self._listener,
            expected_work=self._expected_work,
            # A point of a list is worth as much as any other.
            first_points={} if points else guesses,
        )
        self._listener.note(f"measured: {half.pool} ({half.pool.how})")
        try:
            scan_in_order(half, self._searches(half.pool, guesses), measure.run)
        finally:
            measure.engines.close()
        self._note_surprises(half)

    def _note_surprises(self, half: ScanHalf) -> None:
        """The dry run and the engine should agree; where they do not, say so."""
        cut_short = {(x.mode, x.policy) for x in half.left_out}
        for row in half.frontier:
            expected = self._expected.get(Series(row["mode"], row["policy"]))
            is_whole = (row["mode"], row["policy"]) not in cut_short
            if is_whole and expected not in (None, row["max_concurrency"]):
                self.result.notes.append(
                    f"{row['mode']}: measured {row['max_concurrency']}, where the dry run of the "
                    f"same pool expected {expected}"
                )


def dry_frontier(
    *,
    num_kv_blocks: int,
    block_size: int = 16,
    prompt_len: int,
    output_len: int,
    modes: Sequence[str] = ("native", "naive", "vtoken"),
    policy: str = DEFAULT_POLICY,
    eviction_ratio: float | None = None,
    kv_budget_tokens: int | None = None,
    model: str = "meta-llama/Llama-3.1-8B",
) -> list[dict[str, object]]:
    """The frontier of each mode by vLLM's scheduler and block pool alone.

    Returns:
        Rows with mode, policy, max_concurrency, modelled.
    """
    config = VTokenConfig.from_mapping(
        {"policy": policy, "eviction_ratio": eviction_ratio, "kv_budget_tokens": kv_budget_tokens}
    )
    settings = ScanSettings(
        config=config,
        engine=EngineSettings(model=model, num_kv_blocks=num_kv_blocks, block_size=block_size),
        modes=tuple(modes),
        policies=(policy,),
        prompt_len=prompt_len,
        output_len=output_len,
        dry_run=True,
    )
    return CapacityScan(settings).run().main.frontier

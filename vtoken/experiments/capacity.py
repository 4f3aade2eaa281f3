"""How many requests are resident at once without a preemption, per mode, in the same block pool.

    result = CapacityScan(ScanSettings(modes=("native", "vtoken"))).run()
    rows = dry_frontier(num_kv_blocks=5427, prompt_len=4032, output_len=12288)

A point is N requests at once; it is feasible when all N were resident in one step and none was
preempted (paper, section 5.4). A bare scan answers twice: for the pool as vLLM would size it, by a
dry run where that pool is far too large to fill, and measured in a small pool. A dry run of that
small pool picks the measured points, so that one point at the frontier and one above it do.

Files: capacity_settings.py (what is asked), capacity_search.py (which points), capacity_pool.py
(which pools), capacity_prompts.py (which requests), capacity_engines.py (what runs them),
capacity_point.py (one point), capacity_time.py (the time limit), capacity_view.py (tables, plots).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from vtoken.config import VTokenConfig
from vtoken.engine import EngineSettings, open_engine, run_requests
from vtoken.errors import ConfigError
from vtoken.experiments.capacity_engines import (
    DryEngines,
    EngineLimits,
    RealEngines,
    open_dry_engine,
)
from vtoken.experiments.capacity_half import ScanHalf, ScanListener, scan_in_order, scan_in_turn
from vtoken.experiments.capacity_point import PointRun, infeasible_by_size, run_point
from vtoken.experiments.capacity_pool import (
    Host,
    Pool,
    detect_host,
    find_shape,
    given_pool,
    host_pool,
    small_pool,
)
from vtoken.experiments.capacity_prompts import PromptSource, make_prompts
from vtoken.experiments.capacity_search import (
    BisectSearch,
    GridSearch,
    Search,
    parse_concurrency,
)
from vtoken.experiments.capacity_settings import DEFAULT_POLICY, ScanSettings, Series
from vtoken.experiments.capacity_time import Deadline, LeftOut, StepTimes
from vtoken.experiments.model_shapes import ModelShape
from vtoken.experiments.results import utc_now
from vtoken.units import cdiv

MODELLED_SHARE = 0.25  # of the time limit, for the half that needs no model
# Above this a dry run of the pool takes longer than the points it would save.
MAX_TWIN_REQUEST_STEPS = 100_000
WARM_UP_STEPS, WARM_UP_PROMPT_LEN = 8, 16


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
        if self.modelled is not None:
            sections["modelled"] = self.modelled.sections()
        return sections


class CapacityScan:
    """Runs one scan.

    Args:
        open_engine, open_dry_engine: make engines; tests give fakes.
        host, shape, prompts: found out where they are not given.
        listener: is told how it goes.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        settings: ScanSettings,
        *,
        open_engine: Callable = open_engine,
        open_dry_engine: Callable = open_dry_engine,
        host: Host | None = None,
        shape: ModelShape | None = None,
        prompts: PromptSource | None = None,
        listener: ScanListener | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._open_engine, self._open_dry = open_engine, open_dry_engine
        self._host, self._shape, self._prompts = host, shape, prompts
        self._model = settings.engine.model
        self._listener, self._clock = listener or ScanListener(), clock
        self._times, self._dry_times = StepTimes(), StepTimes()
        # What a dry run of the measured pool said: work per point, frontier per line.
        self._twin: dict[tuple[Series, int], tuple[int, int]] = {}
        self._expected: dict[Series, int] = {}
        self.result = ScanResult(settings, utc_now())

    def run(self) -> ScanResult:
        """Run the scan; after Ctrl-C the result holds the points there were.

        Raises:
            ConfigError: a setting is wrong, or a pool cannot hold one packed request.
            EngineError: an engine failed.
        """
        deadline = Deadline(self.settings.time_limit_s, self._clock)
        try:
            self._prepare()
            if self.settings.dry_run:
                self._scan_dry(self.result.main, deadline)
                return self.result
            if self.result.modelled is not None:
                self._scan_dry(self.result.modelled, deadline.part(MODELLED_SHARE))
            self._scan_measured(deadline)
        except KeyboardInterrupt:
            if self.result.main is None:
                raise
            self.result.interrupted = True
        return self.result

    # ---- what can be checked before an engine starts -----------------------------------------

    def _prepare(self) -> None:
        settings, result = self.settings, self.result
        if self._shape is None:
            self._shape, self._model = find_shape(
                settings.engine.model, needs_weights=not settings.dry_run
            )
        if self._prompts is None:
            self._prompts = make_prompts(
                settings, self._tokenizer_or_none(), self._shape.vocab_size
            )
        result.prompts, result.max_tokens = self._prompts.what, self._prompts.max_tokens
        self._check_lengths()
        needs_host = not settings.dry_run or settings.engine.num_kv_blocks is None
        if self._host is None:
            self._host = detect_host(settings) if needs_host else Host(is_cpu=False, memory_bytes=0)
        block_size = settings.engine.block_size or (
            16 if settings.dry_run else self._host.block_size
        )
        self._check_block_size(block_size)
        settings.check_budgets(block_size)
        self._choose_pools(block_size)

    def _tokenizer_or_none(self) -> Callable[[], object] | None:
        if self.settings.dry_run and self.settings.dataset_path is None:
            return None  # lengths are all that counts
        model = self._model

        def load():
            from transformers import AutoTokenizer

            try:
                return AutoTokenizer.from_pretrained(model)
            except (OSError, ValueError) as error:
                why = str(error).strip().split("\n")[0]
                raise ConfigError("--model", model, f"a model with a tokenizer ({why})") from None

        return load

    def _check_lengths(self) -> None:
        needed, given = self._prompts.max_tokens, self.settings.engine.max_model_len
        if given is not None and given < needed:
            raise ConfigError("--max-model-len", given, f"at least {needed}, prompt and output")
        longest = self._shape.max_model_len
        if needed > longest:
            raise ConfigError(
                "--prompt-len and --output-len", needed,
                f"together at most {longest} tokens, what {self._shape.name} takes",
            )  # fmt: skip

    def _check_block_size(self, block_size: int) -> None:
        stock = any(line.mode == "native" for line in self.settings.series)
        if not self.settings.dry_run and self._host.is_cpu and stock and block_size % 32:
            raise ConfigError(
                "--block-size", block_size,
                "a multiple of 32 in mode native on a CPU: vLLM's own attention takes no other",
            )  # fmt: skip

    def _choose_pools(self, block_size: int) -> None:
        settings, host = self.settings, self._host
        pool = given_pool(settings.engine, self._shape, block_size)
        modelled = None
        if pool is None and settings.dry_run:
            pool = host_pool(settings.engine, self._shape, block_size, host)
        elif pool is None and host.is_cpu:
            pool = small_pool(self._prompts.max_tokens, block_size)
            modelled = host_pool(settings.engine, self._shape, block_size, host)
        elif pool is None:
            pool = self._pool_of_gpu(block_size)
        self._check_pool(pool)
        self.result.main = ScanHalf(pool, modelled=settings.dry_run)
        if modelled is not None:
            self._check_pool(modelled)
            self.result.modelled = ScanHalf(modelled, modelled=True)
            self.result.notes.append(
                "on a CPU the memory utilisation is a share of host memory, and the pool it gives "
                f"({modelled}: {modelled.how}) is far too large to fill: it is modelled, and "
                f"{pool} are measured"
            )

    def _pool_of_gpu(self, block_size: int) -> Pool:
        """Ask vLLM: only its profiling run on the device knows."""
        limits = self._limits(None, block_size)
        engines = self._real_engines(limits, max_num_seqs=1)
        try:
            engine = engines.get(self.settings.series[0], 1)
            return Pool(
                usable_blocks=engine.num_usable_blocks, block_size=engine.block_size,
                how="as vLLM sized it",
            )  # fmt: skip
        finally:
            engines.close()

    def _check_pool(self, pool: Pool) -> None:
        """Refuse a pool that cannot hold one request even when it is packed."""
        tokens = self._prompts.max_tokens
        packed = [Series("vtoken", policy) for policy in self.settings.policies]
        needed = min(
            self.settings.blocks_per_request(line, tokens, pool.block_size) for line in packed
        )
        if needed > pool.usable_blocks:
            option = "--num-kv-blocks"
            if self.settings.engine.num_kv_blocks is None:
                option = "pool of blocks"
            raise ConfigError(
                option, pool.usable_blocks,
                f"at least {needed} blocks of {pool.block_size} tokens, what one packed request "
                f"of {tokens:,} tokens needs",
            )  # fmt: skip

    # ---- engines and searches ----------------------------------------------------------------

    def _limits(self, num_kv_blocks: int | None, block_size: int) -> EngineLimits:
        engine = self.settings.engine
        return EngineLimits(
            num_kv_blocks=num_kv_blocks,
            block_size=block_size,
            # One more than needed: a request that may fill the model's length counts as one of
            # unknown length, and admission would then depend on what ran before.
            max_model_len=engine.max_model_len
            or min(self._prompts.max_tokens + 1, self._shape.max_model_len),
            max_batched_tokens=engine.max_num_batched_tokens or self._host.max_batched_tokens,
        )

    def _dry_engines(self, pool: Pool) -> DryEngines:
        limits = self._limits(pool.usable_blocks, pool.block_size)
        return DryEngines(limits, self.settings.config, self.settings.engine, self._open_dry)

    def _real_engines(self, limits: EngineLimits, max_num_seqs: int) -> RealEngines:
        return RealEngines(
            limits, self.settings.config, replace(self.settings.engine, model=self._model),
            max_num_seqs=max_num_seqs, open_engine=self._open_engine, clock=self._clock,
        )  # fmt: skip

    def _searches(self, pool: Pool, guesses: dict[Series, int]) -> dict[Series, Search]:
        points = parse_concurrency(self.settings.concurrency)
        if points is not None:
            return {line: GridSearch(points) for line in guesses}
        limit = min(pool.usable_blocks, self._prompts.max_requests)
        return {line: BisectSearch(guess, limit=limit) for line, guess in guesses.items()}

    def _guesses(self, pool: Pool) -> dict[Series, int]:
        """Where each line's frontier should lie; lines that do not fit at all are left out."""
        tokens = round(self._prompts.mean_tokens)
        return {
            line: self.settings.expected_frontier(line, tokens, pool.usable_blocks, pool.block_size)
            for line in self.settings.series
            if self._blocks_of_one(line, pool) <= pool.usable_blocks
        }

    def _blocks_of_one(self, line: Series, pool: Pool) -> int:
        return self.settings.blocks_per_request(line, self._prompts.max_tokens, pool.block_size)

    def _add_lines_that_do_not_fit(self, half: ScanHalf) -> None:
        for line in self.settings.series:
            needed = self._blocks_of_one(line, half.pool)
            if needed > half.pool.usable_blocks:
                half.add(infeasible_by_size(line, needed, half.pool.usable_blocks, half.modelled))

    def _expected_work(self, line: Series, concurrency: int) -> tuple[int, int]:
        """(steps, tokens) of one repeat: from the dry twin where it ran, else by arithmetic."""
        if (line, concurrency) in self._twin:
            return self._twin[line, concurrency]
        requests = self._prompts(concurrency, 0)
        prompt_tokens = sum(r.prompt_len for r in requests)
        steps = max(r.output_len for r in requests)
        steps += cdiv(prompt_tokens, self._limits(None, 1).max_batched_tokens)
        return steps, prompt_tokens + sum(r.output_len for r in requests)

    # ---- the two halves ----------------------------------------------------------------------

    def _scan_dry(self, half: ScanHalf, deadline: Deadline) -> None:
        engines = self._dry_engines(half.pool)
        self._note_made_up_scores()
        self._listener.stage(f"dry run: {half.pool} ({half.pool.how})")
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
            self._listener.point(f"dry run, {line} at {concurrency}", output_tokens) as advance,
        ):
            run = run_point(
                engine, line, concurrency, self._prompts, modelled=True, on_tokens=advance
            )
        self._dry_times.record(line.mode, run.num_steps, run.num_tokens, run.seconds)
        return run

    def _note_made_up_scores(self) -> None:
        from vtoken.policies.base import ScoreKind
        from vtoken.policies.registry import policy_class

        scored = [p for p in self.settings.policies if policy_class(p).score_kind != ScoreKind.NONE]
        if scored and any(line.policy for line in self.settings.series):
            note = (
                f"dry runs have no attention: the scores for {', '.join(scored)} are random there"
            )
            if note not in self.result.notes:
                self.result.notes.append(note)

    def _pick_points(self, pool: Pool) -> dict[Series, int]:
        """Improve the guesses by a dry run of the very pool, step for step the real one."""
        guesses = self._guesses(pool)
        is_auto = parse_concurrency(self.settings.concurrency) is None
        work = max(guesses.values(), default=1) * self._prompts.max_tokens
        if not is_auto or work > MAX_TWIN_REQUEST_STEPS:
            return guesses
        self._listener.stage(f"dry run of {pool}, to pick the points that are measured")
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

    def _scan_measured(self, deadline: Deadline) -> None:
        half, settings = self.result.main, self.settings
        self._add_lines_that_do_not_fit(half)
        guesses = self._pick_points(half.pool)
        points = parse_concurrency(settings.concurrency)
        most = max(points) if points else 2 * max(guesses.values(), default=1)
        limits = self._limits(half.pool.usable_blocks, half.pool.block_size)
        measure = _Measuring(
            engines=self._real_engines(limits, max_num_seqs=most),
            times=self._times,
            deadline=deadline,
            prompts=self._prompts,
            repeats=settings.repeats,
            listener=self._listener,
            expected_work=self._expected_work,
            # A point of a list is worth as much as any other.
            first_points={} if points else guesses,
        )
        self._listener.stage(f"measured: {half.pool} ({half.pool.how})")
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


@dataclass
class _Measuring:
    """Runs points on real engines within a time limit.

    Attributes:
        first_points: of each line, the point that its answer cannot do without. Time for those of
            later lines is kept back from points that only confirm.
    """

    engines: RealEngines
    times: StepTimes
    deadline: Deadline
    prompts: PromptSource
    repeats: int
    listener: ScanListener
    expected_work: Callable[[Series, int], tuple[int, int]]
    first_points: dict[Series, int]
    _started: set[Series] = field(default_factory=set)

    def run(self, line: Series, concurrency: int) -> PointRun | LeftOut:
        """Measure a point, or say why it was left out."""
        if refused := self._refusal(line, concurrency):
            return refused
        if self.engines.must_load(line):
            self.listener.stage(f"starting an engine in mode {line.mode}")
        is_new = line not in self._started
        engine = self.engines.get(line, concurrency)
        if is_new:
            self._started.add(line)
            self._warm_up(engine, line, concurrency)
            if refused := self._refusal(line, concurrency):
                return refused
            engine = self.engines.get(line, concurrency)
        output_tokens = sum(r.output_len for r in self.prompts(concurrency, 0)) * self.repeats
        with self.listener.point(f"{line} at {concurrency}", output_tokens) as advance:
            run = run_point(
                engine, line, concurrency, self.prompts, repeats=self.repeats, on_tokens=advance
            )
        self.times.record(line.mode, run.num_steps, run.num_tokens, run.seconds)
        return run

    def _refusal(self, line: Series, concurrency: int) -> LeftOut | None:
        predicted_s, reserved_s = self._predict(line, concurrency), 0.0
        if line in self._started and self.first_points.get(line) != concurrency:
            reserved_s = self._needed_later(line)
        if self.deadline.has_room(predicted_s, reserved_s):
            return None
        return LeftOut(
            mode=line.mode, policy=line.policy, concurrency=concurrency, predicted_s=predicted_s,
            left_s=self.deadline.left_s, reserved_s=reserved_s,
        )  # fmt: skip

    def _predict(self, line: Series, concurrency: int, after: Series | None = None) -> float:
        """Seconds for a point, its engine's start included; 0 before anything was measured."""
        steps, tokens = self.expected_work(line, concurrency)
        seconds = self.times.predict(line.mode, steps * self.repeats, tokens * self.repeats) or 0.0
        if self.engines.must_load(line, after):
            seconds += self.engines.load_s or 0.0
        return seconds

    def _needed_later(self, line: Series) -> float:
        seconds, before = 0.0, line
        for later, concurrency in self.first_points.items():
            if later not in self._started:
                seconds += self._predict(later, concurrency, after=before)
                before = later
        return seconds

    def _warm_up(self, engine, line: Series, concurrency: int) -> None:
        """Run a few steps: first ones are slow, and the first prediction needs something."""
        requests = self.prompts(concurrency, 0)
        short = [
            replace(
                r, prompt=None, prompt_token_ids=r.prompt_token_ids[:WARM_UP_PROMPT_LEN],
                prompt_len=min(r.prompt_len, WARM_UP_PROMPT_LEN), output_len=WARM_UP_STEPS,
            )
            for r in requests
        ]  # fmt: skip
        one = [replace(requests[0], output_len=1)]
        # Decodes; then one prompt alone and decodes again: what a token and what a step cost.
        for batch, counts in ((short, False), (one, True), (short, True)):
            run = run_requests(engine, batch)
            engine.reset_prefix_cache()
            if counts:
                tokens = run.num_prompt_tokens + run.num_output_tokens
                self.times.record(line.mode, run.stats.num_steps, tokens, run.wall_s)


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

    Raises:
        ConfigError: a setting is wrong, or the pool cannot hold one packed request.
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

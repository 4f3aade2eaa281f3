"""What a capacity scan decides before an engine starts: requests, pools, searches; and checks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from vtoken.engine import open_engine
from vtoken.engine.cpu import STOCK_BLOCK_TOKENS
from vtoken.errors import ConfigError
from vtoken.experiments.capacity.engines import DryEngines, EngineLimits, RealEngines
from vtoken.experiments.capacity.point import infeasible_by_size
from vtoken.experiments.capacity.pools import (
    Host,
    Pool,
    detect_host,
    given_pool,
    host_pool,
    small_pool,
)
from vtoken.experiments.capacity.prompts import PromptSource, make_prompts
from vtoken.experiments.capacity.recorded_scores import RecordedScores, is_scored
from vtoken.experiments.capacity.scan_options import ScanSettings
from vtoken.experiments.capacity.scan_result import ScanHalf, ScanResult
from vtoken.experiments.capacity.time_limit import StepTimes
from vtoken.experiments.planning.dry_engines import open_dry_engine
from vtoken.experiments.planning.find_model import find_shape, load_tokenizer
from vtoken.experiments.planning.model_shapes import ModelShape
from vtoken.experiments.planning.search import (
    BisectSearch,
    GridSearch,
    Search,
    parse_concurrency,
)
from vtoken.experiments.planning.series import Series
from vtoken.experiments.report.listener import Listener
from vtoken.experiments.report.results import utc_now
from vtoken.units import cdiv


class ScanSetup:
    """What a scan has before it starts: model shape, prompts, pools, checked settings.

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
        listener: Listener | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._open_engine, self._open_dry = open_engine, open_dry_engine
        self._host, self._shape, self._prompts = host, shape, prompts
        self._model = settings.engine.model
        self._listener, self._clock = listener or Listener(), clock
        self._times, self._dry_times = StepTimes(), StepTimes()
        # What a dry run of the measured pool said: work per point, frontier per line.
        self._twin: dict[tuple[Series, int], tuple[int, int]] = {}
        self._expected: dict[Series, int] = {}
        self.result = ScanResult(settings, utc_now())

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
        return partial(load_tokenizer, self.settings.engine.model, self._model)

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
        measured = self._host.is_cpu and not self.settings.dry_run
        stock = measured and any(line.mode == "native" for line in self.settings.series)
        if stock and block_size % STOCK_BLOCK_TOKENS:
            raise ConfigError(
                "--block-size", block_size,
                f"a multiple of {STOCK_BLOCK_TOKENS} in mode native on a CPU: "
                "vLLM's own attention takes no other",
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
        return DryEngines(
            limits, self.settings.config, self.settings.engine, self._open_dry,
            scores=self._recorded_scores(pool),
        )  # fmt: skip

    def _recorded_scores(self, pool: Pool) -> RecordedScores | None:
        """Recorded scores of the one policy that reads some; None where none were given."""
        settings = self.settings
        if settings.replay_scores is None:
            return None
        lines = {x.policy: x for x in settings.series if x.policy and is_scored(x.policy)}
        if not lines:
            raise ConfigError(
                "--replay-scores", settings.replay_scores,
                "only with a policy that reads scores, in mode naive or vtoken",
            )  # fmt: skip
        recorded = [
            RecordedScores(
                settings.replay_scores, line.config(settings.config), pool.block_size,
                self._prompts.max_tokens,
            )
            for line in lines.values()  # a second policy is not the recorded one, and is refused
        ]  # fmt: skip
        return recorded[0]

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

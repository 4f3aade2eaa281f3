"""The engines of a capacity scan: real ones, opened one at a time, and dry ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from vtoken.config import VTokenConfig
from vtoken.engine import EngineSettings, StepEngine, open_engine
from vtoken.experiments.capacity.recorded_scores import RecordedScores
from vtoken.experiments.planning.dry_engines import open_dry_engine, random_scores
from vtoken.experiments.planning.series import Series


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """What real and dry engines of one scan have in common; they agree step for step on it."""

    num_kv_blocks: int | None
    block_size: int
    max_model_len: int
    max_batched_tokens: int


def batched_tokens(limits: EngineLimits, max_num_seqs: int) -> int:
    """Tokens a step may compute: at least one a request, and no more than there can be."""
    most = min(limits.max_batched_tokens, max_num_seqs * limits.max_model_len)
    return max(most, max_num_seqs)


class DryEngines:
    """A dry engine per point: building one takes milliseconds.

    Args:
        fast_forward: take stretches of decode steps at once; the outcome is the same.
        scores: recorded scores; None: random ones.
    """

    def __init__(
        self,
        limits: EngineLimits,
        config: VTokenConfig,
        settings: EngineSettings,
        open_engine: Callable[..., StepEngine] = open_dry_engine,
        fast_forward: bool = True,
        scores: RecordedScores | None = None,
    ) -> None:
        self.limits, self.config, self.settings = limits, config, settings
        self.fast_forward, self._open, self._scores = fast_forward, open_engine, scores

    def get(self, line: Series, concurrency: int) -> StepEngine:
        from vtoken.engine.dry import DrySettings

        limits = self.limits
        assert limits.num_kv_blocks is not None
        caching = self.settings.enable_prefix_caching
        settings = DrySettings(
            num_kv_blocks=limits.num_kv_blocks,
            block_size=limits.block_size,
            max_model_len=limits.max_model_len,
            max_num_seqs=concurrency,
            max_num_batched_tokens=batched_tokens(limits, concurrency),
            enable_prefix_caching=True if caching is None else caching,
            async_scheduling=bool(self.settings.async_scheduling),
            fast_forward=self.fast_forward,
            seed=self.settings.seed,
        )
        source = random_scores if self._scores is None else self._scores.source()
        return self._open(settings, line.config(self.config), score_source=source)


class RealEngines:
    """Keeps one engine open; modes with hooks share one, native has its own.

    Attributes:
        load_s: seconds the last start of an engine took, None before.
    """

    def __init__(
        self,
        limits: EngineLimits,
        config: VTokenConfig,
        settings: EngineSettings,
        *,
        max_num_seqs: int,
        open_engine: Callable[..., StepEngine] = open_engine,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits, self.config, self.settings = limits, config, settings
        self.max_num_seqs = max(max_num_seqs, settings.max_num_seqs or 1)
        self.load_s: float | None = None
        self.engine: StepEngine | None = None
        self._line: Series | None = None
        self._open, self._clock = open_engine, clock

    def must_load(self, line: Series, after: Series | None = None) -> bool:
        """Whether this line needs a start of an engine, now or after another line."""
        before = self._line if after is None else after
        return before is None or (before != line and "native" in (before.mode, line.mode))

    def get(self, line: Series, concurrency: int) -> StepEngine:
        """An idle engine for this line.

        Hooks are new every time: what they learn from requests (output lengths, for admission)
        must not make a point depend on the points before it.
        """
        if concurrency <= self.max_num_seqs and not self.must_load(line):
            if line.mode != "native":
                self.engine.reconfigure(line.config(self.config))
            self._line = line
            return self.engine
        self.close()
        if concurrency > self.max_num_seqs:
            self.max_num_seqs = 2 * concurrency
        start = self._clock()
        self.engine = self._open(self._engine_settings(), line.config(self.config))
        self.load_s, self._line = self._clock() - start, line
        return self.engine

    def _engine_settings(self) -> EngineSettings:
        limits = self.limits
        return replace(
            self.settings,
            block_size=limits.block_size,
            num_kv_blocks=limits.num_kv_blocks,
            kv_cache_memory_bytes=None,
            # With the blocks given there is no share of memory to check on a CPU.
            gpu_memory_utilization=None
            if limits.num_kv_blocks is not None
            else self.settings.gpu_memory_utilization,
            max_model_len=limits.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=batched_tokens(limits, self.max_num_seqs),
        )

    def close(self) -> None:
        engine, self.engine, self._line = self.engine, None, None
        if engine is not None:
            engine.close()

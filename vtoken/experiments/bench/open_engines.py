"""Engines of a benchmark: several of them stay open, so that modes can take turns.

Modes with hooks share an engine and are told apart by `reconfigure`; native has one of its own.
An engine that is closed takes vLLM's process-wide state with it, so engines are closed all at
once or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from vtoken.config import VTokenConfig
from vtoken.engine import EngineSettings, StepEngine, open_engine
from vtoken.experiments.bench.bench_options import Case
from vtoken.experiments.planning.dry_engines import open_dry_engine, random_scores


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Attributes:
    num_kv_blocks: usable blocks.
    block_size: tokens per block.
    """

    num_kv_blocks: int
    block_size: int

    def __str__(self) -> str:
        return f"{self.num_kv_blocks:,} blocks of {self.block_size} tokens"


class Session:
    """Gives an idle engine for a case, with fresh hooks and an empty prefix cache.

    Args:
        engine: settings that all engines have; blocks and block size come from the pool.
        base: vToken's settings that all cases start from.
        max_open: real engines open at a time; beyond it all are closed first.
        dry_run: no model; a new engine for every run.
    """

    def __init__(
        self,
        engine: EngineSettings,
        base: VTokenConfig,
        *,
        max_model_len: int,
        max_num_seqs: int,
        prefix_caching: bool = False,
        max_open: int = 2,
        dry_run: bool = False,
        open_real: Callable[..., StepEngine] = open_engine,
        open_dry: Callable[..., StepEngine] = open_dry_engine,
    ) -> None:
        self.engine, self.base, self.dry_run = engine, base, dry_run
        self.max_model_len, self.max_num_seqs = max_model_len, max_num_seqs
        self.prefix_caching, self.max_open = prefix_caching, max_open
        self._open_real, self._open_dry = open_real, open_dry
        self._engines: dict[tuple, StepEngine] = {}
        self._warm: set[tuple] = set()

    def is_warm(self, case: Case, pool: Pool) -> bool:
        """Whether this case's engine has run something since it was opened; says yes from now."""
        key = self._key(case, pool)
        is_warm = self.dry_run or key in self._warm
        self._warm.add(key)
        return is_warm

    def _key(self, case: Case, pool: Pool) -> tuple:
        return (case.mode == "native", pool.num_kv_blocks, pool.block_size)

    def get(self, case: Case, pool: Pool, **files: object) -> StepEngine:
        """An engine for a case.

        Args:
            files: `record_decisions` or `replay_decisions`.
        """
        config = case.config(self.base)
        if files:
            fields = config.model_dump(exclude_unset=True) | files
            config = VTokenConfig.from_mapping(fields)
        if self.dry_run:
            return self._open_dry(self._dry_settings(pool), config, score_source=random_scores)
        key = self._key(case, pool)
        if key not in self._engines:
            if len(self._engines) >= self.max_open:
                self.close()
            self._engines[key] = self._open_real(self._real_settings(pool), config)
        engine = self._engines[key]
        if case.mode != "native":
            engine.reconfigure(config)
        engine.reset_prefix_cache()
        return engine

    def _real_settings(self, pool: Pool) -> EngineSettings:
        return replace(
            self.engine,
            block_size=pool.block_size,
            num_kv_blocks=pool.num_kv_blocks,
            kv_cache_memory_bytes=None,
            max_model_len=self.engine.max_model_len or self.max_model_len,
            max_num_seqs=max(self.max_num_seqs, self.engine.max_num_seqs or 1),
            enable_prefix_caching=self.prefix_caching,
        )

    def _dry_settings(self, pool: Pool):
        from vtoken.engine.dry import DrySettings

        return DrySettings(
            num_kv_blocks=pool.num_kv_blocks,
            block_size=pool.block_size,
            max_model_len=self.engine.max_model_len or self.max_model_len,
            max_num_seqs=max(self.max_num_seqs, self.engine.max_num_seqs or 1),
            max_num_batched_tokens=max(
                self.engine.max_num_batched_tokens or 2048, self.max_num_seqs
            ),
            enable_prefix_caching=self.prefix_caching,
            seed=self.engine.seed,
        )

    def close(self) -> None:
        """Close all engines."""
        engines, self._engines = self._engines, {}
        self._warm.clear()
        for engine in engines.values():
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

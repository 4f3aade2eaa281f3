"""What a profile is asked for, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from vtoken.config import VTokenConfig
from vtoken.engine.settings import EngineSettings
from vtoken.errors import ConfigError
from vtoken.modes import EVICTING_MODES
from vtoken.units import cdiv, check_least

SUITES = ("overhead", "step", "kernels", "scale")
BLOCK_SIZE = 32  # the smallest that stock vLLM takes on a CPU: both sides of a pair need it


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """Attributes:
    config: of the modes that evict.
    suites: which ones run, in this order.
    modes: of the step suite.
    concurrencies: running requests of the overhead suite; the step suite takes the first.
    prompt_len: tokens of the shortest prompt; the others are up to a block longer, so that
        requests do not all evict in the same step.
    num_steps: measured decode steps, per engine and per pair.
    num_events: relocation events that are timed, at least.
    clock: of paired steps: "wall", or "cpu", this process's CPU time, on machines that others use
        as well.
    trace: file for a Chrome trace of the step suite.
    """

    config: VTokenConfig = field(default_factory=VTokenConfig)
    engine: EngineSettings = field(default_factory=lambda: EngineSettings(model="smollm2-135m"))
    suites: tuple[str, ...] = SUITES
    modes: tuple[str, ...] = ("native", "vtoken")
    concurrencies: tuple[int, ...] = (16, 48)
    prompt_len: int = 128
    num_steps: int = 80
    num_events: int = 100
    clock: str = "wall"
    trace: Path | None = None

    def __post_init__(self) -> None:
        check_least(self.prompt_len, "--prompt-len", 16)
        check_least(self.num_steps, "--steps", 4)
        check_least(self.num_events, "--events")
        check_least(min(self.concurrencies), "--concurrency")
        if self.trace is not None and "step" not in self.suites:
            raise ConfigError("--trace", str(self.trace), "goes with --suite step or --suite all")
        if self.config.replay_decisions or self.config.record_decisions:
            given = self.config.replay_decisions or self.config.record_decisions
            raise ConfigError(
                "--replay-decisions", given, "not in a profile: it would be timed too"
            )

    @property
    def block_size(self) -> int:
        return self.engine.block_size or BLOCK_SIZE

    def mode_config(self, mode: str) -> VTokenConfig:
        """The settings in force in a mode."""
        if mode not in EVICTING_MODES:
            return VTokenConfig(mode=mode, seed=self.config.seed)
        return self.config.model_copy(update={"mode": mode})

    def engine_settings(self, concurrency: int, num_tokens: int) -> EngineSettings:
        """An engine with room for all requests at full length: none waits, none is preempted.

        Args:
            num_tokens: of the longest request, prompt and output.
        """
        e, length = self.engine, num_tokens + self.block_size
        return replace(
            e,
            block_size=self.block_size,
            num_kv_blocks=e.num_kv_blocks or concurrency * (cdiv(length, self.block_size) + 2),
            max_model_len=e.max_model_len or length,
            max_num_seqs=max(concurrency, e.max_num_seqs or 0),
            max_num_batched_tokens=e.max_num_batched_tokens or max(2048, concurrency),
        )

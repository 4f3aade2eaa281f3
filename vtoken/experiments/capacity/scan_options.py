"""What a capacity scan is asked to do, and the checks that need no engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from vtoken.config import VTokenConfig
from vtoken.core.budget import peak_tokens
from vtoken.engine.settings import EngineSettings
from vtoken.errors import ConfigError, nearest
from vtoken.experiments.planning.search import AUTO, parse_concurrency
from vtoken.experiments.planning.series import Series
from vtoken.experiments.report.results import settings_row
from vtoken.modes import EVICTING_MODES, MODES
from vtoken.policies.base import ScoreKind, score_window
from vtoken.policies.registry import policy_class
from vtoken.units import cdiv, check_least

DEFAULT_MODES = ("native", "naive", "vtoken")
DEFAULT_POLICY = "random"
DEFAULT_PROMPT_LEN = 256
DEFAULT_OUTPUT_LEN = 768
DEFAULT_TIME_LIMIT_S = 300.0
NATIVE_PEAKS = 6.5  # a bare scan's measured pool, in full-length requests


@dataclass(frozen=True, kw_only=True)
class ScanSettings:
    """Attributes:
    config: vToken's settings; its mode and policy are replaced by `modes` and `policies`.
    engine: what engines are built from. Neither blocks nor bytes given: a bare scan.
    concurrency: "auto", or a list as in `parse_concurrency`.
    prompt_len, output_len: tokens; None takes 256 and 768, or the dataset's own lengths.
    dataset_path: prompts of its own length, or cut from its text where `prompt_len` is given.
    repeats: runs of each point; each has prompts of its own.
    time_limit_s: no measured point starts that would overrun it, from the first engine's start;
        a dry half may take a quarter of it. None is no limit.
    dry_run: no model: vLLM's scheduler and block pool alone.
    replay_scores: file of recorded scores that dry runs take; None: random ones.
    """

    config: VTokenConfig = field(default_factory=VTokenConfig)
    engine: EngineSettings = field(default_factory=EngineSettings)
    modes: tuple[str, ...] = DEFAULT_MODES
    policies: tuple[str, ...] = (DEFAULT_POLICY,)
    concurrency: str = AUTO
    prompt_len: int | None = None
    output_len: int | None = None
    dataset_path: str | None = None
    repeats: int = 1
    time_limit_s: float | None = None
    dry_run: bool = False
    replay_scores: str | None = None

    def __post_init__(self) -> None:
        for mode in self.modes:
            if mode not in MODES:
                raise ConfigError("--mode", mode, nearest(mode, MODES))
        if not self.modes or not self.policies:
            raise ConfigError("--mode and --policy", (self.modes, self.policies), "at least one")
        parse_concurrency(self.concurrency)
        check_least(self.prompt_len, "--prompt-len")
        check_least(self.output_len, "--output-len")
        check_least(self.repeats, "--repeats")
        if self.time_limit_s is not None and self.time_limit_s <= 0:
            raise ConfigError("--time-limit", self.time_limit_s, "a duration above 0, such as 5m")
        if self.dry_run and self.config.record_scores:
            raise ConfigError(
                "--record-scores", self.config.record_scores,
                "not together with --dry-run: there is no attention to record scores of",
            )  # fmt: skip
        # The policy's name and the budget's floor; the block size moves the floor, so that the
        # real one is checked again when it is known.
        self.check_budgets(self.engine.block_size or 16)

    @property
    def is_bare(self) -> bool:
        """No pool was given: vLLM's own is modelled, a small one measured."""
        given = (self.engine.num_kv_blocks, self.engine.kv_cache_memory_bytes)
        return not self.dry_run and given == (None, None)

    @property
    def uses_dataset_lengths(self) -> bool:
        return self.dataset_path is not None and self.prompt_len is None

    @property
    def series(self) -> list[Series]:
        """All lines of the scan; modes that do not evict come once."""
        lines: dict[Series, None] = {}
        for mode in self.modes:
            for policy in self.policies if mode in EVICTING_MODES else ("",):
                lines[Series(mode, policy)] = None
        return list(lines)

    def check_budgets(self, block_size: int) -> None:
        """Check policies and budgets against a block size."""
        for line in self.series:
            line.config(self.config).make_budget(block_size)

    def blocks_per_request(self, line: Series, num_tokens: int, block_size: int) -> int:
        """Blocks one request of this final length needs at its peak, before it can be refused."""
        config = line.config(self.config)
        budget = config.make_budget(block_size) if line.mode == "vtoken" else None
        return cdiv(peak_tokens(budget, num_tokens, block_size), block_size)

    def expected_frontier(
        self, line: Series, num_tokens: int, num_blocks: int, block_size: int
    ) -> int:
        """Where the frontier should lie by arithmetic: the pool over one request's steady peak."""
        config = line.config(self.config)
        peak = num_tokens
        if line.mode == "vtoken":
            peak = peak_tokens(config.make_budget(block_size), num_tokens)
            num_blocks -= int(config.low_watermark_frac * num_blocks)  # not given to admissions
        return max(1, num_blocks // cdiv(peak, block_size))

    def score_rows(self) -> list[dict[str, object]]:
        """What each policy's scores are made of, and where dry runs take theirs from."""
        rows = []
        for policy in dict.fromkeys(line.policy for line in self.series if line.policy):
            kind = policy_class(policy).score_kind
            row = {"policy": policy, **score_window(kind, self.config.score_queries)}
            if kind is not ScoreKind.NONE:
                row["dry_runs_take"] = "recorded scores" if self.replay_scores else "random scores"
            rows.append(row)
        return rows

    def row(self) -> dict[str, object]:
        """The complete configuration, as a result file has it."""
        return {"model": self.engine.model, **settings_row(self)}

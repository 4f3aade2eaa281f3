"""What a benchmark is asked to do, and the checks that need no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from vtoken.config import VTokenConfig
from vtoken.engine.settings import EngineSettings
from vtoken.errors import ConfigError, nearest
from vtoken.experiments.bench.suites import BY_NAME_ONLY, SUITES
from vtoken.experiments.planning.search import parse_concurrency
from vtoken.modes import EVICTING_MODES, MODES
from vtoken.units import check_least

DEFAULT_RATIO = 0.5
DEFAULT_RATIOS = (0.3, 0.5, 0.7)
DEFAULT_POLICIES = ("h2o", "scissorhands", "random")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way of running requests: what is compared with what.

    Attributes:
        mode, policy: policy is "" where the mode does not evict.
        changes: further VTokenConfig fields of this case.
        block_size: tokens; None: the session's.
    """

    mode: str
    policy: str = ""
    changes: Mapping[str, object] = field(default_factory=dict)
    block_size: int | None = None

    def config(self, base: VTokenConfig) -> VTokenConfig:
        """vToken's settings for this case."""
        fields = base.model_dump(exclude_unset=True) | dict(self.changes)
        if "eviction_ratio" in self.changes:
            fields.pop("kv_budget_tokens", None)
        if "kv_budget_tokens" in self.changes:
            fields.pop("eviction_ratio", None)
        fields["mode"] = self.mode
        if self.policy:
            fields["policy"] = self.policy
        return VTokenConfig.from_mapping(fields)

    def with_mode(self, mode: str) -> Case:
        policy = self.policy if mode in EVICTING_MODES else ""
        return replace(self, mode=mode, policy=policy)

    @property
    def key(self) -> str:
        """Names the case in journals."""
        parts = [self.mode, self.policy, *(f"{k}={v}" for k, v in sorted(self.changes.items()))]
        return "/".join([p for p in parts if p] + [f"N{self.block_size}"] * bool(self.block_size))


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Attributes:
    suites: which of `SUITES`, or "all".
    config: vToken's settings; mode and policy are replaced by `modes` and `policies`.
    engine: what engines are built from; with a number of blocks, the pool of every suite but
        `sla`, which measures its own.
    modes, policies: what is compared; no policies: the suite's own.
    workloads: names or files, as `workloads.make_workload` reads them.
    prompt_len, output_len: tokens of the workloads that do not say.
    num_requests: requests of a run; None: the suite's own.
    concurrency: "auto", or a list as `parse_concurrency` reads it; None: the suite's own.
    repeats: pairs of every comparison.
    ratios: eviction ratios of the memory suite; of quality the budgets are 1 - ratio.
    goodput_ms: limits by metric for `request_goodput`.
    request_rate: requests per second, open loop; None: closed loop.
    slo_p95_e2el_ms: an absolute limit instead of 1.05 x naive's at the reference.
    peers: "NAME=PYTHON" by name: the interpreter of another environment.
    clock: "wall", or "cpu": this process's CPU time, on machines that others use as well.
    dry_run: vLLM's scheduler and block pool with no model; counts only.
    """

    suites: tuple[str, ...] = ("memory",)
    config: VTokenConfig = field(default_factory=VTokenConfig)
    engine: EngineSettings = field(default_factory=EngineSettings)
    modes: tuple[str, ...] = ("native", "naive", "vtoken")
    policies: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    prompt_len: int | None = None
    output_len: int | None = None
    num_requests: int | None = None
    concurrency: str | None = None
    repeats: int = 3
    ratios: tuple[float, ...] = ()
    ref_concurrency: int = 8
    sla_factor: float = 1.05
    pool_fracs: tuple[float, ...] = (1.0, 0.75)
    slo_p95_e2el_ms: float | None = None
    goodput_ms: Mapping[str, float] = field(default_factory=dict)
    request_rate: float | None = None
    burstiness: float = 1.0
    block_sizes: tuple[int, ...] = (16, 32, 48, 64)
    thresholds: tuple[float, ...] = (0.0, 0.1, 0.3, 0.5)
    degrees: tuple[int, ...] = (1, 2, 4, 8)
    prefix_len: int | None = None
    suffix_len: int | None = None
    peers: Mapping[str, str] = field(default_factory=dict)
    peer_args: Mapping[str, object] = field(default_factory=dict)
    clock: str = "wall"
    dry_run: bool = False

    def __post_init__(self) -> None:
        known = (*SUITES, "all")
        for suite in self.suites:
            if suite not in known:
                hint = nearest(suite, known)
                listed = "" if hint.startswith("one of") else f" There are {', '.join(known)}"
                raise ConfigError("--suite", suite, hint + listed)
        for mode in self.modes:
            if mode not in MODES:
                raise ConfigError("--mode", mode, nearest(mode, MODES))
        if self.concurrency is not None:
            parse_concurrency(self.concurrency)
        self._check_numbers()
        self.check_budgets(self.engine.block_size or 16)

    def _check_numbers(self) -> None:
        for option, value in (
            ("--prompt-len", self.prompt_len),
            ("--output-len", self.output_len),
            ("--num-prompts", self.num_requests),
            ("--repeats", self.repeats),
            ("--ref-concurrency", self.ref_concurrency),
            ("--prefix-len", self.prefix_len),
            ("--suffix-len", self.suffix_len),
            *(("--sharing-degrees", degree) for degree in self.degrees),
        ):
            check_least(value, option)
        for block_size in self.block_sizes:
            if block_size < 16 or block_size % 16:
                raise ConfigError("--block-sizes", block_size, "multiples of 16 tokens")
        for option, values in (("--ratios", self.ratios), ("--thresholds", self.thresholds)):
            for value in values:
                if not 0 <= value < 1:
                    raise ConfigError(option, value, "fractions from 0 to below 1")
        for option, value in (
            ("--sla-factor", self.sla_factor),
            ("--slo-p95", self.slo_p95_e2el_ms),
            ("--request-rate", self.request_rate),
            ("--burstiness", self.burstiness),
            *(("--pool-fracs", frac) for frac in self.pool_fracs),
        ):
            if value is not None and not value > 0:
                raise ConfigError(option, value, "a number above 0")

        if self.clock not in ("wall", "cpu"):
            raise ConfigError("--clock", self.clock, "wall or cpu")
        if self.clock == "cpu" and self.request_rate is not None:
            raise ConfigError(
                "--clock", self.clock, "wall with --request-rate: arrivals are wall time"
            )

    def check_budgets(self, block_size: int) -> None:
        """Check policies and budgets."""
        for policy in self.policies or DEFAULT_POLICIES:
            Case(mode="vtoken", policy=policy).config(self.config).make_budget(block_size)

    @property
    def chosen_suites(self) -> tuple[str, ...]:
        """The suites to run, in their order; see `BY_NAME_ONLY` for `all`."""
        wanted = set(self.suites)
        if "all" in wanted:
            wanted |= set(SUITES) - set(BY_NAME_ONLY) | ({"peers"} if self.peers else set())
        return tuple(suite for suite in SUITES if suite in wanted)

    @property
    def points(self) -> tuple[int, ...] | None:
        """The concurrencies that were asked for; None: not given, or auto."""
        return None if self.concurrency is None else parse_concurrency(self.concurrency)

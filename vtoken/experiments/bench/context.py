"""What all suites share: the model, its tokenizer and workloads, the journal, and engines."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vtoken.engine import StepEngine, open_engine
from vtoken.errors import ConfigError
from vtoken.experiments.bench.bench_options import DEFAULT_POLICIES, BenchSettings, Case
from vtoken.experiments.bench.journal import Journal
from vtoken.experiments.bench.named_workloads import Workload, make_workload
from vtoken.experiments.bench.open_engines import Pool, Session
from vtoken.experiments.bench.pairing import PairRunner
from vtoken.experiments.planning.dry_engines import open_dry_engine
from vtoken.experiments.planning.find_model import find_shape, load_tokenizer
from vtoken.experiments.planning.model_shapes import ModelShape
from vtoken.experiments.report.listener import Bar, Listener
from vtoken.modes import EVICTING_MODES, MODES
from vtoken.units import cdiv

PROMPT_LEN, OUTPUT_LEN = 128, 64  # of workloads that have no lengths, where none are given


@dataclass
class SuiteResult:
    """Attributes:
    rows: the contract's flat rows.
    tables: further tables by name, for CSV files and plots.
    notes: what the rows do not say, as sentences.
    advice: what to do, from measured points.
    nothing_met: the suite had a limit, and nothing met it.
    """

    rows: list[dict[str, object]] = field(default_factory=list)
    tables: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    nothing_met: bool = False


class Context:
    """Opened for one benchmark; closes what it opened.

    Args:
        open_real, open_dry: make engines; tests give others.
        journal: runs measured already, and where new ones are kept.
    """

    def __init__(
        self,
        settings: BenchSettings,
        journal: Journal,
        listener: Listener,
        bar: Bar,
        *,
        open_real: Callable[..., StepEngine] = open_engine,
        open_dry: Callable[..., StepEngine] = open_dry_engine,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self.journal = settings, journal
        self.listener, self.bar = listener, bar
        self._open_real, self._open_dry, self.clock = open_real, open_dry, clock
        self._shape: ModelShape | None = None
        self._model = settings.engine.model
        self._tokenizer = None
        self._workloads: dict[str, Workload] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="vtoken-bench-")
        self._block_size: int | None = None

    # ---- the model ---------------------------------------------------------------------------

    @property
    def shape(self) -> ModelShape:
        """The model's shape."""
        if self._shape is None:
            self._shape, self._model = find_shape(
                self.settings.engine.model, needs_weights=not self.settings.dry_run
            )
        return self._shape

    @property
    def model_path(self) -> str:
        assert self.shape
        return self._model

    def tokenizer(self):
        """The model's tokenizer."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.settings.engine.model, self.model_path)
        return self._tokenizer

    @property
    def block_size(self) -> int:
        """Tokens per block where the user gave none: the smallest that all modes take."""
        if self._block_size is None:
            given = self.settings.engine.block_size
            if given is not None or self.settings.dry_run:
                self._block_size = given or 16
            else:
                self._block_size = self._platform_block_size()
            self.settings.check_budgets(self._block_size)
        return self._block_size

    def _platform_block_size(self) -> int:
        from vtoken.engine.cpu import default_block_size, engine_runs_on_cpu

        return default_block_size(self.settings.config) if engine_runs_on_cpu() else 16

    # ---- workloads ---------------------------------------------------------------------------

    def workloads(
        self, default: Sequence[str], largest_run: int, notes: list[str]
    ) -> list[Workload]:
        """The workloads that were asked for, or a suite's own.

        Args:
            largest_run: requests of the suite's largest run, which has all repeats.
            notes: told what was left out of a dataset.

        Raises:
            ConfigError: no such workload, longer than the model takes, or a dataset that has too
                few rows.
        """
        found = [self._workload(text) for text in self.settings.workloads or default]
        for workload in found:
            workload.check_rows(largest_run, self.settings.repeats)
        notes += [workload.note for workload in found if workload.note]
        return found

    def _workload(self, text: str) -> Workload:
        if text not in self._workloads:
            self._workloads[text] = self._make_workload(text)
        return self._workloads[text]

    def _make_workload(self, text: str) -> Workload:
        settings = self.settings
        workload = make_workload(
            text,
            prompt_len=settings.prompt_len or PROMPT_LEN,
            output_len=settings.output_len or OUTPUT_LEN,
            get_tokenizer=self.tokenizer,
            is_text_needed=not settings.dry_run,
            vocab_size=self.shape.vocab_size,
            seed=settings.engine.seed,
            max_len=self.max_len,
        )
        self.check_length(workload.max_tokens)
        if settings.request_rate is None:
            return workload
        return workload.arriving(settings.request_rate, settings.burstiness, settings.engine.seed)

    @property
    def max_len(self) -> int:
        """Prompt and output tokens of the longest request that the model and the user allow."""
        longest = self.shape.max_model_len
        return min(self.settings.engine.max_model_len or longest, longest)

    def check_length(self, num_tokens: int) -> None:
        """Refuse requests that the model or the user's own limit does not take."""
        given, longest = self.settings.engine.max_model_len, self.shape.max_model_len
        if given is not None and given < num_tokens:
            raise ConfigError(
                "--max-model-len", given, f"at least {num_tokens}, the longest request"
            )
        if num_tokens > longest:
            raise ConfigError(
                "--workload", f"{num_tokens:,} tokens", f"at most {longest:,}, what the model takes"
            )

    # ---- engines -----------------------------------------------------------------------------

    def session(
        self,
        *,
        max_tokens: int,
        max_num_seqs: int,
        caching: bool = False,
        max_open: int = 2,
        max_batched_tokens: int | None = None,
    ) -> Session:
        """Engines for requests of at most this length."""
        # One more than needed: a request that may fill the model's length counts as one of
        # unknown length, and admission would then depend on what ran before.
        longest = min(max_tokens + 1, self.shape.max_model_len)
        engine = self.settings.engine
        if max_batched_tokens is not None:
            engine = replace(engine, max_num_batched_tokens=max_batched_tokens)
        return Session(
            engine, self.settings.config, max_model_len=longest,
            max_num_seqs=max_num_seqs, prefix_caching=caching, max_open=max_open,
            dry_run=self.settings.dry_run, open_real=self._open_real, open_dry=self._open_dry,
        )  # fmt: skip

    def runner(self, session: Session) -> PairRunner:
        return PairRunner(self.settings, session, self.journal, self.bar, Path(self._folder.name))

    def ample_pool(self, num_requests: int, max_tokens: int, block_size: int | None = None) -> Pool:
        """The pool that was given, or one in which nothing is ever short."""
        size = block_size or self.block_size
        blocks = self.settings.engine.num_kv_blocks or num_requests * cdiv(max_tokens, size) + 1
        return Pool(num_kv_blocks=blocks, block_size=size)

    def policies(self, default: Sequence[str] = DEFAULT_POLICIES) -> tuple[str, ...]:
        """The policies that were asked for, or a suite's own."""
        return self.settings.policies or tuple(default)

    def cases(self, modes: Sequence[str], policies: Sequence[str], **changes) -> list[Case]:
        """Cases in the order of their turns: modes that do not evict once, then by policy."""
        plain = [Case(mode=mode) for mode in MODES if mode in modes and mode not in EVICTING_MODES]
        evicting = [
            Case(mode=mode, policy=policy, changes=changes)
            for policy in policies
            for mode in EVICTING_MODES
            if mode in modes
        ]
        return plain + evicting

    def close(self) -> None:
        self._folder.cleanup()

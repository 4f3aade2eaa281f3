"""Plan without a device: frontiers and needs for a device and a model that are not here.

    scan = PlannedScan(settings, plan, cost)      # a CapacityScan in the pool of a MemoryPlan
    result = scan.run()
    rows = needs_for(settings, plan, num_requests=16, context_tokens=16384)

vLLM's scheduler and block pool are real; the pool's size comes from a memory model
(`devices.plan_memory`) and times from a cost model. Everything is marked `modelled`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from vtoken.errors import ConfigError
from vtoken.experiments.capacity.engines import DryEngines
from vtoken.experiments.capacity.point import PointRun
from vtoken.experiments.capacity.pools import Host, Pool
from vtoken.experiments.capacity.recorded_scores import is_scored, score_free_policies
from vtoken.experiments.capacity.scan import CapacityScan
from vtoken.experiments.capacity.scan_options import ScanSettings
from vtoken.experiments.capacity.scan_result import ScanHalf
from vtoken.experiments.planning.devices import (
    MemoryPlan,
    get_device,
    need_memory,
    plan_memory,
)
from vtoken.experiments.planning.model_shapes import get_model_shape
from vtoken.experiments.planning.modelled_clock import ModelledClock, StepCost
from vtoken.experiments.planning.series import Series
from vtoken.units import cdiv

BATCHED_TOKENS = 8192  # vLLM's default on large devices, and the overhead rule's


def check_score_free(settings: ScanSettings) -> None:
    """Refuse policies that need attention scores unless some were recorded: a dry run has none."""
    if settings.replay_scores is not None:
        return  # checked against the policies once the pool is known
    for line in settings.series:
        if line.policy and is_scored(line.policy):
            raise ConfigError(
                "--policy", line.policy,
                f"one of {', '.join(score_free_policies())} in a dry run: there is no attention whose scores "
                "it could use, and no --replay-scores file was given",
            )  # fmt: skip


def plan_for(settings: ScanSettings, device: str) -> MemoryPlan:
    """The memory plan of the settings' model on a device.

    Raises:
        ConfigError: an unknown device or model, or weights that do not fit.
    """
    engine = settings.engine
    model = get_model_shape(engine.model).with_dtype(engine.dtype or "auto")
    share = engine.gpu_memory_utilization
    return plan_memory(
        get_device(device),
        model,
        **({} if share is None else {"gpu_mem_util": share}),
        block_size=engine.block_size or 16,
        tensor_parallel_size=engine.tensor_parallel_size or 1,
        kv_cache_memory_bytes=engine.kv_cache_memory_bytes,
        num_kv_blocks=engine.num_kv_blocks,
    )


class PlannedScan(CapacityScan):
    """A dry capacity scan in the pool of a memory plan, with modelled throughput.

    Args:
        settings: `dry_run` is implied.
        cost: gives each point a modelled throughput; None: no times at all.
        options: as for `CapacityScan`.
    """

    def __init__(
        self, settings: ScanSettings, plan: MemoryPlan, cost: StepCost | None = None, **options
    ) -> None:
        check_score_free(settings)
        settings = replace(
            settings,
            dry_run=True,
            engine=replace(settings.engine, block_size=plan.block_size),
        )
        host = Host(is_cpu=False, memory_bytes=0, max_batched_tokens=BATCHED_TOKENS)
        super().__init__(settings, shape=plan.model, host=host, **options)
        self.plan, self.cost = plan, cost
        self._clocks: list[ModelledClock] = []
        self._open_dry = self._open_fast

    def _choose_pools(self, block_size: int) -> None:
        details = {k: v for k, v in self.plan.row().items() if k != "block_size"}
        details.pop("num_usable_blocks")
        pool = Pool(
            usable_blocks=self.plan.num_usable_blocks, block_size=block_size,
            how=self.plan.describe()[0], details=details,
        )  # fmt: skip
        self._check_pool(pool)
        self.result.main = ScanHalf(pool, modelled=True)
        self.result.notes += self.plan.describe()[1:2]
        if self.cost is not None:
            self.result.notes.append(
                f"throughput is modelled with the cost profile {self.cost.profile.name}, not measured"
            )

    def _open_fast(self, settings, config, *, score_source=None):
        from vtoken.engine.dry import DryEngine

        # Prompts differ, so a prefix cache could only cost time here.
        settings = replace(settings, fast_forward=True, enable_prefix_caching=False)
        engine = DryEngine(settings, config, score_source=score_source)
        if self.cost is not None:
            self._clocks = [ModelledClock(engine, self.cost)]
        return engine

    def _run_dry(self, engines: DryEngines, line: Series, concurrency: int) -> PointRun:
        run = super()._run_dry(engines, line, concurrency)
        if self._clocks and run.point.feasible:
            tokens = run.point.metrics["total_output_tokens"] * run.point.metrics["repeats"]
            rate = tokens / self._clocks[0].busy_s
            run.point = replace(run.point, output_throughput=rate)
        return run


# ---- the inverse question ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a mode needs so that a number of requests is resident at once.

    Attributes:
        blocks_per_request: at its peak.
        num_blocks: for all of them at their peaks at once.
        gpu_mem_util: share of the device that leaves them; above 1 it does not fit.
    """

    mode: str
    policy: str
    num_requests: int
    context_tokens: int
    blocks_per_request: int
    num_blocks: int
    kv_gib: float
    gpu_mem_util: float
    fits: bool

    def row(self) -> dict[str, object]:
        return asdict(self) | {"modelled": True}


def needs_for(
    settings: ScanSettings, plan: MemoryPlan, *, num_requests: int, context_tokens: int
) -> list[Need]:
    """Invert the scan: blocks, GiB and utilisation that each mode needs.

    By arithmetic: every request at its peak at once. `naive` is planned like `native`: whether a
    block happens to die whole is chance, and nothing to plan on.

    Raises:
        ConfigError: a number below 1, or a context longer than the model takes.
    """
    if num_requests < 1:
        raise ConfigError("--target-concurrency", num_requests, "a whole number, 1 or more")
    if not 1 < context_tokens <= plan.model.max_model_len:
        raise ConfigError(
            "--target-context", context_tokens,
            f"from 2 to {plan.model.max_model_len:,} tokens, what {plan.model.name} takes",
        )  # fmt: skip
    needs = []
    for line in settings.series:
        blocks = settings.blocks_per_request(line, context_tokens, plan.block_size)
        total = num_requests * blocks
        memory = need_memory(
            plan.device, plan.model, total, block_size=plan.block_size,
            tensor_parallel_size=plan.tensor_parallel_size, overhead=plan.overhead_rule,
        )  # fmt: skip
        needs.append(
            Need(
                mode=line.mode, policy=line.policy, num_requests=num_requests,
                context_tokens=context_tokens, blocks_per_request=blocks, num_blocks=total,
                kv_gib=memory.kv_gib, gpu_mem_util=memory.gpu_mem_util, fits=memory.fits,
            )
        )  # fmt: skip
    return needs


def need_sentence(needs: Sequence[Need], plan: MemoryPlan) -> str:
    """The answer: "16 requests of 16,384 tokens on h100-80g need ..."."""
    first = needs[0]
    parts = []
    for need in needs:
        where = f"{need.gpu_mem_util:.4g}" if need.fits else "more than the device has"
        parts.append(f"{need.mode} {need.kv_gib:.1f} GiB (--gpu-mem-util {where})")
    return (
        f"{first.num_requests:,} requests of {first.context_tokens:,} tokens at once of "
        f"{plan.model.name} on {plan.device.name} need {', '.join(parts)} of KV cache; modelled."
    )


def case_rows(
    case: Mapping[str, object],
    settings: ScanSettings,
    plan: MemoryPlan,
    frontier: Sequence[Mapping[str, object]],
) -> list[dict[str, object]]:
    """Rows of a published table's case: the published figure, ours, and the packed ideal.

    The ideal is the pool over the blocks of one request at its final length: all its tokens in
    `native` and `naive`'s full retention, its budget where survivors are packed.
    """
    tokens = (settings.prompt_len or 256) + (settings.output_len or 768)
    published = case.get("paper") or {}
    rows = []
    for found in frontier:
        line = Series(str(found["mode"]), str(found["policy"]))
        kept = tokens
        if line.mode == "vtoken":
            kept = int(line.config(settings.config).make_budget(plan.block_size).tokens(tokens))
        rows.append(
            {
                "case": case.get("name", plan.model.name),
                **found,
                "usable_blocks": plan.num_usable_blocks,
                "prompt_len": settings.prompt_len,
                "output_len": settings.output_len,
                "paper": published.get(line.mode),
                "ideal": plan.num_usable_blocks // cdiv(kept, plan.block_size),
                "modelled": True,
            }
        )
    return rows


def boundary_rows(
    points: Sequence[Mapping[str, object]], frontier: Sequence[Mapping[str, object]]
) -> list[dict[str, object]]:
    """Each mode's throughput at its boundary against its own peak over the points that were run."""
    rows = []
    for found in frontier:
        timed = [
            p
            for p in points
            if (p["mode"], p["policy"]) == (found["mode"], found["policy"])
            and p["feasible"]
            and p["output_throughput"]
        ]
        if not timed:
            continue
        peak = max(timed, key=lambda p: p["output_throughput"])
        edge = max(timed, key=lambda p: p["concurrency"])
        rows.append(
            {
                "mode": found["mode"],
                "policy": found["policy"],
                "boundary_concurrency": edge["concurrency"],
                "boundary_throughput": edge["output_throughput"],
                "peak_concurrency": peak["concurrency"],
                "peak_throughput": peak["output_throughput"],
                "boundary_of_peak_frac": edge["output_throughput"] / peak["output_throughput"],
                "modelled": True,
            }
        )
    return rows

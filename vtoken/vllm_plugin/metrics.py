"""vLLM's stat logger plugin: `vtoken_*` on /metrics, and a line in the log beside vLLM's.

One instance per engine in every front end process. What it gets are the figures that
`vtoken.server.stats` put into vLLM's own message; without vToken in the engine there are none and
nothing is registered.
"""

from __future__ import annotations

from collections import Counter as Tally

import prometheus_client
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase

from vtoken.server.stats import split

logger = init_logger("vllm.vtoken")

LABELS = ("model_name", "engine")

# wire name -> (metric, what it says); prometheus_client adds _total to a counter's name.
COUNTERS = {
    "evicted_tokens": ("vtoken_evicted_tokens", "Tokens dropped by the eviction policy."),
    "moved_tokens": ("vtoken_moved_tokens", "Tokens whose K and V were copied to another slot."),
    "released_blocks": ("vtoken_released_blocks", "KV blocks given back to the pool by reclaim."),
    "reused_slots": ("vtoken_reused_slots", "New tokens that took the slot of a dead one."),
    "relocation_events": (
        "vtoken_relocation_events",
        "Requests in a step whose KV moved or whose blocks were released.",
    ),
    "invariant_violations": (
        "vtoken_invariant_violations",
        "Broken invariants found by the sampled check.",
    ),
}
GAUGES = {
    "live_tokens": ("vtoken_live_tokens", "Tokens attended and resident."),
    "dead_tokens": ("vtoken_dead_tokens", "Dead slots inside blocks that requests own."),
    "headroom_blocks": (
        "vtoken_headroom_blocks",
        "Free KV blocks that running requests can take before anything must be reclaimed.",
    ),
}
FRAGMENTATION = ("vtoken_fragmentation_ratio", "Dead slots over live and dead ones.")
HISTOGRAMS = {
    "plan_ns": ("vtoken_plan_seconds", "Time of a scheduler step spent on planning."),
    "relocation_ns": (
        "vtoken_relocation_seconds",
        "Time a worker spent on the copies of a step (on a GPU: on launching them).",
    ),
}
BUCKETS_S = (
    2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.25, 1.0,
)  # fmt: skip

_metrics: dict[str, object] = {}


def _registered() -> dict[str, object]:
    """The process's metrics; registered once, whatever the number of engines."""
    if not _metrics:
        for key, (name, text) in COUNTERS.items():
            _metrics[key] = prometheus_client.Counter(name, text, LABELS)
        for key, (name, text) in (*GAUGES.items(), ("fragmentation", FRAGMENTATION)):
            # Several front ends: the one that heard last is right.
            _metrics[key] = prometheus_client.Gauge(
                name, text, LABELS, multiprocess_mode="mostrecent"
            )
        for key, (name, text) in HISTOGRAMS.items():
            _metrics[key] = prometheus_client.Histogram(name, text, LABELS, buckets=BUCKETS_S)
    return _metrics


class VTokenStatLogger(StatLoggerBase):
    """Figures of one engine."""

    def __init__(self, vllm_config, engine_index: int = 0) -> None:
        from vtoken.vllm_plugin.settings import config_of

        self.engine_index = engine_index
        self.enabled = config_of(vllm_config) is not None
        # With several front ends each sees a part of the messages: a line would mislead.
        self.logs = getattr(vllm_config.parallel_config, "_api_process_count", 1) <= 1
        self.totals: Tally = Tally()
        self.gauges: dict[str, int] = {}
        self._logged: Tally = Tally()
        self._children: dict[str, object] = {}
        if self.enabled:
            model = vllm_config.model_config.served_model_name
            labels = (model, str(engine_index))
            self._children = {k: m.labels(*labels) for k, m in _registered().items()}

    def record(
        self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is None:
            return
        figures = split(scheduler_stats.num_kv_fetch_reqs_by_stage)
        if not (figures and self.enabled):
            return
        for key, value in figures.items():
            child = self._children.get(key)
            if key in COUNTERS:
                child.inc(value)
            elif key in GAUGES:
                child.set(value)
            elif key in HISTOGRAMS:
                child.observe(value * 1e-9)
                self.totals[key.removesuffix("_ns") + "_steps"] += 1
        gauges = {k: v for k, v in figures.items() if k in GAUGES or k == "running_requests"}
        if gauges:
            self.gauges = gauges
            self._children["fragmentation"].set(self.fragmentation_ratio)
        self.totals.update({k: v for k, v in figures.items() if k not in gauges})

    @property
    def fragmentation_ratio(self) -> float:
        """Dead slots over live and dead ones; 0 when there is neither."""
        dead = self.gauges.get("dead_tokens", 0)
        held = dead + self.gauges.get("live_tokens", 0)
        return dead / held if held else 0.0

    def log(self) -> None:
        if not (self.enabled and self.logs and self.gauges):
            return
        new = self.totals - self._logged
        self._logged = Tally(self.totals)
        steps = new["plan_steps"]
        write = logger.info if steps else logger.debug  # an idle server stays quiet
        write("%s", self._line(new))

    def _line(self, new: Tally) -> str:
        g, steps = self.gauges, new["plan_steps"]
        parts = [
            f"Engine {self.engine_index:03d}: vToken: live {g.get('live_tokens', 0)} tokens",
            f"dead {g.get('dead_tokens', 0)} ({100 * self.fragmentation_ratio:.1f}%)",
            f"evicted {new['evicted_tokens']} (total {self.totals['evicted_tokens']})",
            f"moved {new['moved_tokens']}",
            f"slots reused {new['reused_slots']}",
            f"blocks released {new['released_blocks']}",
            f"free blocks {g.get('headroom_blocks', 0)}",
            f"preemptions {new['preemptions']}",
        ]
        if steps:
            parts.append(f"planning {new['plan_ns'] / steps / 1e6:.3f} ms a step")
        if self.totals["invariant_violations"]:
            parts.append(f"BROKEN INVARIANTS {self.totals['invariant_violations']}")
        return ", ".join(parts)

    def log_engine_initialized(self) -> None:
        """vLLM says what there is to say."""

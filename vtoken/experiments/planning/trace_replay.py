"""Replay a trace on the real scheduler in modelled time: what each mode makes of real traffic.

    replay = replay_trace(requests, plan, cost, line, config)
    replay.row()       # peak residents, preemptions, queueing, hits, latencies: one flat row
    replay.demand      # rows for `plots.demand_over_time`

Requests arrive when the trace says, in modelled seconds. What they share is what the trace's prefix
hashes say; the answers of earlier turns are not in the cache under names that later turns know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.engine.dry import DrySettings
from vtoken.errors import ConfigError
from vtoken.experiments.planning.devices import MemoryPlan
from vtoken.experiments.planning.modelled_clock import StepCost
from vtoken.experiments.planning.replicas import Replica, RequestOutcome
from vtoken.experiments.planning.series import Series
from vtoken.modes import EVICTING_MODES
from vtoken.workloads.request import WorkloadRequest

BATCHED_TOKENS = 8192


@dataclass(frozen=True, kw_only=True)
class TraceSetup:
    """What all modes of a replay have in common.

    Attributes:
        plan: pool of one replica.
        max_num_seqs, max_num_batched_tokens: as in vLLM.
    """

    plan: MemoryPlan
    cost: StepCost
    config: VTokenConfig
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = BATCHED_TOKENS

    def replica(self, line: Series, requests: Sequence[WorkloadRequest]) -> Replica:
        """An idle replica for these requests."""
        longest = max(r.prompt_len + r.output_len for r in requests)
        settings = DrySettings(
            num_kv_blocks=self.plan.num_usable_blocks,
            block_size=self.plan.block_size,
            # A request that may fill the model's length counts as one of unknown length.
            max_model_len=longest + 1,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            # Without hashes nothing is shared, and a cache would only cost time here.
            enable_prefix_caching=any(r.prefix_hash_ids for r in requests),
            fast_forward=True,
        )
        config = None if line.mode == "native" else line.config(self.config)
        return Replica(settings, config, self.cost)


@dataclass(frozen=True, kw_only=True)
class Slo:
    """What counts as served in time.

    Attributes:
        ttft_s, tpot_s: most seconds to the first token, and per token after it (mean of a
            request); None: not asked.
        share: of all requests that must be in time.
    """

    ttft_s: float | None = 5.0
    tpot_s: float | None = 0.05
    share: float = 0.95

    def __post_init__(self) -> None:
        for option, value in (("--slo-ttft", self.ttft_s), ("--slo-tpot", self.tpot_s)):
            if value is not None and not value > 0:
                raise ConfigError(option, value, "seconds above 0")
        if not 0 < self.share <= 1:
            raise ConfigError("--slo-share", self.share, "a share above 0 and up to 1")

    def is_met_by(self, outcome: RequestOutcome) -> bool:
        if outcome.rejected or outcome.finished_s is None:
            return False
        return (self.ttft_s is None or outcome.ttft_s <= self.ttft_s) and (
            self.tpot_s is None or outcome.tpot_s <= self.tpot_s
        )

    def describe(self) -> str:
        limits = [
            f"{name} up to {1000 * value:,.0f} ms"
            for name, value in (("TTFT", self.ttft_s), ("TPOT", self.tpot_s))
            if value is not None
        ]
        return f"{' and '.join(limits) or 'any latency'} for {100 * self.share:g}% of requests"


@dataclass
class Replay:
    """Attributes:
    outcomes: of all requests, in order of arrival.
    demand: rows with time_s, blocks, running, waiting, mode, policy (of all replicas together).
    """

    line: Series
    workload: str
    num_replicas: int
    outcomes: list[RequestOutcome]
    replicas: list
    approximate: bool = False

    @property
    def demand(self) -> list[dict[str, object]]:
        head = {"mode": self.line.mode, "policy": self.line.policy}
        return [
            head
            | {
                "replica": number, "time_s": time_s, "blocks": blocks, "running": running,
                "waiting": waiting, "modelled": True,
            }
            for number, replica in enumerate(self.replicas)
            for time_s, blocks, running, waiting in replica.demand
        ]  # fmt: skip

    def met_share(self, slo: Slo) -> float:
        """Share of requests served in time; a rejected one is not."""
        return sum(map(slo.is_met_by, self.outcomes)) / len(self.outcomes)

    def row(self) -> dict[str, object]:
        """One flat row; times are modelled, counts are the real scheduler's."""
        done = [o for o in self.outcomes if o.finished_s is not None]
        stats = [r.stats for r in self.replicas]
        row: dict[str, object] = {
            "mode": self.line.mode,
            "policy": self.line.policy,
            "workload": self.workload,
            "replicas": self.num_replicas,
            "num_requests": len(self.outcomes),
            "completed": len(done),
            "rejected": sum(o.rejected for o in self.outcomes),
            "peak_residents": max(s.peak_running for s in stats),
            "vtoken_peak_blocks": max(s.peak_blocks for s in stats),
            "vtoken_preemptions": sum(s.preemptions for s in stats),
            "num_steps": sum(s.num_steps for s in stats),
            "modelled": True,
        }
        if self.approximate:
            row["approximate"] = True
        else:
            counters = [r.engine.counters for r in self.replicas]
            row["vtoken_evicted_tokens"] = sum(c.evicted_tokens for c in counters)
            row["vtoken_moved_tokens"] = sum(c.moved_tokens for c in counters)
        prompt = sum(o.request.prompt_len for o in done)
        row["prefix_hit_frac"] = sum(o.cached_tokens for o in done) / prompt if prompt else 0.0
        if done:
            first = min(o.arrival_s for o in self.outcomes)
            row["duration"] = max(o.finished_s for o in done) - first
            row["output_throughput"] = sum(o.request.output_len for o in done) / row["duration"]
            row["queued_frac"] = sum(o.queue_s > 1.0 for o in done) / len(done)
            for name, values in (
                ("queue", [o.queue_s for o in done]),
                ("ttft", [o.ttft_s for o in done]),
                ("tpot", [o.tpot_s for o in done]),
                ("e2el", [o.e2el_s for o in done]),
            ):
                row[f"mean_{name}_ms"] = 1000 * float(np.mean(values))
                row[f"p95_{name}_ms"] = 1000 * float(np.percentile(values, 95))
        return row


def replay_trace(
    setup: TraceSetup,
    line: Series,
    requests: Sequence[WorkloadRequest],
    *,
    replicas: int = 1,
    router=None,
    make_replica: Callable[[], object] | None = None,
    on_request: Callable[[int], None] | None = None,
) -> Replay:
    """Replay a trace on one replica, or on several behind a router.

    Args:
        requests: sorted by arrival.
        router: a `fleet.Router`; None where there is one replica.
        make_replica: other replicas than the real scheduler's (`fleet.ReplicaModel`).
        on_request: told how many requests have arrived.
    """
    check_arrivals(requests)
    make = make_replica or (lambda: setup.replica(line, requests))
    fleet = [make() for _ in range(replicas)]
    order = []
    for index, request in enumerate(requests):
        chosen = 0
        if router is not None:
            if router.looks_at_load:
                for replica in fleet:
                    replica.advance(request.arrival_s)
            chosen = router.choose(request, index, fleet)
        fleet[chosen].advance(request.arrival_s)
        fleet[chosen].submit(request, index)
        order.append(fleet[chosen].outcomes[request.request_id])
        if on_request is not None:
            on_request(index + 1)
    for replica in fleet:
        replica.advance()
    approximate = any(getattr(replica, "approximate", False) for replica in fleet)
    return Replay(line, requests[0].dataset, replicas, order, fleet, approximate)


def check_arrivals(requests: Sequence[WorkloadRequest]) -> None:
    """Refuse what cannot be replayed."""
    if not requests:
        raise ConfigError("--trace", "no requests", "a trace with at least one request")
    last_s = 0.0
    for request in requests:
        if request.arrival_s < last_s:
            what = "times from 0 on" if request.arrival_s < 0 else "requests sorted by time"
            raise ConfigError("--trace", f"{request.request_id} at {request.arrival_s:g} s", what)
        last_s = request.arrival_s


def trace_sentence(rows: Sequence[dict[str, object]], plan: MemoryPlan) -> str:
    """What the replay says, in one sentence."""
    parts = [
        f"{row['mode']} at most {row['peak_residents']:,} resident, "
        f"{row['vtoken_preemptions']:,} preemptions, "
        + (f"{row['vtoken_evicted_tokens']:,} tokens dropped, " if _drops(row) else "")
        + f"p95 queueing {row.get('p95_queue_ms', 0) / 1000:,.1f} s"
        + (f", {row['rejected']:,} rejected" if row["rejected"] else "")
        for row in rows
    ]
    return (
        f"{rows[0]['num_requests']:,} requests of {rows[0]['workload']} on {rows[0]['replicas']} x "
        f"{plan.device.name}: {'; '.join(parts)}; times are modelled."
    )


def _drops(row: dict[str, object]) -> bool:
    """Whether a row's mode drops tokens, and they were counted."""
    return row["mode"] in EVICTING_MODES and "vtoken_evicted_tokens" in row

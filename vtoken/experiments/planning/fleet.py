"""How many servers a trace needs: routers, an SLO, and the smallest fleet that meets it.

    need = size_fleet(setup, line, requests, Slo(ttft_s=2.0), router="least-loaded")

Replicas are real schedulers (`replicas.Replica`). For large fleets `approximate=True` replaces them
by `fleet_model.ReplicaModel`, calibrated on the real scheduler first; rows then say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vtoken.errors import ConfigError, nearest
from vtoken.experiments.planning.approximate_replica import Calibration, ReplicaModel
from vtoken.experiments.planning.series import Series
from vtoken.experiments.planning.trace_replay import Replay, Slo, TraceSetup, replay_trace
from vtoken.workloads.request import WorkloadRequest

MAX_REPLICAS = 1024
SAMPLE_REQUESTS = 400


class Router:
    """Sends each request to a replica, by its number."""

    looks_at_load = True

    def choose(self, request: WorkloadRequest, index: int, fleet: Sequence) -> int:
        """The number of the replica that takes the request."""
        raise NotImplementedError


class RoundRobin(Router):
    """The next one in turn, whatever it is doing."""

    looks_at_load = False

    def choose(self, request, index, fleet):
        return index % len(fleet)


class LeastLoaded(Router):
    """The one with the fewest tokens of unfinished requests."""

    def choose(self, request, index, fleet):
        return min(range(len(fleet)), key=lambda i: (fleet[i].load, i))


class PrefixAware(LeastLoaded):
    """The one that last served the longest part of the prompt, unless it is overloaded.

    Overloaded: it has more than `slack` times the tokens of the least loaded one, and a prompt's
    worth on top.
    """

    slack = 1.5

    def __init__(self) -> None:
        self._served_by: dict[int, int] = {}  # prefix hash id -> replica

    def choose(self, request, index, fleet):
        best = super().choose(request, index, fleet)
        chosen = best
        for hash_id in reversed(request.prefix_hash_ids):
            if hash_id in self._served_by:
                served, least = self._served_by[hash_id], fleet[best].load[0]
                if fleet[served].load[0] <= self.slack * least + request.prompt_len:
                    chosen = served
                break
        for hash_id in request.prefix_hash_ids:
            self._served_by[hash_id] = chosen
        return chosen


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix": PrefixAware,
}


def make_router(name: str) -> Router:
    """Build a router; each replay needs one of its own."""
    if name not in ROUTERS:
        raise ConfigError("--router", name, nearest(name, ROUTERS))
    return ROUTERS[name]()


def calibrate(setup, line: Series, requests: Sequence[WorkloadRequest]) -> Calibration:
    """Fit the model to the real scheduler on the first requests of a trace, on one replica.

    Raises:
        ConfigError: a trace with prefix hashes: the model has no prefix cache.
    """
    if any(r.prefix_hash_ids for r in requests):
        raise ConfigError(
            "--approximate", "a trace with prefix hashes",
            "a trace without them: the approximate model has no prefix cache",
        )  # fmt: skip
    sample = list(requests[:SAMPLE_REQUESTS])
    real = replay_trace(setup, line, sample)
    stats, busy_s = real.replicas[0].stats, real.replicas[0].clock.busy_s
    kept = 1.0
    if line.mode == "naive" and stats.num_decode_steps:
        full = ReplicaModel(setup, Series("native", ""), Calibration())
        held = replay_trace(setup, Series("native", ""), sample, make_replica=lambda: full)
        kept = min(1.0, stats.peak_blocks / max(1, held.replicas[0].stats.peak_blocks))
    first = Calibration(kept_frac=kept)
    model = replay_trace(setup, line, sample, make_replica=lambda: ReplicaModel(setup, line, first))
    factor = busy_s / model.replicas[0].busy_s
    second = Calibration(kept_frac=kept, step_factor=factor)
    model = replay_trace(
        setup, line, sample, make_replica=lambda: ReplicaModel(setup, line, second)
    )
    a, b = real.row(), model.row()

    def error(key: str) -> float:
        return b[key] / a[key] - 1.0 if a.get(key) else 0.0

    return Calibration(
        step_factor=factor,
        kept_frac=kept,
        num_requests=len(sample),
        throughput_error_frac=error("output_throughput"),
        e2el_error_frac=error("mean_e2el_ms"),
    )


def replay_fleet(
    setup: TraceSetup,
    line: Series,
    requests: Sequence[WorkloadRequest],
    *,
    replicas: int,
    router: str = "round-robin",
    calibration: Calibration | None = None,
    on_request: Callable[[int], None] | None = None,
) -> Replay:
    """Replay a trace on a fleet; with a calibration, on the approximate model.

    Raises:
        ConfigError: an unknown router, no replicas, or a trace that cannot be replayed.
    """
    if not 1 <= replicas <= MAX_REPLICAS:
        raise ConfigError("--replicas", replicas, f"a whole number from 1 to {MAX_REPLICAS:,}")
    make = None
    if calibration is not None:

        def make():
            return ReplicaModel(setup, line, calibration)

    return replay_trace(
        setup, line, requests, replicas=replicas, router=make_router(router), make_replica=make,
        on_request=on_request,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FleetNeed:
    """The smallest fleet that meets an SLO.

    Attributes:
        replicas: None: not even `tried` replicas were enough.
        met_share: share of requests served in time by that fleet.
        calibration: of the approximate model, None where the real scheduler ran.
    """

    line: Series
    replicas: int | None
    gpus: int | None
    met_share: float
    tried: int
    router: str
    replay: Replay
    calibration: Calibration | None = None

    def row(self) -> dict[str, object]:
        return self.replay.row() | {
            "replicas": self.replicas, "gpus": self.gpus, "met_share": self.met_share,
            "tried": self.tried, "router": self.router,
        }  # fmt: skip


def size_fleet(
    setup: TraceSetup,
    line: Series,
    requests: Sequence[WorkloadRequest],
    slo: Slo,
    *,
    router: str = "round-robin",
    max_replicas: int = 64,
    calibration: Calibration | None = None,
) -> FleetNeed:
    """Find the fewest replicas that serve the trace within the SLO: double, then bisect.

    Assumes that more replicas never serve worse.
    """
    seen: dict[int, tuple[Replay, float]] = {}

    def met(replicas: int) -> bool:
        replay = replay_fleet(
            setup, line, requests, replicas=replicas, router=router, calibration=calibration
        )
        seen[replicas] = replay, replay.met_share(slo)
        return seen[replicas][1] >= slo.share

    def need(tried: int, replicas: int | None) -> FleetNeed:
        replay, share = seen[replicas or tried]
        gpus = None if replicas is None else replicas * setup.plan.tensor_parallel_size
        return FleetNeed(
            line=line, replicas=replicas, gpus=gpus, met_share=share, tried=tried, router=router,
            replay=replay, calibration=calibration,
        )  # fmt: skip

    below, found = 0, 1
    while not met(found):
        if found >= max_replicas:
            return need(found, None)
        below, found = found, min(2 * found, max_replicas)
    while found - below > 1:
        middle = (found + below) // 2
        below, found = (below, middle) if met(middle) else (middle, found)
    return need(max(seen), found)


def fleet_sentence(needs: Sequence[FleetNeed], slo: Slo, setup: TraceSetup) -> str:
    """The answer: how many GPUs each mode needs."""
    parts = [
        f"{n.line.mode} {n.gpus:,}" if n.gpus is not None else f"{n.line.mode} over {n.tried:,}"
        for n in needs
    ]
    how = "approximated and modelled" if needs[0].calibration else "modelled"
    return (
        f"GPUs ({setup.plan.device.name}) needed for {slo.describe()}, router {needs[0].router}: "
        f"{', '.join(parts)}; {how}."
    )


def warn_of_errors(rows: Sequence[dict[str, object]]) -> list[str]:
    """Sentences on approximate replicas that are far from the real scheduler."""
    sentences = []
    for row in rows:
        errors = [row.get(f"calibration_{of}_error_frac") for of in ("throughput", "e2el")]
        if None not in errors and (worst := max(map(abs, errors))) > 0.03:
            sentences.append(
                f"{row['mode']}: the approximate model is {100 * worst:.1f} % off the real "
                "scheduler on the sample it was calibrated on"
            )
    return sentences

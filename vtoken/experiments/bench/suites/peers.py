"""Peers suite: the same requests on stock vLLM and on engines of other environments.

Stock vLLM always runs, in a process of its own with all plugins off. Others are given by the
interpreter of an environment that has them:

    openvino           OpenVINO GenAI's continuous batching, nothing evicted
    openvino-eviction  the same with its own cache eviction, to the same budget
    kvpress            Hugging Face with a press (`{"kvpress": {"press": "KnormPress"}}`), which
                       compresses prompts; in static batches, memory not limited
    NAME:LABEL         the same engine once more, with settings of its own

All have the same prompts, output lengths, data type and, where they have one, pool. Processes
stay up, so that peers take turns with our modes over the same prompts like any pair. The paper
has no such comparison.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm
from statistics import median

from vtoken.experiments.bench.bench_options import Case
from vtoken.experiments.bench.context import Context, SuiteResult
from vtoken.experiments.bench.measure import EVICTED_NOTHING, Record
from vtoken.experiments.bench.named_workloads import WARM_UP_REPEAT
from vtoken.experiments.bench.open_engines import Pool
from vtoken.experiments.bench.pairing import Comparison, Runs, output_tokens
from vtoken.experiments.bench.rows import make_row, pair_ratios
from vtoken.experiments.bench.suites.peer_process import (
    STOCK,
    Peer,
    check_interpreter,
    check_peer_args,
    engine_of,
)
from vtoken.models.store import cache_dir
from vtoken.units import cdiv

PAPER = "not in the paper"
DEFAULT_WORKLOADS = ("text:128+64",)
DEFAULT_POLICIES = ("h2o",)
DEFAULT_PRESS = "SnapKVPress"
NUM_REQUESTS, CONCURRENCY = 4, 4


def run_peers(context: Context, result: SuiteResult) -> None:
    """Run the suite, into the result."""
    settings = context.settings
    interpreters = {STOCK: sys.executable, **settings.peers}
    check_peer_args(interpreters, settings.peer_args)
    # One check for all that share an environment: importing takes seconds.
    checks = {(engine_of(name), python): name for name, python in settings.peers.items()}
    for (_, python), name in checks.items():
        check_interpreter(name, python)
    num = settings.num_requests or NUM_REQUESTS
    workloads = context.workloads(DEFAULT_WORKLOADS, num, result.notes)
    at_once = max(settings.points or (CONCURRENCY,))
    longest = max(w.max_tokens for w in workloads)
    pool = context.ample_pool(at_once, longest)
    peers: dict[str, Peer] = {}
    try:
        for name, python in interpreters.items():
            context.listener.note(f"starting {name}")
            peers[name] = Peer(name, python, _peer_settings(context, name, pool, longest, at_once))
        with context.session(max_tokens=longest, max_num_seqs=at_once) as session:
            runner = context.runner(session)
            for workload in workloads:
                comparison = Comparison(
                    suite="peers", workload=workload, pool=pool, num_requests=num,
                    cases=context.cases(settings.modes, context.policies(DEFAULT_POLICIES)),
                    max_concurrency=at_once, repeats=settings.repeats,
                )  # fmt: skip
                runner.plan_comparison(comparison)
                runner.plan(len(peers) * settings.repeats * output_tokens(comparison))
                _compare(context, result, runner, comparison, peers)
    finally:
        for peer in peers.values():
            peer.close()


def _peer_settings(context: Context, name: str, pool: Pool, longest: int, at_once: int) -> dict:
    """What a peer is started with: equal to our engines' where it has the setting."""
    engine, config = context.settings.engine, context.settings.config
    given = dict(context.settings.peer_args.get(name, {}))
    head = {"model": context.model_path, "clock": context.settings.clock}
    if name == STOCK:
        return head | _stock_settings(context, pool, longest, at_once) | given
    settings = head | {
        "dtype": engine.dtype or "float32",
        "pool_tokens": pool.num_kv_blocks * pool.block_size,
        "max_num_seqs": at_once,
        "budget_tokens": _budget_tokens(config, longest),
    }
    if engine_of(name) == "kvpress":
        settings |= {"press": DEFAULT_PRESS, "eviction_ratio": config.effective_ratio}
    else:
        settings["cache"] = str(cache_dir() / "openvino")
    return settings | given


def _budget_tokens(config, longest: int) -> int:
    """The budget, where it is a ratio that of the longest request at its end."""
    ratio = config.effective_ratio
    return config.kv_budget_tokens if ratio is None else max(1, round((1 - ratio) * longest))


def _stock_settings(context: Context, pool: Pool, longest: int, at_once: int) -> dict:
    engine = context.settings.engine
    settings = {
        "block_size": pool.block_size,
        "num_gpu_blocks_override": pool.num_kv_blocks + 1,
        "max_model_len": min(longest + 1, context.shape.max_model_len),
        "max_num_seqs": at_once,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "seed": engine.seed,
    }
    from vtoken.engine.cpu import engine_runs_on_cpu

    if engine_runs_on_cpu():
        pool = stock_cpu_pool(pool)
        settings |= {
            "block_size": pool.block_size,
            "num_gpu_blocks_override": pool.num_kv_blocks + 1,
        }
        settings |= {"dtype": engine.dtype or "float32", "enforce_eager": True}
        settings |= {"kv_cache_memory_bytes": 2 << 30}
    elif engine.dtype:
        settings["dtype"] = engine.dtype
    return settings


def stock_cpu_pool(pool: Pool) -> Pool:
    """The same memory in blocks that stock attention takes on a CPU, part of one more at most."""
    from vtoken.engine.cpu import STOCK_BLOCK_TOKENS

    block_size = lcm(pool.block_size, STOCK_BLOCK_TOKENS)
    blocks = cdiv(pool.num_kv_blocks * pool.block_size, block_size)
    return Pool(num_kv_blocks=blocks, block_size=block_size)


def _compare(
    context: Context, result: SuiteResult, runner, comparison: Comparison, peers: Mapping[str, Peer]
) -> None:
    own: Runs = {case.key: [] for case in comparison.cases}
    others: Runs = {name: [] for name in peers}
    try:
        _take_turns(context, runner, comparison, peers, own, others)
    finally:  # after Ctrl-C: the runs there are
        result.rows += _rows(context, comparison, peers, own, others)


def _take_turns(
    context: Context,
    runner,
    comparison: Comparison,
    peers: Mapping[str, Peer],
    own: Runs,
    others: Runs,
) -> None:
    """Our cases and the peers in turns, repeat by repeat; records go into `own` and `others`."""
    for peer in peers.values():
        peer.run(comparison.workload.make(2, WARM_UP_REPEAT), 2)
    for repeat in range(comparison.repeats):
        turn = replace(comparison, repeats=1, first_repeat=repeat)
        for key, records in runner.run(turn).items():
            own[key] += records
        runner.raise_if_interrupted()
        for name, peer in peers.items():
            others[name].append(_peer_run(context, runner, turn, name, peer))


def _rows(
    context: Context, comparison: Comparison, peers: Mapping[str, Peer], own: Runs, others: Runs
) -> list[dict[str, object]]:
    rows = []
    for name, records in others.items():
        if records:
            rows.append((_peer_row(comparison, peers[name], records), records))
    for case in comparison.cases:
        if records := own[case.key]:
            rows.append((_own_row(context, comparison, case, records), records))
    for row, records in rows:
        if records is not others[STOCK]:
            ratios = pair_ratios(records, others[STOCK], "output_throughput")
            row["throughput_over_stock"] = median(ratios) if ratios else None
    return [row for row, _ in rows]


def _peer_row(comparison: Comparison, peer: Peer, records: Sequence[Record]) -> dict[str, object]:
    about = dict(peer.about)
    row = make_row(
        Case(mode=peer.name), comparison.workload.name, records, engine=peer.name,
        peer_version=about.pop("version"), **about,
    )  # fmt: skip
    budget = row.get("budget_tokens")
    if budget is not None and comparison.workload.max_tokens <= budget:
        row["note"] = EVICTED_NOTHING
    return row


def _own_row(
    context: Context, comparison: Comparison, case: Case, records: Sequence[Record]
) -> dict[str, object]:
    pool, load = comparison.pool, {"concurrency": comparison.max_concurrency}
    load |= {"block_size": pool.block_size, "pool_tokens": pool.num_kv_blocks * pool.block_size}
    if case.policy:
        config = context.settings.config
        load["budget_tokens"] = _budget_tokens(config, comparison.workload.max_tokens)
    return make_row(case, comparison.workload.name, records, engine="vtoken", **load)


def _peer_run(context: Context, runner, turn: Comparison, name: str, peer: Peer) -> Record:
    # Peers and their settings may differ between a run and its resumption; the key tells.
    changes = {**context.settings.peer_args.get(name, {}), "version": peer.about["version"]}
    key = turn.key(Case(mode=name, changes=changes), turn.first_repeat)
    record = context.journal.get(key)
    if record is None:
        requests = turn.workload.make(turn.num_requests, turn.first_repeat)
        found = peer.run(requests, turn.max_concurrency)
        values = _metrics(requests, found, context.settings.goodput_ms)
        record = Record(values=values | found["values"])
        context.journal.put(key, record)
    runner.note_done(output_tokens(turn), f"{turn.workload.name}, {name}, {turn.first_repeat + 1}")
    return record


def _metrics(requests, found: Mapping, goodput_ms: Mapping[str, float]) -> dict[str, object]:
    """The fields of `vllm bench serve` for a peer's times."""
    from vtoken.core.counters import Counters
    from vtoken.engine import FinishedRequest, RunResult, RunStats
    from vtoken.engine.benchmark_metrics import benchmark_metrics
    from vtoken.engine.run import RequestTimes

    times, finished = {}, {}
    for request, (submitted_s, tokens_s) in zip(requests, found["times"], strict=True):
        times[request.request_id] = RequestTimes(submitted_s, tokens_s)
        finished[request.request_id] = FinishedRequest(
            request.request_id, list(request.prompt_token_ids), [], [], "length"
        )
    num_output = sum(len(t.tokens_s) for t in times.values())
    run = RunResult(
        finished, times, found["wall_s"], RunStats(), Counters(),
        sum(r.prompt_len for r in requests), num_output,
    )  # fmt: skip
    return dict(benchmark_metrics(run, goodput_ms))


def sentences(rows: list[dict[str, object]]) -> list[str]:
    """Throughput against stock vLLM."""
    return [
        f"{row['workload']}: {row['mode']}{', ' + row['policy'] if row['policy'] else ''} ran at "
        f"{row['throughput_over_stock']:.2f} of stock vLLM's throughput"
        + (f" ({row['note']})." if row.get("note") else ".")
        for row in rows
        if row.get("throughput_over_stock") is not None
    ]

"""Peers suite: the same requests on stock vLLM and on engines of other environments.

Stock vLLM always runs, in a process of its own with all plugins off. Others are given by the
interpreter of an environment that has them:

    kvpress    Hugging Face with a press (`--peer-args '{"kvpress": {"press": "SnapKVPress"}}'`):
               compresses the prompt once, one request at a time

Processes stay up, so that peers take turns with our modes over the same prompts like any pair.
The paper has no such comparison.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from threading import Thread

from vtoken.engine import peer_runner
from vtoken.errors import ConfigError, EngineError, nearest
from vtoken.experiments.bench.context import Context, SuiteResult
from vtoken.experiments.bench.measure import Record
from vtoken.experiments.bench.pairing import Comparison, output_tokens
from vtoken.experiments.bench.rows import make_row, pair_ratios
from vtoken.experiments.bench.session import Pool
from vtoken.experiments.bench.settings import DEFAULT_RATIO, Case
from vtoken.experiments.bench.workloads import WARM_UP_REPEAT

PAPER = "not in the paper"
DEFAULT_WORKLOADS = ("text:128+64",)
DEFAULT_POLICIES = ("h2o",)
NUM_REQUESTS, CONCURRENCY = 4, 4
STOCK = "stock"
MODULES = {"kvpress": "kvpress"}  # what an environment must be able to import


def run_peers(context: Context, result: SuiteResult) -> None:
    """Run the suite, into the result.

    Raises:
        ConfigError: an interpreter cannot be run, or lacks what it is named for.
        EngineError: a peer failed.
    """
    settings = context.settings
    interpreters = {STOCK: sys.executable, **settings.peers}
    for name, python in settings.peers.items():
        check_interpreter(name, python)
    workloads = context.workloads(DEFAULT_WORKLOADS)
    num = settings.num_requests or NUM_REQUESTS
    at_once = max(settings.points or (CONCURRENCY,))
    longest = max(w.max_tokens for w in workloads)
    pool = context.ample_pool(at_once, longest)
    peers: dict[str, Peer] = {}
    try:
        for name, python in interpreters.items():
            context.listener.stage(f"starting {name}")
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
                result.rows += _compare(context, runner, comparison, peers)
    finally:
        for peer in peers.values():
            peer.close()


def _peer_settings(context: Context, name: str, pool: Pool, longest: int, at_once: int) -> dict:
    engine, clock = context.settings.engine, context.settings.clock
    given = dict(context.settings.peer_args.get(name, {}))
    head = {"model": context.model_path, "clock": clock}
    if name == STOCK:
        settings = {
            **head,
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
            settings |= {"dtype": engine.dtype or "float32", "enforce_eager": True}
            settings |= {"kv_cache_memory_bytes": 2 << 30}
        elif engine.dtype:
            settings["dtype"] = engine.dtype
        return settings | given
    ratio = context.settings.config.effective_ratio
    defaults = {
        "dtype": engine.dtype or "float32", "press": "SnapKVPress",
        "eviction_ratio": DEFAULT_RATIO if ratio is None else ratio,
    }  # fmt: skip
    return head | defaults | given


def check_interpreter(name: str, python: str) -> None:
    """Refuse a peer that cannot run, before anything is measured.

    Raises:
        ConfigError: unknown peer, no such interpreter, or the library is not there.
    """
    if name not in MODULES:
        raise ConfigError("--peers", name, nearest(name, MODULES))
    try:
        done = subprocess.run(
            [python, "-c", f"import {MODULES[name]}"], capture_output=True, text=True, timeout=300,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        why = getattr(error, "strerror", None) or "it does not answer"
        raise ConfigError("--peers", f"{name}={python}", f"a Python that runs ({why})") from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it fails"])[-1]
        raise ConfigError(
            "--peers", f"{name}={python}", f"a Python that can import {MODULES[name]} ({why})"
        )


class Peer:
    """A process that runs another engine.

    Raises:
        EngineError: it did not start.
    """

    def __init__(self, name: str, python: str, settings: Mapping[str, object]) -> None:
        self.name = name
        script = str(Path(peer_runner.__file__).resolve())
        environment = {k: v for k, v in os.environ.items() if not k.startswith("VTOKEN_")}
        self.process = subprocess.Popen(
            [python, script, name, json.dumps(settings)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self._last: deque[str] = deque(maxlen=50)
        # Somebody has to read what it logs, or it would wait for a full pipe.
        self._reader = Thread(target=self._drain, daemon=True)
        self._reader.start()
        self.version = self._wait_for(peer_runner.READY)

    def _drain(self) -> None:
        for line in self.process.stderr:
            self._last.append(line.rstrip())

    def _wait_for(self, word: str) -> str:
        for line in self.process.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        self.process.wait()
        self._reader.join(timeout=5)
        said = next((line for line in reversed(self._last) if "Error" in line), "no reason given")
        raise EngineError(f"the peer {self.name} ended: {said.strip()}")

    def run(self, requests, concurrency: int) -> dict:
        """Run requests; {"times", "wall_s"} as in peer_runner.

        Raises:
            EngineError: it died.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "result.json"
            job = {
                "requests": [(list(r.prompt_token_ids), r.output_len) for r in requests],
                "concurrency": concurrency,
                "result": str(path),
            }
            try:
                self.process.stdin.write(json.dumps(job) + "\n")
                self.process.stdin.flush()
            except OSError:
                pass  # it has died; waiting says why
            self._wait_for(peer_runner.DONE)
            return json.loads(path.read_text())

    def close(self) -> None:
        """End the process: at the end of its input, or after a while by a signal."""
        self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _compare(context: Context, runner, comparison: Comparison, peers) -> list[dict[str, object]]:
    """Our cases and the peers in turns, repeat by repeat."""
    own = {case.key: [] for case in comparison.cases}
    others: dict[str, list[Record]] = {name: [] for name in peers}
    for peer in peers.values():
        peer.run(comparison.workload.make(2, WARM_UP_REPEAT), 2)
    for repeat in range(comparison.repeats):
        turn = Comparison(**{**vars(comparison), "repeats": 1, "first_repeat": repeat})
        for key, records in runner.run(turn).items():
            own[key] += records
        runner.raise_if_interrupted()
        for name, peer in peers.items():
            others[name].append(_peer_run(context, runner, turn, name, peer))
    rows = []
    load = {"concurrency": comparison.max_concurrency, "block_size": comparison.pool.block_size}
    for name, records in others.items():
        case = Case(mode="native")
        row = make_row(case, comparison.workload.name, records, engine=name, **load)
        row |= {"mode": name, "peer_version": peers[name].version}
        if name != STOCK:
            row["concurrency"] = 1
        rows.append(row)
    for case in comparison.cases:
        rows.append(
            make_row(case, comparison.workload.name, own[case.key], engine="vtoken", **load)
        )
    runs = [*others.values(), *(own[case.key] for case in comparison.cases)]
    for row, records in zip(rows, runs, strict=True):
        if records is not others[STOCK]:
            ratios = sorted(pair_ratios(records, others[STOCK], "output_throughput"))
            row["throughput_over_stock"] = ratios[len(ratios) // 2] if ratios else None
    return rows


def _peer_run(context: Context, runner, turn: Comparison, name: str, peer: Peer) -> Record:
    key = turn.key(Case(mode=name), turn.first_repeat)
    record = context.journal.get(key)
    if record is None:
        requests = turn.workload.make(turn.num_requests, turn.first_repeat)
        found = peer.run(requests, turn.max_concurrency)
        record = Record(values=_metrics(requests, found, context.settings.goodput_ms))
        context.journal.put(key, record)
    runner.note_done(output_tokens(turn), f"{turn.workload.name}, {name}, {turn.first_repeat + 1}")
    return record


def _metrics(requests, found: Mapping, goodput_ms: Mapping[str, float]) -> dict[str, object]:
    """The fields of `vllm bench serve` for a peer's times."""
    from vtoken.core.events import Counters
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
        f"{row['throughput_over_stock']:.2f} of stock vLLM's throughput."
        for row in rows
        if row.get("throughput_over_stock") is not None
    ]

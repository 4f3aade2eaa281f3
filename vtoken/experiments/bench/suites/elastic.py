"""What `evict_when: pressure` costs while there is room, and gives when there is none.

    python -m vtoken.experiments.bench.suites.elastic --concurrency 6 --pairs 10

Stock vLLM and vToken run the same requests in the same pool, in turn, each in a process of its
own with an engine that stays open. At the concurrency that native holds the tokens must be the
same and the throughput should be; at twice that, native preempts. The pool is 6.5 peaks of a
request for 6 requests, and in that proportion for others; both have as many slots, in the smallest
blocks that each takes on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.engine.cpu import STOCK_BLOCK_TOKENS
from vtoken.engine.settings import EngineSettings
from vtoken.errors import EngineError
from vtoken.units import cdiv

NATIVE_PEAKS_PER_REQUEST = 6.5 / 6
VTOKEN_BLOCK_TOKENS = 16
BOOTSTRAP_DRAWS = 5000


@dataclass(frozen=True, kw_only=True)
class ElasticSettings:
    """Attributes:
    concurrency: requests at once that native holds; twice as many are tried too.
    block_size: of the side in hand.
    pairs: measured pairs at each concurrency; one more warms up.
    """

    model: str = "smollm2-135m"
    policy: str = "h2o"
    eviction_ratio: float = 0.5
    concurrency: int = 6
    prompt_len: int = 256
    output_len: int = 256
    block_size: int = STOCK_BLOCK_TOKENS
    pairs: int = 5

    @property
    def num_kv_blocks(self) -> int:
        peak = cdiv(self.prompt_len + self.output_len, STOCK_BLOCK_TOKENS)
        stock_blocks = int(NATIVE_PEAKS_PER_REQUEST * self.concurrency * peak)
        return stock_blocks * STOCK_BLOCK_TOKENS // self.block_size


@dataclass(frozen=True)
class ElasticRun:
    """One side of one pair."""

    tokens: dict[str, list[int]]
    output_throughput: float
    preemptions: int
    evicted_tokens: int
    peak_running: int


def median_with_interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the bounds of its 95 % bootstrap interval over pairs."""
    values = np.asarray(ratios)
    draws = np.random.default_rng(0).choice(values, (BOOTSTRAP_DRAWS, len(values)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)


def _serve(connection, settings: ElasticSettings, config: VTokenConfig) -> None:
    """Body of one side's process: run what is asked until None comes."""
    from vtoken.engine import open_engine, run_requests
    from vtoken.workloads.texts import text_prompts

    engine_settings = EngineSettings(
        model=settings.model, dtype="float32", num_kv_blocks=settings.num_kv_blocks,
        block_size=settings.block_size, max_num_seqs=2 * settings.concurrency,
        max_model_len=settings.prompt_len + settings.output_len + 1,
        max_num_batched_tokens=1024, enable_prefix_caching=False,
    )  # fmt: skip
    with open_engine(engine_settings, config) as engine:
        tokenizer = engine.tokenizer
        while (asked := connection.recv()) is not None:
            count, repeat = asked
            requests = text_prompts(
                tokenizer, count, settings.prompt_len, output_len=settings.output_len,
                repeat=repeat,
            )  # fmt: skip
            run = run_requests(engine, requests)
            wrong = engine.check_idle()
            assert not wrong, wrong
            connection.send(
                ElasticRun(
                    tokens={k: run.finished[k].output_token_ids for k in sorted(run.finished)},
                    output_throughput=run.output_throughput,
                    preemptions=run.stats.preemptions,
                    evicted_tokens=run.counters.evicted_tokens,
                    peak_running=run.stats.peak_running,
                )
            )


class Side:
    """An engine in a process of its own, idle while the other side runs."""

    def __init__(self, settings: ElasticSettings, config: VTokenConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, settings, config), daemon=True)
        self._process.start()
        theirs.close()  # or the end of the other process would go unnoticed

    def run(self, count: int, repeat: int) -> ElasticRun:
        """Run that many requests, with prompts of this repeat's own.

        Raises:
            EngineError: the process ended.
        """
        try:
            self._connection.send((count, repeat))
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise EngineError("the process of one side ended; its output says why") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it may have ended by itself
            self._connection.send(None)
        self._process.join()


def compare(settings: ElasticSettings) -> list[dict[str, object]]:
    """Run both sides in turn at both concurrencies.

    Returns:
        A row per concurrency: median ratio of vToken's throughput to native's with its 95 %
        interval, whether the tokens were the same, preemptions and dropped tokens.
    """
    pressure = VTokenConfig(
        policy=settings.policy, eviction_ratio=settings.eviction_ratio, evict_when="pressure"
    )
    native = Side(settings, VTokenConfig(mode="native"))
    vtoken = Side(replace(settings, block_size=VTOKEN_BLOCK_TOKENS), pressure)
    try:
        return [_compare_at(n, native, vtoken, settings)
                for n in (settings.concurrency, 2 * settings.concurrency)]  # fmt: skip
    finally:
        native.close()
        vtoken.close()


def _compare_at(
    count: int, native: Side, vtoken: Side, settings: ElasticSettings
) -> dict[str, object]:
    ratios, same, runs = [], [], {native: [], vtoken: []}
    for pair in range(settings.pairs + 1):
        order = (native, vtoken) if pair % 2 else (vtoken, native)
        now = {side: side.run(count, pair) for side in order}
        if pair == 0:
            continue
        for side, run in now.items():
            runs[side].append(run)
        ratios.append(now[vtoken].output_throughput / now[native].output_throughput)
        same.append(now[native].tokens == now[vtoken].tokens)
        which = "the same" if same[-1] else "other"
        print(f"{count} requests, pair {pair}: {ratios[-1]:.3f}, {which} tokens", file=sys.stderr)
    median, low, high = median_with_interval(ratios)
    return {
        "concurrency": count,
        "pairs": settings.pairs,
        "throughput_ratio": round(median, 4),
        "interval_95": [round(low, 4), round(high, 4)],
        "identical_pairs": sum(same),
        "native_output_throughput": round(
            float(np.median([r.output_throughput for r in runs[native]])), 2
        ),
        "native_preemptions": sum(r.preemptions for r in runs[native]),
        "vtoken_preemptions": sum(r.preemptions for r in runs[vtoken]),
        "vtoken_evicted_tokens": sum(r.evicted_tokens for r in runs[vtoken]),
        "native_peak_running": max(r.peak_running for r in runs[native]),
        "vtoken_peak_running": max(r.peak_running for r in runs[vtoken]),
    }


def main() -> None:
    """Print a JSON row per concurrency."""
    defaults = ElasticSettings()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given = {name: value for name, value in vars(defaults).items() if name != "block_size"}
    for name, value in given.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    settings = replace(defaults, **vars(parser.parse_args()))
    for row in compare(settings):
        print(json.dumps(row))


if __name__ == "__main__":
    main()

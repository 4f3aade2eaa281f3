"""Latency and throughput of a run, computed and named by vLLM's own benchmark code."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import redirect_stdout

from vtoken.engine.run import RunResult

PERCENTILES = (95.0, 99.0)
_METRICS = ("ttft", "tpot", "itl", "e2el")


def benchmark_metrics(
    run: RunResult, goodput_ms: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Fields of `vllm bench serve` for a run.

    Args:
        goodput_ms: most milliseconds by metric (`ttft`, `tpot`, `e2el`) for a request to count in
            `request_goodput`.

    Returns:
        `completed`, `duration`, `output_throughput`, `mean_ttft_ms`, `p95_e2el_ms`, ...
        Source: vllm/benchmarks/serve.py, `calculate_metrics`.
    """
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
    from vllm.benchmarks.serve import calculate_metrics

    outputs = []
    for req_id, finished in run.finished.items():
        times = run.times[req_id]
        outputs.append(
            RequestFuncOutput(
                success=True,
                latency=times.e2el_s,
                output_tokens=len(times.tokens_s),
                ttft=times.ttft_s,
                itl=times.itl_s,
                prompt_len=len(finished.prompt_token_ids),
                start_time=times.submitted_s,
            )
        )
    with redirect_stdout(io.StringIO()):  # it prints a tip about a plotting library
        found, _ = calculate_metrics(
            [], outputs, run.wall_s, None, list(PERCENTILES), dict(goodput_ms or {})
        )
    row = {
        "completed": found.completed,
        "duration": run.wall_s,
        "total_input_tokens": found.total_input,
        "total_output_tokens": found.total_output,
        "request_throughput": found.request_throughput,
        "output_throughput": found.output_throughput,
        "total_token_throughput": found.total_token_throughput,
    }
    if goodput_ms:
        row["request_goodput"] = found.request_goodput
    for name in _METRICS:
        row[f"mean_{name}_ms"] = getattr(found, f"mean_{name}_ms")
        row[f"median_{name}_ms"] = getattr(found, f"median_{name}_ms")
        for percent, value in getattr(found, f"percentiles_{name}_ms"):
            row[f"p{percent:g}_{name}_ms"] = value
    return {key: value if isinstance(value, int) else float(value) for key, value in row.items()}


def parse_goodput(pairs: str) -> dict[str, float]:
    """Read `--goodput`: "ttft:500 tpot:50", milliseconds by metric, as vLLM has it.

    Raises:
        ConfigError: not such pairs.
    """
    from vtoken.errors import ConfigError

    found: dict[str, float] = {}
    for pair in pairs.replace(",", " ").split():
        name, _, value = pair.partition(":")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = -1.0
        if name not in ("ttft", "tpot", "e2el") or not found[name] > 0:
            raise ConfigError(
                "--goodput", pairs, "pairs such as ttft:500 tpot:50 or e2el:9000, in milliseconds"
            )
    if not found:
        raise ConfigError("--goodput", pairs, "pairs such as ttft:500 tpot:50")
    return found

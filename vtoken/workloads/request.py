"""One request of a workload, and what may be done with a list of them.

A workload is a list of `WorkloadRequest`: real prompts, or lengths and arrival times alone where a
trace holds no text. Everything that runs requests (engines, dry runs, benchmarks) takes such lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vtoken.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRequest:
    """One request.

    Attributes:
        request_id: unique in its workload.
        prompt_len, output_len: tokens, both at least 1.
        prompt: the text, or None where the workload has lengths only. Where `prompt_token_ids`
            is given too, those are what counts: a text cut at a token boundary may encode to
            another number of tokens.
        prompt_token_ids: exactly `prompt_len` vocabulary ids, or None.
        arrival_s: seconds after the first request of the workload.
        prefix_hash_ids: one id per block of `prefix_block_tokens` of the prompt, the last one
            possibly partial, below 2^62; equal ids mean an equal prefix.
        prefix_block_tokens: tokens per prefix hash id, 0 where there are none.
        answers: accepted answers, for workloads with a known one.
        dataset: where it comes from, for tables.
        metadata: whatever else the source says, under the source's names.
    """

    request_id: str
    prompt_len: int
    output_len: int
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    arrival_s: float = 0.0
    prefix_hash_ids: tuple[int, ...] = ()
    prefix_block_tokens: int = 0
    answers: tuple[str, ...] = ()
    dataset: str = ""
    metadata: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.prompt_len >= 1 and self.output_len >= 1, self
        ids = self.prompt_token_ids
        assert ids is None or len(ids) == self.prompt_len, (len(ids or ()), self.prompt_len)
        if self.prefix_hash_ids:
            assert self.prefix_block_tokens > 0, self.request_id
            assert max(self.prefix_hash_ids) < 2**62, self.request_id  # see `trace_token_ids`


def scale_rate(requests: Sequence[WorkloadRequest], factor: float) -> list[WorkloadRequest]:
    """Replay a trace at `factor` times its request rate: arrival times are divided by it.

    Raises:
        ConfigError: the factor is not positive.
    """
    if not factor > 0:
        raise ConfigError("--rate-scale", factor, "a number above 0, as in 2 for twice the rate")
    return [replace(r, arrival_s=r.arrival_s / factor) for r in requests]


def with_arrivals(
    requests: Sequence[WorkloadRequest],
    request_rate_per_s: float,
    *,
    burstiness: float = 1.0,
    seed: int = 0,
) -> list[WorkloadRequest]:
    """Give requests open-loop arrival times, as `vllm bench serve` draws them.

    Gaps are gamma distributed with shape `burstiness` and mean 1 / rate: 1 is a Poisson process,
    below 1 arrivals come in bursts, above 1 more regularly, at infinity evenly. An infinite rate
    starts all at 0. Source: vllm/benchmarks/serve.py, `get_request`; unlike it, the gaps are not
    rescaled to hit the rate exactly.

    Raises:
        ConfigError: rate or burstiness is not positive.
    """
    if not request_rate_per_s > 0:
        raise ConfigError("--request-rate", request_rate_per_s, "requests per second above 0")
    if not burstiness > 0:
        raise ConfigError("--burstiness", burstiness, "a number above 0; 1 is a Poisson process")
    if np.isinf(request_rate_per_s):
        return [replace(r, arrival_s=0.0) for r in requests]
    if np.isinf(burstiness):
        gaps_s = np.full(len(requests), 1.0 / request_rate_per_s)
    else:
        rng = np.random.default_rng([seed, len(requests)])
        gaps_s = rng.gamma(burstiness, 1.0 / (request_rate_per_s * burstiness), len(requests))
    arrivals_s = np.cumsum(gaps_s) - gaps_s[:1]
    return [replace(r, arrival_s=float(t)) for r, t in zip(requests, arrivals_s, strict=True)]


def take(
    requests: Iterable[WorkloadRequest], num: int | None, source: str
) -> list[WorkloadRequest]:
    """Take the first `num` requests, or all of them; an empty list if there are none at all.

    Raises:
        ConfigError: there are some, but fewer. They are not repeated to make up the number, as
            a repeated prompt is a prefix-cache hit.
    """
    if num is not None and num < 1:
        raise ConfigError("--num-prompts", num, "a whole number of at least 1")
    taken: list[WorkloadRequest] = []
    for request in requests:
        taken.append(request)
        if len(taken) == num:
            return taken
    if num is not None and taken:
        allowed = f"at most {len(taken)}, the usable rows of {source}"
        raise ConfigError("--num-prompts", num, allowed)
    return taken


def trace_token_ids(
    request: WorkloadRequest, *, vocab_size: int, seed: int = 0, index: int = 0
) -> np.ndarray:
    """Make up token ids for a request that has lengths only, keeping its prefix sharing.

    A token's id depends on its block's prefix hash and its place in the block, so two requests
    share a prefix of token ids exactly where the trace says so. Without hashes the ids depend on
    `index` (the request's place in the trace), and nothing is shared.

    Returns:
        int64[prompt_len], in [0, vocab_size).
    """
    place = np.arange(request.prompt_len, dtype=np.uint64)
    if request.prefix_hash_ids:
        block = np.uint64(request.prefix_block_tokens)
        hashes = np.asarray(request.prefix_hash_ids, dtype=np.uint64)
        # Partial last blocks share their first tokens too when their hashes are equal.
        origin = hashes[(place // block).astype(np.int64)] * np.uint64(2) + np.uint64(1)
        offset = place % block
    else:
        origin = np.full(request.prompt_len, 2 * index, dtype=np.uint64)
        offset = place
    with np.errstate(over="ignore"):
        mixed = _mix64(origin * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed))
        mixed = _mix64(mixed + offset)
    return (mixed % np.uint64(vocab_size)).astype(np.int64)


def with_token_ids(request: WorkloadRequest, *, vocab_size: int, index: int) -> WorkloadRequest:
    """The request, with made-up token ids where it has none of its own."""
    if request.prompt_token_ids is not None:
        return request
    ids = trace_token_ids(request, vocab_size=vocab_size, index=index)
    return replace(request, prompt_token_ids=ids.tolist())


def _mix64(x: np.ndarray) -> np.ndarray:
    """Finaliser of splitmix64: spreads neighbouring numbers over all 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

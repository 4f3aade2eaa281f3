"""One real engine at a time, kept from test to test: opening it takes longer than most tests."""

from __future__ import annotations

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.engine import EngineSettings, FinishedRequest, open_engine
from vtoken.kernels import load

_open: list = []  # [(settings, engine)], at most one


def engine_for(config: VTokenConfig, *, kernels: str | None = None, **settings):
    """An idle engine with this config and these EngineSettings; opened only where needed."""
    wanted = EngineSettings(**{
        "model": "tiny-llama", "block_size": 16, "num_kv_blocks": 160, "max_model_len": 512,
        "max_num_batched_tokens": 64, "max_num_seqs": 8, "enable_prefix_caching": False,
        **settings,
    })  # fmt: skip
    if _open and (_open[0][0] != wanted or _open[0][1].has_unfinished() or not _process_serves()):
        _open.pop()[1].close()
    if not _open:
        _open.append((wanted, open_engine(wanted, config)))
    engine = _open[0][1]
    engine.runner.vtoken_attention.kernels = load(kernels)
    engine.reconfigure(config)
    return engine


def _process_serves() -> bool:
    """False when another engine was closed since: vLLM's groups belong to the process."""
    from vllm.distributed import model_parallel_is_initialized

    return model_parallel_is_initialized()


def run(engine, requests, max_tokens: int = 40) -> list[FinishedRequest]:
    """Run {name: prompt} to the end; results in the order given, all blocks given back."""
    for name, prompt in requests.items():
        engine.add(name, prompt, max_tokens, logprobs=True)
    done, steps = {}, 0
    while engine.has_unfinished():
        for f in engine.step()[1]:
            done[f.req_id.split("-")[0]] = f
        steps += 1
        assert steps % 4 or not engine.check_invariants()
    assert engine.check_idle() == []
    return [done[name] for name in requests]


def prompts(count: int, length: int = 90, seed: int = 0, vocabulary: int = 500) -> dict:
    """Random prompts of several lengths, {name: token ids}; no name has a dash."""
    gen = np.random.default_rng([seed, count])
    return {f"r{i}": gen.integers(10, vocabulary, length + 11 * i).tolist() for i in range(count)}


def traces(engine) -> dict[str, list]:
    """The engine's trace by request name; vLLM adds a suffix to request ids."""
    found: dict[str, list] = {}
    for entry in engine.trace:
        found.setdefault(entry.req_id.split("-")[0], []).append(entry)
    return found


def live_sets(entries) -> dict[int, tuple[int, ...]]:
    """{id: what was attended to when it was computed, itself left out}."""
    sets = {}
    for e in entries:
        before = tuple(e.live_ids.tolist())
        for k in range(e.num_new_tokens):
            sets[e.first_id + k] = (*before, *range(e.first_id, e.first_id + k))
    return sets


def decisions(entries, num_tokens: int) -> list[tuple[int, int, set[int], list[int]]]:
    """What died, from the trace: (step_seq, length, victims, ids that were live before).

    Args:
        entries: one request's trace, in step order.
    """
    found, known = [], []
    for e in entries:
        live = e.live_ids.tolist()
        victims = set(known) - set(live)
        if victims:
            found.append((e.step_seq, e.first_id, victims, known))
        known = [*live, *range(e.first_id, e.first_id + e.num_new_tokens)]
    return found

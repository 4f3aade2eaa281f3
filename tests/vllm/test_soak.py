"""Long runs on recorded conversations and documents, in pools far below what they ask for."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os

import numpy as np
import pytest
from one_engine import engine_for, live_sets, traces
from replay import assert_equals_reference

from vtoken.config import VTokenConfig
from vtoken.units import cdiv
from vtoken.verify.runs import tallies
from vtoken.vllm_plugin.scheduler import VTokenAsyncScheduler
from vtoken.workloads.chat import LengthBounds, load_sharegpt
from vtoken.workloads.longbench import load_longbench

pytestmark = pytest.mark.vllm

BOUNDS = LengthBounds(min_prompt_tokens=4, max_prompt_tokens=2600, max_total_tokens=2900)


def native_blocks(requests, block_size: int = 16) -> int:
    """Blocks of everybody at their longest, nothing evicted."""
    return sum(cdiv(r.prompt_len + r.output_len, block_size) for r in requests)


def resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def in_use_mib() -> float:
    """Host memory in use: less what the C library keeps of freed memory, for later.

    Steps, and the checks' still more, free tensors of ever other sizes: glibc's heap grows by tens
    of MiB, which it can give back. oneDNN keeps a compiled matrix product for each number of tokens
    in a step; tests/conftest.py has it keep few.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident_mib()


@pytest.fixture(scope="module")
def conversations(test_data, model_path):
    """Function (count) -> requests, chat and documents in turn, lengths as recorded."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path("tiny-llama"))

    def load(count: int) -> list:
        sources = [
            load_sharegpt(
                test_data / "chat" / f"{name}_sharegpt.json", tokenizer, turns=turns,
                bounds=BOUNDS, seed=1,
            )
            for name, turns in (("mtbench101", "first"), ("mtbench101", "all"),
                                ("openassistant", "first"))
        ]  # fmt: skip
        sources += [
            load_longbench(
                test_data / "longctx" / f"{name}.jsonl",
                tokenizer,
                output_len=48,
                bounds=LengthBounds(max_prompt_tokens=4700, max_total_tokens=4800),
            )
            for name in ("squad_shared_context_qa", "nq_multidoc_qa")
        ]
        mixed = [r for group in itertools.zip_longest(*sources) for r in group if r is not None]
        assert len(mixed) >= count
        return mixed[:count]

    return load


def drive(engine, requests, *, max_new: int, abort_share: float = 0.0, seed: int = 0) -> dict:
    """Submit all at once and step to the end.

    Returns:
        done: {index of a request: (finish reason, output ids)}; in_use, resident: MiB of host
        memory, every 64 steps; steps.
    """
    rng = np.random.default_rng(seed)
    doomed = set(np.flatnonzero(rng.random(len(requests)) < abort_share).tolist())
    for i, r in enumerate(requests):
        engine.add(f"q{i}", r.prompt_token_ids, min(r.output_len, max_new))
    done, in_use, resident, num_steps = {}, [], [], 0
    while engine.has_unfinished():
        for f in engine.step()[1]:
            # No more than is looked at: what is kept here must not pass for a leak.
            tokens = np.array(f.output_token_ids, np.int32)
            done[int(f.req_id.split("-")[0][1:])] = (f.finish_reason, tokens)
        num_steps += 1
        if doomed and rng.random() < 0.05:
            leaves = doomed.pop()
            if leaves not in done:
                engine.abort([f"q{leaves}"])
        if num_steps % 64 == 0:
            assert engine.check_invariants() == []
            resident.append(resident_mib())
            in_use.append(in_use_mib())
    assert engine.check_idle() == []
    return {"done": done, "in_use": in_use, "resident": resident, "steps": num_steps}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("evict_when", ["always", "pressure"])
def test_soak(conversations, evict_when):
    requests = conversations(500)
    # Or the last ones would all be of one source, and the load another at the end.
    requests = [requests[i] for i in np.random.default_rng(0).permutation(500)]
    pool = native_blocks(requests[:64]) // 10
    config = VTokenConfig(
        policy="h2o", kv_budget_tokens=128, evict_when=evict_when, hash_kv_every=1
    )
    engine = engine_for(
        config, num_kv_blocks=pool, max_model_len=4864, max_num_batched_tokens=512,
        max_num_seqs=64, enable_prefix_caching=True,
    )  # fmt: skip
    for checker in (engine.hooks.checker, engine.runner.vtoken_checker):
        checker.report_dir = None
    found = drive(engine, requests, max_new=160, abort_share=0.1)
    ended = [reason for reason, _ in found["done"].values() if reason != "abort"]
    tally = tallies(engine)
    print(
        f"\n{evict_when}: pool {pool} blocks, {len(ended)} of {len(requests)} finished, "
        f"{found['steps']} steps, {tally.events}, preemptions {engine.counters.preemptions}, "
        f"evicted {engine.counters.evicted_tokens}"
    )
    assert len(ended) >= 440 and set(ended) == {"length"}
    assert not any(tally.violations.values())
    assert tally.events["I1"] > 1000
    assert engine.counters.preemptions == 0
    growth = {}
    for kind in ("in_use", "resident"):
        half = np.array(found[kind][len(found[kind]) // 2 :])
        first, last = half[: len(half) // 2].mean(), half[len(half) // 2 :].mean()
        growth[kind] = last - first
        print(f"host memory {kind}: {first:.1f} -> {last:.1f} MiB over the last half")
    assert growth["in_use"] < 8, found["in_use"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("policy", ["random", "h2o"])
def test_a_crowd_is_served_asynchronously_as_synchronously(conversations, policy):
    """Tokens and live sets are equal where both schedules cut prompts into the same chunks.

    Eviction between chunks makes a request depend on where they end, and that is vLLM's schedule:
    it learns of a finished request a step later when it is asynchronous. Here it makes no odds.
    """
    requests = conversations(200)
    pool = native_blocks(requests[:32]) // 5
    config = VTokenConfig(policy=policy, kv_budget_tokens=96, hash_kv_every=1, trace=True)
    outcomes = {}
    for asynchronous in (True, None):
        engine = engine_for(
            config, async_scheduling=asynchronous, num_kv_blocks=pool, max_model_len=4864,
            max_num_batched_tokens=512, max_num_seqs=32,
        )  # fmt: skip
        assert isinstance(engine.scheduler, VTokenAsyncScheduler) == bool(asynchronous)
        assert engine.core.batch_queue_size == (2 if asynchronous else 1)
        done = drive(engine, requests, max_new=64)["done"]
        tally = tallies(engine)
        assert not any(tally.violations.values()) and tally.events["I1"] > 200
        sets = {name: live_sets(entries) for name, entries in traces(engine).items()}
        tokens = {i: ids.tolist() for i, (_, ids) in done.items()}
        outcomes[bool(asynchronous)] = (tokens, sets)
        print(f"\n{policy} async={asynchronous}: {tally.events} {engine.counters.preemptions}")
    assert outcomes[True][0] == outcomes[False][0]
    assert outcomes[True][1] == outcomes[False][1]


def test_a_prompt_many_times_the_pool(hf_model):
    """6K prompt, 1K budget, 2K pool: evicted between chunks, exact, and never above its peak."""
    chunk, budget, N = 256, 1024, 16
    config = VTokenConfig(policy="h2o", kv_budget_tokens=budget, trace=True)
    engine = engine_for(
        config, num_kv_blocks=2048 // N, max_model_len=6400, max_num_batched_tokens=chunk
    )
    prompt = np.random.default_rng(3).integers(10, 500, 6144).tolist()
    engine.add("long", prompt, 40, logprobs=True)
    peak, done = 0, []
    while engine.has_unfinished():
        done += engine.step()[1]
        peak = max(peak, engine.num_used_blocks())
    assert engine.check_idle() == []
    assert peak <= cdiv(budget + chunk, N) + 1, peak
    assert engine.counters.evicted_tokens >= 6144 - budget - chunk
    assert_equals_reference(engine, hf_model("tiny-llama"), done)

"""The time model: its parts by hand, its shape over steps, its profiles."""

from __future__ import annotations

import numpy as np
import pytest

from vtoken.errors import ConfigError
from vtoken.experiments.planning.cost_model import (
    CostProfile,
    StepWork,
    decode_work,
    load_profile,
    step_bytes,
    step_flops,
    step_time_s,
)
from vtoken.experiments.planning.devices import get_device
from vtoken.experiments.planning.model_shapes import get_model_shape

LLAMA = get_model_shape("llama-3.1-8b")
SMOL = get_model_shape("smollm2-135m")
ROUND = CostProfile(name="round", bandwidth_bytes_per_s=1e12, flops_per_s=1e15)
KV_BYTES = 131072


def prompt(tokens: int, before: int = 0) -> StepWork:
    """A chunk of a prompt behind tokens of the same request."""
    pairs = tokens * before + tokens * (tokens + 1) / 2
    return StepWork(
        num_seqs=0, num_new_tokens=tokens, kv_read_tokens=before + tokens, attn_pairs=pairs
    )


def decode_s(profile, seqs, kv, **options):
    return step_time_s(profile, LLAMA, decode_work(seqs, kv), **options)


def test_decode_bytes_by_hand():
    # All weights but the input table, which is looked up; the KV read; two new entries.
    weights = 2 * (8030261248 - 128256 * 4096)
    assert step_bytes(LLAMA, decode_work(2, 5000)) == pytest.approx(weights + KV_BYTES * 5002)
    tied = 2 * 134515008 + SMOL.kv_bytes_per_token() * 11
    assert step_bytes(SMOL, decode_work(1, 10)) == pytest.approx(tied)
    moved = step_bytes(LLAMA, decode_work(2, 5000, moved_tokens=3))
    assert moved - step_bytes(LLAMA, decode_work(2, 5000)) == pytest.approx(6 * KV_BYTES)


def test_flops_by_hand():
    body = 8030261248 - 2 * 128256 * 4096
    linear = 2 * body * 2 + 2 * 128256 * 4096 * 2
    attention = 4 * 32 * 32 * 128 * 5000
    assert step_flops(LLAMA, decode_work(2, 5000)) == pytest.approx(linear + attention)


def test_step_is_bound_by_the_slower_of_memory_and_compute():
    decode = decode_work(4, 20_000)
    assert step_time_s(ROUND, LLAMA, decode) == pytest.approx(step_bytes(LLAMA, decode) / 1e12)
    prefill = prompt(8192)
    assert step_time_s(ROUND, LLAMA, prefill) == pytest.approx(step_flops(LLAMA, prefill) / 1e15)


def test_shares_and_overheads():
    half = CostProfile(
        name="half", bandwidth_bytes_per_s=1e12, flops_per_s=1e15, bandwidth_frac=0.5,
        flops_frac=0.25, step_overhead_s=0.01, request_overhead_s=0.001,
    )  # fmt: skip
    decode = decode_work(4, 20_000)
    assert step_time_s(half, LLAMA, decode) == pytest.approx(
        2 * step_time_s(ROUND, LLAMA, decode) + 0.014
    )
    prefill = prompt(8192)
    assert step_time_s(half, LLAMA, prefill) == pytest.approx(
        4 * step_time_s(ROUND, LLAMA, prefill) + 0.01
    )


def test_arrays_give_what_single_steps_give():
    seqs, kv = np.array([1, 5, 22]), np.array([100, 9000, 180_000])
    together = decode_s(ROUND, seqs, kv, tensor_parallel_size=2)
    single = [decode_s(ROUND, s, k, tensor_parallel_size=2) for s, k in zip(seqs, kv, strict=True)]
    assert together.shape == (3,) and together == pytest.approx(np.array(single))
    assert (np.diff(together) > 0).all()


def test_fewer_kv_entries_take_less_time_and_batches_pay():
    full, half = decode_s(ROUND, 8, np.array([80_000, 40_000]))
    assert half < full
    rate = [c / decode_s(ROUND, c, c * 1000) for c in (1, 8, 64)]
    assert rate[0] < rate[1] < rate[2] < 64 * rate[0]


def test_a_mixed_step_is_cheaper_than_its_parts_apart():
    """Weights are read once for both."""
    both = StepWork(num_seqs=3, num_new_tokens=53, kv_read_tokens=1050, attn_pairs=900 + 6275)
    apart = step_time_s(ROUND, LLAMA, decode_work(3, 900)) + step_time_s(
        ROUND, LLAMA, prompt(50, 100)
    )
    assert step_time_s(ROUND, LLAMA, both) < apart


def test_ranks_share_the_work_and_pay_for_the_link():
    decode = decode_work(8, 80_000)
    one = step_time_s(ROUND, LLAMA, decode)
    two = step_time_s(ROUND, LLAMA, decode, tensor_parallel_size=2)
    link = 2 * 32 * (1e-5 + 2 * 0.5 * 8 * 4096 * 2 / 2e11)
    assert two == pytest.approx(one / 2 + link)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 3"):
        step_time_s(ROUND, LLAMA, decode, tensor_parallel_size=3)


def test_faster_devices_are_faster():
    times = [decode_s(load_profile(name), 8, 64_000)
             for name in ("l4", "a100-80g", "h100-80g", "h200", "b200")]  # fmt: skip
    assert times == sorted(times, reverse=True)
    # An H100 decodes an 8B model alone at a hundred-odd tokens a second, not ten or a thousand.
    assert 0.005 < decode_s(load_profile("h100-80g"), 1, 1000) < 0.010


def test_profile_files(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("bandwidth_bytes_per_s: 2e12\nflops_per_s: 3.0e+14\nflops_frac: 0.5\n")
    profile = load_profile(path)
    assert (profile.name, profile.bandwidth_bytes_per_s, profile.flops_frac) == ("mine", 2e12, 0.5)
    path.write_text("device: h100\nstep_overhead_s: 0.5\nname: slow\n")
    profile = load_profile(str(path))
    assert (profile.name, profile.step_overhead_s) == ("slow", 0.5)
    assert profile.flops_per_s == get_device("h100").flops_per_s
    assert CostProfile.from_device(get_device("h100")) == load_profile("h100")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bandwidth_bytes_per_s: 1.0e+12", "a profile with flops_per_s"),
        ("device: h100\nflop_frac: 1", "did you mean 'flops_frac'"),
        ("device: h1000", "--device 'h1000'"),
        ("device: h100\nflops_frac: 1.5", "flops_frac: 1.5': a share of at most 1"),
        ("device: h100\nbandwidth_frac: 0", "a number above 0"),
        ("device: h100\nstep_overhead_s: -1", "a number of at least 0"),
        ("device: h100\nstep_overhead_s: .nan", "a number of at least 0"),
        ("device: h100\nflops_per_s: fast", "a number"),
        ("device: h100\nflops_per_s: true", "a number"),
        ("- 1", "keys and values"),
        ("a: [", "a YAML file"),
        ("[" * 3000, "a YAML file (maximum recursion depth"),
        ("flops_per_s: " + "9" * 5000, "a YAML file (Exceeds the limit"),
    ],
)
def test_bad_profiles(tmp_path, text, message):
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_profile(path)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_missing_profile_file(tmp_path):
    with pytest.raises(ConfigError, match="--cost-profile .*a readable file"):
        load_profile(tmp_path / "nowhere.yaml")

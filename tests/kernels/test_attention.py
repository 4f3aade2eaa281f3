"""Attention over live tokens and its score sums, against float64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from kernel_problems import load_cpp, make_problem, reference

from vtoken.errors import UnsupportedError
from vtoken.kernels.cpp import pack_mask
from vtoken.kernels.layout import KVLayout, check_supported

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The kernels compute in float32 from what the cache holds; what is left is rounding the output.
OUT_ERROR = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}


def run(kernels, problem, *, score_queries=-1, softcap=0.0, masked=True, threads=None, out=True):
    plan = problem.plan(kernels, masked=masked, score_queries=score_queries)
    result = torch.full_like(problem.query, 7.0) if out else None
    scores = torch.zeros(problem.num_slots)
    kernels.attention(
        plan, problem.query, problem.kv, result, layout=problem.layout, scale=problem.scale,
        softcap=softcap, step_scores=scores, num_threads=threads,
    )  # fmt: skip
    return result, scores


def check(kernels, problem, **options):
    out, scores = run(kernels, problem, **options)
    options.pop("masked", None), options.pop("threads", None)
    want, want_scores = reference(problem, **options)
    error = np.abs(out.double().numpy() - want).max() / np.abs(want).max()
    assert error <= OUT_ERROR[problem.kv.dtype], error
    top = max(want_scores.max(), 1e-30)
    assert np.abs(scores.double().numpy() - want_scores).max() <= 2e-6 * top
    return out, scores


MIXED = {"queries": [1, 5, 1, 40, 0, 1], "lens": [1, 19, 333, 90, 30, 700]}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("holes", [0.0, 0.25, 0.5, 0.9])
def test_mixed_batch(kernels, dtype, holes):
    check(kernels, make_problem(**MIXED, dtype=dtype, holes=holes, seed=1))


@pytest.mark.parametrize("head_size", [16, 48, 64, 80, 112, 128, 160, 240, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_sizes(kernels, dtype, head_size):
    problem = make_problem(
        queries=[1, 3, 1], lens=[70, 33, 300], head_size=head_size, dtype=dtype, seed=2
    )
    check(kernels, problem)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_query_groups(kernels, dtype, group):
    problem = make_problem(
        queries=[1, 7], lens=[150, 40], heads=2 * group, kv_heads=2, dtype=dtype, seed=3
    )
    check(kernels, problem)


@pytest.mark.parametrize(
    "block_size, k_group",
    [(16, 16), (32, 32), (32, 16), (48, 48), (64, 64), (64, 32), (96, 32), (112, 112), (128, 128),
     (128, 32)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_block_sizes(kernels, dtype, block_size, k_group):
    problem = make_problem(
        queries=[1, 6, 1], lens=[200, 131, 64], block_size=block_size, k_group=k_group,
        dtype=dtype, seed=4,
    )  # fmt: skip
    check(kernels, problem)


@pytest.mark.parametrize("softcap", [0.5, 30.0, 50.0])
def test_softcap(kernels, softcap):
    problem = make_problem(queries=[1, 9], lens=[300, 80], seed=5, spread=4.0)
    check(kernels, problem, softcap=softcap)


@pytest.mark.parametrize("count", [0, 1, 3, 32, -1])
def test_counted_queries(kernels, count):
    problem = make_problem(queries=[1, 50, 8], lens=[90, 210, 20], seed=6)
    check(kernels, problem, score_queries=count)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf"), 1e38])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dead_slots_do_not_spread(kernels, dtype, poison):
    """What dead slots hold, inside the length and beyond it, changes no bit of the result."""
    clean = make_problem(**MIXED, dtype=dtype, seed=7, poison=0.0)
    dirty = make_problem(**MIXED, dtype=dtype, seed=7, poison=poison)
    for a, b in zip(run(kernels, clean), run(kernels, dirty), strict=True):
        assert torch.isfinite(b).all()
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_sum_to_heads_times_queries(kernels, dtype):
    problem = make_problem(queries=[1, 30], lens=[900, 400], dtype=dtype, seed=8)
    _, scores = run(kernels, problem)
    for r, n in enumerate([1, 30]):
        total = float(scores[torch.from_numpy(problem.slots(r))].double().sum())
        assert abs(total / (6 * n) - 1) <= 1e-5


def test_scores_add_up_over_layers(kernels):
    problem = make_problem(queries=[1], lens=[60], seed=9)
    plan = problem.plan(kernels)
    scores = torch.zeros(problem.num_slots)
    out = torch.empty_like(problem.query)
    for _ in range(3):
        kernels.attention(
            plan, problem.query, problem.kv, out, layout=problem.layout, scale=problem.scale,
            step_scores=scores,
        )  # fmt: skip
    _, want = reference(problem)
    assert np.abs(scores.numpy() - 3 * want).max() <= 1e-5


def test_scores_alone_equal_scores_with_output(kernels):
    problem = make_problem(queries=[1, 40, 1], lens=[500, 100, 20], seed=10)
    _, both = run(kernels, problem, score_queries=7)
    _, alone = run(kernels, problem, score_queries=7, out=False)
    assert float(alone.sum()) > 0
    assert torch.allclose(both, alone, rtol=1e-6, atol=1e-7)


def test_shared_blocks(kernels):
    """Two requests that read the same blocks both add to their slots."""
    problem = make_problem(queries=[1, 1, 4], lens=[64, 70, 64], holes=0.0, seed=11)
    problem.block_table[1, :4] = problem.block_table[0, :4]
    problem.block_table[2, :3] = problem.block_table[0, :3]
    check(kernels, problem)


def test_no_mask_means_all_live(kernels):
    problem = make_problem(queries=[1, 20], lens=[333, 61], holes=0.0, seed=12)
    problem.live[:] = True
    check(kernels, problem, masked=False)


def test_new_token_may_take_a_hole(kernels):
    """With one query the tail may be dead: the token sits in a reused slot."""
    problem = make_problem(queries=[1], lens=[40], holes=0.3, seed=13)
    problem.live[0, 35:40] = False
    check(kernels, problem)


def test_whole_blocks_dead(kernels):
    problem = make_problem(queries=[1, 3], lens=[900, 900], holes=0.0, seed=14)
    problem.live[:, 20:850] = False
    problem.live[:, 400] = True
    check(kernels, problem)


def test_nothing_live_gives_zeros(kernels):
    problem = make_problem(queries=[1, 1], lens=[40, 40], seed=15)
    problem.live[0] = False
    out, _ = check(kernels, problem)
    assert not out[0].any() and out[1].any()


def test_no_requests(kernels):
    problem = make_problem(queries=[0, 0], lens=[5, 0], seed=16)
    out, scores = run(kernels, problem)
    assert out.numel() == 0 and not scores.any()


def test_strided_query_and_output(kernels):
    """Query rows come out of a fused projection: row stride beyond HQ * D."""
    problem = make_problem(queries=[1, 4], lens=[100, 50], seed=17)
    want, _ = run(kernels, problem)
    wide = torch.randn(5, 10, 32)
    wide[:, 2:8] = problem.query
    problem.query = wide[:, 2:8]
    holder = torch.zeros(7, 9, 32)
    out = holder[:5, 1:7]
    kernels.attention(
        problem.plan(kernels), problem.query, problem.kv, out, layout=problem.layout,
        scale=problem.scale,
    )  # fmt: skip
    assert torch.equal(out, want)
    assert not holder[:, 0].any() and not holder[:, 7:].any() and not holder[5:].any()


def test_strided_kv(kernels):
    """Layers may be slices of one allocation: any block and head stride."""
    problem = make_problem(queries=[1, 4], lens=[100, 50], seed=18)
    want, want_scores = run(kernels, problem)
    b, h, n, row = problem.kv.shape
    big = torch.full((b, h + 1, 2 * n, row), float("nan"))
    big[:, 1:, :n] = problem.kv
    problem.kv = big[:, 1:, :n]
    out, scores = run(kernels, problem)
    assert torch.equal(out, want) and torch.equal(scores, want_scores)


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("shared", [False, True])
def test_threads_change_no_bit(threads, shared):
    kernels = load_cpp()
    problem = make_problem(
        queries=[1, 60, 1, 1], lens=[2100, 400, 1500, 800], heads=8, head_size=64, seed=19
    )
    if shared:
        problem.live[2] = problem.live[0, : problem.live.shape[1]]
        problem.block_table[2] = problem.block_table[0]
    want = run(kernels, problem, threads=1)
    for _ in range(5):
        got = run(kernels, problem, threads=threads)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_overlapping_calls():
    """Calls from several Python threads share nothing but the plan."""
    kernels = load_cpp()
    problem = make_problem(queries=[1, 9], lens=[900, 300], seed=20)
    want = run(kernels, problem, threads=1)
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda i: run(kernels, problem, threads=1 + i % 2), range(40)))
    assert all(torch.equal(a, b) for one in got for a, b in zip(want, one, strict=True))


@pytest.mark.parametrize("width", [1, 63, 64, 65, 200])
def test_packed_masks(width):
    live = torch.rand(3, width, generator=torch.Generator().manual_seed(21)) < 0.5
    bits = pack_mask(live)
    assert bits.dtype == torch.int64 and bits.shape == (3, -(-width // 64))
    for r, i in np.ndindex(3, width):
        assert bool(int(bits[r, i // 64]) >> (i % 64) & 1) == bool(live[r, i])


def test_contradictions_are_refused(kernels):
    problem = make_problem(queries=[1, 4], lens=[100, 50], seed=22)
    problem.live[1, 48] = False
    with pytest.raises(AssertionError, match="request 1.*dead"):
        problem.plan(kernels)
    problem.seq_lens[1] = 3
    with pytest.raises(AssertionError, match="request 1"):
        problem.plan(kernels)
    problem = make_problem(queries=[1], lens=[100], seed=22)
    plan = problem.plan(kernels)
    with pytest.raises(AssertionError):  # a block id beyond the cache
        kernels.attention(
            plan, problem.query, problem.kv[: plan.max_block], problem.query.clone(),
            layout=problem.layout, scale=1.0,
        )  # fmt: skip


@pytest.mark.parametrize(
    "block_size, head_size, k_group, dtype, told",
    [
        (16, 40, 16, torch.float32, "multiple of 16 up to 256"),
        (16, 272, 16, torch.float32, "multiple of 16 up to 256"),
        (8, 64, 8, torch.float32, "multiple of 16 up to 128"),
        (144, 64, 144, torch.float32, "multiple of 16 up to 128"),
        (48, 64, 32, torch.float32, "divisor of the block size"),
        (16, 64, 16, torch.float8_e4m3fn, "float32, bfloat16, float16"),
    ],
)
def test_what_cannot_run_is_refused(block_size, head_size, k_group, dtype, told):
    layout = KVLayout(block_size=block_size, head_size=head_size, k_group=k_group)
    with pytest.raises(UnsupportedError, match=told):
        check_supported(layout, dtype)

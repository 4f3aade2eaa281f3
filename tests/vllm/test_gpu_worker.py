"""The torch-level parts of the GPU worker, on the CPU: moves and refusals."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vtoken.config import VTokenConfig
from vtoken.errors import UnsupportedError
from vtoken.vllm_plugin import compat
from vtoken.vllm_plugin.gpu_worker import VTokenGPUWorker, move_tokens
from vtoken.vllm_plugin.support import check_gpu_supported


def test_moves_read_all_sources_before_they_write():
    kvs = [torch.arange(4 * 2 * 8 * 6.0).reshape(4, 2, 8, 6) * (i + 1) for i in range(3)]
    before = [kv.clone() for kv in kvs]
    # A ring: every destination is another move's source.
    source, destination = torch.tensor([9, 17, 30]), torch.tensor([17, 30, 9])
    move_tokens(kvs, source, destination)
    for kv, old in zip(kvs, before, strict=True):
        for s, d in zip(source.tolist(), destination.tolist(), strict=True):
            assert torch.equal(kv[d // 8, :, d % 8], old[s // 8, :, s % 8])
        untouched = torch.ones(32, dtype=torch.bool)
        untouched[destination] = False
        flat, flat_old = (x.transpose(1, 2).reshape(32, -1) for x in (kv, old))
        assert torch.equal(flat[untouched], flat_old[untouched])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"mode": "naive", "policy": "random"}, "layout on GPUs: with holes"),
        ({"policy": "random", "fragmentation_threshold": 0.3}, "layout on GPUs: with holes"),
        ({"policy": "h2o"}, "policies on GPUs: h2o"),
    ],
)
def test_what_needs_a_kernel_of_ours_is_refused_with_what_works(settings, named):
    with pytest.raises(UnsupportedError, match=named):
        check_gpu_supported(VTokenConfig.from_mapping(settings), 16)


def test_score_free_packed_policies_are_let_through():
    check_gpu_supported(VTokenConfig.from_mapping({"policy": "streaming-llm"}), 16)


def test_another_vllm_is_refused_before_the_worker_starts(monkeypatch):
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.1.0")
    with pytest.raises(UnsupportedError, match="vToken works with vLLM"):
        VTokenGPUWorker()

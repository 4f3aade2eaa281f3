"""vLLM's GPU worker with vToken's runner V1 mixin: packed layouts, score-free policies.

Written against vLLM 0.32's sources and not run on a GPU yet. Copies go out on the compute stream
before the forward pass of the same step, so stream order alone makes them safe. The default KV
layout there is logical [blocks, KV heads, block size, 2 * head size] per layer, so one indexed
copy moves K and V together. Holes and scores need a kernel of ours: refused until it exists.
"""

from __future__ import annotations

import numpy as np
import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vtoken.errors import UnsupportedError
from vtoken.vllm_plugin import compat
from vtoken.vllm_plugin.runner_v1 import VTokenRunnerV1Mixin


def move_tokens(kvs: list[torch.Tensor], source: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy tokens from slots to slots in every layer; each layer is gathered, then scattered.

    Args:
        kvs: per layer, logical [B, H, N, 2 * D].
        source, destination: int64[M] on the tensors' device; slot = block * N + offset.
    """
    N = kvs[0].shape[2]
    from_block, from_offset = source // N, source % N
    to_block, to_offset = destination // N, destination % N
    for kv in kvs:
        kv[to_block, :, to_offset] = kv[from_block, :, from_offset]


class VTokenGPUModelRunner(VTokenRunnerV1Mixin, GPUModelRunner):
    """vLLM's GPU runner V1."""

    def __init__(self, vllm_config, device) -> None:
        self._vtoken_init(vllm_config)
        super().__init__(vllm_config, device)

    def vtoken_setup_kv(self, layers: dict) -> None:
        self.vtoken_kvs = [layer.kv_cache for layer in layers.values()]
        for name, kv in zip(layers, self.vtoken_kvs, strict=True):
            if kv.ndim != 4:
                raise UnsupportedError(
                    "KV cache layout", f"{name}: {tuple(kv.shape)}",
                    "relocation is written for [blocks, KV heads, block size, 2 * head size]",
                )  # fmt: skip

    def vtoken_move(self, source: np.ndarray, destination: np.ndarray) -> None:
        device = self.vtoken_kvs[0].device
        move_tokens(
            self.vtoken_kvs,
            torch.from_numpy(source).to(device, non_blocking=True),
            torch.from_numpy(destination).to(device, non_blocking=True),
        )


class VTokenGPUWorker(Worker):
    """vLLM's GPU worker."""

    def __init__(self, *args, **kwargs) -> None:
        compat.check("gpu")  # here: `_make_model_runner` is not called where vLLM renamed it
        super().__init__(*args, **kwargs)

    def _make_model_runner(self):
        assert not self.use_v2_model_runner, "refused when the config was finished"
        return VTokenGPUModelRunner(self.vllm_config, self.device)

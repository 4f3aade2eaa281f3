"""Workers that build vLLM's model runners with vToken's mixin in them."""

from __future__ import annotations

import torch
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vtoken.vllm_plugin.runner_v1 import VTokenRunnerV1Mixin


def kv_views(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K as [B, H, D, N] and V as [B, H, N, D], views of one layer's CPU_ATTN cache [B, H, N, 2D].

    Layout of the ISAs "vec" and "vec16" (vLLM csrc/cpu/cpu_attn_vec.hpp); probed at start-up.
    """
    B, H, N, two_d = kv.shape
    D = two_d // 2
    flat = kv.view(B, H, N * two_d)
    return flat[..., : N * D].view(B, H, D, N), flat[..., N * D :].view(B, H, N, D)


class VTokenCPUModelRunner(VTokenRunnerV1Mixin, CPUModelRunner):
    """vLLM's CPU runner."""

    def __init__(self, vllm_config, device) -> None:
        self._vtoken_init(vllm_config)
        super().__init__(vllm_config, device)

    def vtoken_setup_kv(self, layers: dict) -> None:
        self.vtoken_kv = [kv_views(layer.kv_cache) for layer in layers.values()]

    def vtoken_move(self, source, destination) -> None:
        N = self.vtoken_kv[0][1].shape[2]
        src, dst = torch.from_numpy(source), torch.from_numpy(destination)
        sb, so, db, do = src // N, src % N, dst // N, dst % N
        for K, V in self.vtoken_kv:  # the right side is a copy: gathered before it is scattered
            K[db, :, :, do] = K[sb, :, :, so]
            V[db, :, do] = V[sb, :, so]


class VTokenCPUWorker(CPUWorker):
    """vLLM's CPU worker."""

    def init_device(self) -> None:
        # CPUWorker builds its runner inline: put our class under the name it looks up.
        stock = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = VTokenCPUModelRunner
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = stock
        assert isinstance(self.model_runner, VTokenCPUModelRunner)

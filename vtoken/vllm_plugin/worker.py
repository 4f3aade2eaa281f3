"""Workers that build vLLM's model runners with vToken's mixin in them."""

from __future__ import annotations

from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vtoken.vllm_plugin.cpu_attention import CPUAttention
from vtoken.vllm_plugin.cpu_backend import attention_backend
from vtoken.vllm_plugin.runner_v1 import VTokenRunnerV1Mixin


class VTokenCPUModelRunner(VTokenRunnerV1Mixin, CPUModelRunner):
    """vLLM's CPU runner."""

    def __init__(self, vllm_config, device) -> None:
        self._vtoken_init(vllm_config)
        super().__init__(vllm_config, device)

    def load_model(self, *args, **kwargs) -> None:
        with attention_backend():
            super().load_model(*args, **kwargs)

    def vtoken_setup_kv(self, layers: dict) -> None:
        block_size = next(iter(layers.values())).kv_cache.shape[2]
        self.vtoken_attention = CPUAttention(self, layers, self.vtoken_config, block_size)

    def vtoken_move(self, source, destination) -> None:
        self.vtoken_attention.move(source, destination)


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

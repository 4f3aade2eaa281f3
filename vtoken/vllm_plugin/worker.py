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

    def _sample(self, logits, spec_decode_metadata):
        # A prompt's chunk that is not its last samples a token which is thrown away: its seeded
        # generator is put back, so that the tokens that count do not depend on the chunks.
        before = [(g, g.get_state()) for g in self._discarded_generators().values()]
        out = super()._sample(logits, spec_decode_metadata)
        for generator, state in before:
            generator.set_state(state)
        return out

    def _bookkeeping_sync(self, *args, **kwargs):
        # vLLM would rewind these by an offset here, which CPU generators do not have.
        generators, rewound = self.input_batch.generators, self._discarded_generators()
        for row in rewound:
            del generators[row]
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            generators.update(rewound)

    def _discarded_generators(self) -> dict:
        """Seeded generators of rows whose sampled token is thrown away, by row."""
        discarded = self.discard_request_mask.np[: self.input_batch.num_reqs]
        return {i: g for i, g in self.input_batch.generators.items() if discarded[i]}


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

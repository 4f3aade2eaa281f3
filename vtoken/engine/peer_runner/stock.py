"""Stock vLLM."""

from __future__ import annotations

import os

from .base import closed_loop


class Stock:
    """vLLM as it is: its plugins are off, ours among them."""

    module, args = "vllm", None  # args: any of EngineArgs

    def __init__(self, settings: dict) -> None:
        os.environ.update(VLLM_PLUGINS="", VLLM_ENABLE_V1_MULTIPROCESSING="0")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        del settings["peer"]  # the rest is vLLM's
        self.engine = LLMEngine.from_engine_args(EngineArgs(**settings))
        # One block is never handed out (vLLM's block_pool.py, null_block).
        num_blocks = settings["num_gpu_blocks_override"] - 1
        self.about = {
            "version": f"vllm {vllm.__version__}",
            "pool_tokens": num_blocks * settings["block_size"],
        }
        self._job = 0

    def run(self, requests: list, concurrency: int, clock) -> tuple[list, dict]:
        self.engine.reset_prefix_cache()
        self._job += 1
        self._seen = [0] * len(requests)
        times, most = closed_loop(self, requests, concurrency, clock)
        return times, {"concurrency": most}

    def add(self, index: int, ids: list, num: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=num, ignore_eos=True, detokenize=False)
        self.engine.add_request(f"{self._job}-{index}", {"prompt_token_ids": ids}, params)

    def step(self):
        for out in self.engine.step():
            index = int(out.request_id.split("-")[1])
            count = len(out.outputs[0].token_ids) - self._seen[index]
            self._seen[index] += count
            yield index, count, out.finished

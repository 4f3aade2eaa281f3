"""Runs requests on an engine that is not ours; started in another environment by
`vtoken.experiments.bench.peers`.

    python peer_runner.py stock|kvpress SETTINGS_JSON

Needs nothing of vToken. One job a line on stdin ({"requests", "concurrency", "result"}); the
times go to the file `result`, then a line "done" to stdout. Ends at the end of stdin.

Result: {"times": [[submitted_s, [token_s, ...]], ...], "wall_s": s}, in the order of requests.
"""

from __future__ import annotations

import json
import os
import sys
import time

READY, DONE = "vtoken-peer ready", "vtoken-peer done"


class Stock:
    """vLLM as it is: its plugins are off, ours among them."""

    def __init__(self, settings: dict) -> None:
        os.environ.update(VLLM_PLUGINS="", VLLM_ENABLE_V1_MULTIPROCESSING="0")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.version = vllm.__version__
        self.engine = LLMEngine.from_engine_args(EngineArgs(**settings))
        self._job = 0

    def run(self, requests: list, concurrency: int, clock) -> list:
        from vllm import SamplingParams

        self.engine.reset_prefix_cache()
        self._job += 1
        waiting = list(enumerate(requests))[::-1]
        times: list = [None] * len(requests)
        seen = [0] * len(requests)
        running, start = 0, clock()
        while waiting or running:
            while waiting and running < concurrency:
                index, (ids, num) = waiting.pop()
                params = SamplingParams(
                    temperature=0.0, max_tokens=num, ignore_eos=True, detokenize=False
                )
                times[index] = [clock() - start, []]
                self.engine.add_request(f"{self._job}-{index}", {"prompt_token_ids": ids}, params)
                running += 1
            for out in self.engine.step():
                index = int(out.request_id.split("-")[1])
                count = len(out.outputs[0].token_ids) - seen[index]
                seen[index] += count
                times[index][1] += [clock() - start] * count
                running -= out.finished
        return times


class KvPress:
    """Hugging Face with a press: the prompt is compressed after its prefill, one at a time."""

    def __init__(self, settings: dict) -> None:
        import kvpress
        import torch
        from transformers import AutoModelForCausalLM

        self.version = getattr(kvpress, "__version__", "unknown")
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=getattr(torch, settings.get("dtype") or "float32")
        ).eval()
        kind = getattr(kvpress, settings["press"])
        self.press = kind(compression_ratio=settings["eviction_ratio"])

    def run(self, requests: list, concurrency: int, clock) -> list:
        start = clock()
        return [self._one(ids, num, lambda: clock() - start) for ids, num in requests]

    def _one(self, ids: list, num: int, now) -> list:
        from transformers import DynamicCache

        torch, times, submitted = self.torch, [], now()
        cache, device = DynamicCache(), self.model.device
        with torch.inference_mode():
            tokens = torch.tensor([ids], device=device)
            with self.press(self.model):
                out = self.model(input_ids=tokens, past_key_values=cache)
            for step in range(num):
                token = out.logits[:, -1:].argmax(-1)
                times.append(now())
                if step + 1 == num:
                    break
                # Positions go on from the whole prompt: keys keep theirs when others go.
                position = torch.tensor([[len(ids) + step]], device=device)
                out = self.model(input_ids=token, past_key_values=cache, position_ids=position)
        return [submitted, times]


ENGINES = {"stock": Stock, "kvpress": KvPress}


def main() -> None:
    sys.path.pop(0)  # this file's folder: its neighbours' names are not for others to import
    name, settings = sys.argv[1], json.loads(sys.argv[2])
    clock = time.process_time if settings.pop("clock", "wall") == "cpu" else time.perf_counter
    engine = ENGINES[name](settings)
    print(f"{READY} {engine.version}", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        start = clock()
        times = engine.run(job["requests"], job["concurrency"], clock)
        with open(job["result"], "w", encoding="utf-8") as file:
            json.dump({"times": times, "wall_s": clock() - start}, file)
        print(DONE, flush=True)
    os._exit(0)  # an engine's threads would keep the process from ending


if __name__ == "__main__":
    main()

"""OpenVINO GenAI, with and without its own cache eviction."""

from __future__ import annotations

import os

from .base import Refused, closed_loop
from .openvino_ir import openvino_ir

OPENVINO_BLOCK_TOKENS = {"CPU": 32, "GPU": 16}  # not to be set; as its documentation says
OPENVINO_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class OpenVino:
    """OpenVINO GenAI's continuous batching; its own eviction is off."""

    module, evicts = "openvino_genai", False
    args = ("ir", "device", "threads", "dtype", "max_num_batched_tokens")

    def __init__(self, settings: dict) -> None:
        import openvino_genai as genai

        self.genai = genai
        device = settings.get("device") or "CPU"
        self.block_size = OPENVINO_BLOCK_TOKENS.get(device.split(".")[0])
        if self.block_size is None:
            raise Refused(
                f"--peer-args {settings['peer']}.device", device,
                "one of " + ", ".join(OPENVINO_BLOCK_TOKENS),
            )  # fmt: skip
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = num_blocks = settings["pool_tokens"] // self.block_size
        scheduler.max_num_seqs = settings["max_num_seqs"]
        scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = True, False
        if settings.get("max_num_batched_tokens"):
            scheduler.max_num_batched_tokens = settings["max_num_batched_tokens"]
        self.about = {
            "version": f"openvino-genai {genai.__version__}",
            "pool_tokens": num_blocks * self.block_size,
        }
        if self.evicts:
            scheduler.use_cache_eviction = True
            scheduler.cache_eviction_config = self._eviction(settings)
        self.pipe = genai.ContinuousBatchingPipeline(
            openvino_ir(settings), scheduler, device, _openvino_properties(settings)
        )
        self._handles: dict = {}
        self._next_id = 0

    def _eviction(self, settings: dict):
        """Its eviction with the budget, which it keeps in whole blocks while it decodes."""
        N, peer = self.block_size, settings["peer"]
        modes = ("SUM", "NORM_SUM")
        mode = settings.get("aggregation") or "NORM_SUM"
        if mode not in modes:
            allowed = "one of " + ", ".join(modes)
            raise Refused(f"--peer-args {peer}.aggregation", mode, allowed)
        budget = settings["budget_tokens"] // N * N
        start = settings.get("start_size") or N
        recent = settings.get("recent_size") or max(N, min(128, budget // 2) // N * N)
        for name, value in (("start_size", start), ("recent_size", recent)):
            if value % N:
                raise Refused(f"--peer-args {peer}.{name}", value, f"a multiple of {N} tokens")
        if start + recent + N > budget:
            raise Refused(
                "--kv-budget-tokens", settings["budget_tokens"],
                f"at least {start + recent + N} for {peer}: its first {start} tokens, its last "
                f"{recent}, and a block of {N} between",
            )  # fmt: skip
        self.about["budget_tokens"] = budget
        self.about["eviction"] = f"{mode}, first {start}, last {recent}"
        kind = getattr(self.genai.AggregationMode, mode)
        return self.genai.CacheEvictionConfig(start, recent, budget, kind)

    def run(self, requests: list, concurrency: int, clock) -> tuple[list, dict]:
        self._peak_percent = 0.0
        times, most = closed_loop(self, requests, concurrency, clock)
        pool = self.about["pool_tokens"]
        return times, {
            "concurrency": most,
            "peak_pool_tokens": round(self._peak_percent / 100 * pool),
        }

    def add(self, index: int, ids: list, num: int) -> None:
        import numpy as np
        import openvino as ov

        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num, True, False
        tensor = ov.Tensor(np.array([ids], dtype=np.int64))
        self._handles[index] = self.pipe.add_request(self._next_id, tensor, config)
        self._next_id += 1

    def step(self):
        self.pipe.step()
        self._peak_percent = max(self._peak_percent, self.pipe.get_metrics().cache_usage)
        status = self.genai.GenerationStatus
        for index, handle in list(self._handles.items()):
            count = 0
            while handle.can_read():
                count += sum(len(out.generated_ids) for out in handle.read().values())
            if handle.get_status() == status.IGNORED:
                raise RuntimeError(f"a request does not fit {self.about['pool_tokens']:,} slots")
            is_finished = handle.get_status() != status.RUNNING
            if is_finished:
                del self._handles[index]
            yield index, count, is_finished


class OpenVinoEviction(OpenVino):
    """OpenVINO GenAI with its own cache eviction."""

    evicts = True
    args = (*OpenVino.args, "aggregation", "start_size", "recent_size")


def _openvino_properties(settings: dict) -> dict:
    kind = OPENVINO_TYPES[settings["dtype"]]
    properties = {"INFERENCE_PRECISION_HINT": kind, "KV_CACHE_PRECISION": kind}
    # Its threads are not OpenMP's: what binds the others has to be told to it.
    threads = settings.get("threads") or os.environ.get("OMP_NUM_THREADS")
    if threads:
        properties["INFERENCE_NUM_THREADS"] = int(threads)
    return properties

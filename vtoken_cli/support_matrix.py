"""What works, what was never run and what is refused: one table for `vtoken env` and the README.

A row that works names the test that shows it. A refused row gives the reason that the refusal
itself gives (`vtoken/vllm_plugin/support.py`); `tests/meta` keeps the two the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["works", "untested", "refused", "unavailable"]


@dataclass(frozen=True)
class Support:
    """One row. `evidence` is a test file for what works, and a reason for everything else."""

    feature: str
    state: State
    evidence: str

    def as_row(self) -> dict[str, str]:
        """Return the row as `vtoken env --json` shows it."""
        kind = "test" if self.state == "works" else "reason"
        return {"feature": self.feature, "state": self.state, kind: self.evidence}


_NOT_FULL_ATTENTION = "only full attention layers keep one relocatable entry per token"

SUPPORT = (
    Support("all built-in policies, packed and with holes, on CPUs", "works",
            "tests/vllm/test_scores_kernels.py"),
    Support("chunked prefill", "works", "tests/vllm/test_deferred.py"),
    Support("prefix caching (--shared-prefix protect)", "works",
            "tests/vllm/test_scores_restart.py"),
    Support("preemption", "works", "tests/stateful/test_scheduler_machine.py"),
    Support("asynchronous scheduling", "works", "tests/vllm/test_decisions_dry.py"),
    Support("Llama, Mistral, Qwen2 and Gemma 1 models", "works", "tests/vllm/test_verify.py"),
    Support("recorded and replayed decisions", "works", "tests/vllm/test_decisions_dry.py"),
    Support("dry runs without a model", "works", "tests/unit/test_capacity_dry.py"),
    Support("vLLM's OpenAI-compatible server", "works", "tests/server/test_openai.py"),
    Support("speculative decoding", "refused",
            "rejected drafts would take back tokens that were already placed"),
    Support("KV connectors", "refused",
            "a connector addresses KV by block position, which relocation changes"),
    Support("decode or prefill context parallelism", "refused",
            "a block's tokens are spread over ranks there"),
    Support("dual batch overlap", "refused",
            "the hooks rewrite inputs once per step, not once per microbatch"),
    Support("encoder-decoder models", "refused",
            "cross attention keeps a second cache that policies do not know"),
    Support("an FP8 KV cache", "refused",
            "relocation of scaled KV is not tested; use --kv-cache-dtype auto"),
    Support("input streams (sessions whose prompt goes on)", "refused",
            "a request's tokens are counted from its first step, and such a prompt has several"),
    Support("Model Runner V2", "refused",
            "the hooks are written for runner V1; set VLLM_USE_V2_MODEL_RUNNER=0"),
    Support("MLA, Mamba and hybrid models", "refused", _NOT_FULL_ATTENTION),
    Support("sliding-window, chunked and ALiBi attention", "refused",
            "they count physical distance, which relocation changes"),
    Support("layers that share another layer's KV", "refused",
            "moves and scores would be applied twice"),
    Support("policies with scores under tensor or pipeline parallelism", "refused",
            "scores are not summed over tensor or pipeline ranks yet"),
    Support("asynchronous relocation", "refused", "the copy-stream forms are not there yet"),
    Support("GPUs: packed layouts and policies without scores (Model Runner V1)", "untested",
            "written from vLLM's sources; no GPU has run it"),
    Support("GPUs: layouts with holes", "refused",
            "they need a live-mask attention kernel that exists for CPUs only"),
    Support("GPUs: policies with scores", "refused",
            "GPU attention does not give attention scores yet"),
)  # fmt: skip

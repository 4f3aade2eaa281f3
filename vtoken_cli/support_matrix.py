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
    Support("GPUs (Model Runner V1)", "untested", "written from vLLM's sources; no GPU has run it"),
)  # fmt: skip

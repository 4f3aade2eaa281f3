"""A masked reference: a Hugging Face model that attends to exactly what the engine attended to.

The engine records, per request and step, which ids were live (`TraceEntry`). One forward pass
over the whole sequence with a 4D mask replays that: row t of the mask allows the ids that were
live when token t was computed, and the tokens of its own chunk up to itself. Keys and values of a
token depend on its own row alone, so this equals the step-by-step computation.

Shape legend: T tokens of prompt and output together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vtoken.recording.trace import TraceEntry


@dataclass
class ReferenceResult:
    """How an engine's output compares with the reference's.

    Attributes:
        tokens: generated tokens compared.
        mismatches: (index of the generated token, engine's id, reference's id, gap between the
            reference's two best logits there).
        max_abs_logprob_diff: over all compared tokens, natural log.
    """

    tokens: int = 0
    mismatches: list[tuple[int, int, int, float]] = field(default_factory=list)
    max_abs_logprob_diff: float = 0.0

    def add(self, other: ReferenceResult) -> None:
        self.tokens += other.tokens
        self.mismatches += other.mismatches
        self.max_abs_logprob_diff = max(self.max_abs_logprob_diff, other.max_abs_logprob_diff)


def load_reference(model: str):
    """Load a Hugging Face causal LM in float32 with plain (eager) attention."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    return loaded.eval()


def attention_mask(num_tokens: int, entries: Sequence[TraceEntry]) -> np.ndarray:
    """bool[T, T], which ids each token attended to; causal where nothing was recorded.

    Unrecorded rows are prefix-cache hits: KV that another request computed before any eviction.
    """
    allowed = np.tri(num_tokens, dtype=bool)
    for e in entries:
        rows = slice(e.first_id, e.first_id + e.num_new_tokens)
        allowed[rows, : e.first_id] = False
        allowed[rows, e.live_ids] = True
    return allowed


def compare(
    model,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    output_logprobs: Sequence[float],
    entries: Sequence[TraceEntry],
) -> ReferenceResult:
    """Compare one request's greedy output with the reference, token by token.

    Args:
        model: from `load_reference`.
        entries: the request's trace in step order; after a preemption the KV is computed anew,
            so each preemption count is replayed on its own.
    """
    result = ReferenceResult()
    # A token that was in flight at a preemption may be dropped and drawn again: the last one counts.
    drawn_in = {e.first_id + e.num_new_tokens: e.num_preemptions for e in entries if e.is_sampled}
    for epoch in sorted({e.num_preemptions for e in entries}):
        mine = [e for e in entries if e.num_preemptions == epoch]
        ends = sorted(p for p, drawn in drawn_in.items() if drawn == epoch)
        result.add(_compare_epoch(model, prompt_ids, output_ids, output_logprobs, mine, ends))
    return result


def _compare_epoch(
    model, prompt_ids, output_ids, output_logprobs, entries, ends
) -> ReferenceResult:
    import torch

    tokens = [*prompt_ids, *output_ids]
    first_out = len(prompt_ids)
    ends = [p for p in ends if first_out <= p < len(tokens)]
    if not ends:
        return ReferenceResult()
    length = max(ends)
    allowed = torch.from_numpy(attention_mask(length, entries)[:length])
    mask = torch.zeros(length, length).masked_fill_(~allowed, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        logits = model(
            input_ids=torch.tensor([tokens[:length]]),
            attention_mask=mask[None, None],
            position_ids=torch.arange(length)[None],
            use_cache=False,
            logits_to_keep=torch.tensor(ends) - 1,
        ).logits[0]
    logprobs = logits.float().log_softmax(-1)
    result = ReferenceResult(tokens=len(ends))
    for row, position in enumerate(ends):
        j = position - first_out
        best = logits[row].topk(2)
        expected = int(best.indices[0])
        if expected != output_ids[j]:
            gap = float(best.values[0] - best.values[1])
            result.mismatches.append((j, output_ids[j], expected, gap))
        diff = abs(float(logprobs[row, output_ids[j]]) - output_logprobs[j])
        result.max_abs_logprob_diff = max(result.max_abs_logprob_diff, diff)
    return result

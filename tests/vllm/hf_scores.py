"""What every policy's scores should be, from Hugging Face's own attention weights and keys.

One eager forward over the whole sequence, with the mask that the engine's trace gives, yields
each query's attention to each key in each layer and head. The rules of ScoreKind are then applied
step by step in plain numpy.

Legend: T tokens.
"""

from __future__ import annotations

import numpy as np

from vtoken.policies.base import ScoreKind
from vtoken.verify.reference import attention_mask


class HFScores:
    """Scores of one request after each of its steps.

    Attributes:
        by_step: {step_seq: float64[T]}, NaN for tokens that are not computed or not live then.
    """

    def __init__(self, model, tokens, entries, kind: ScoreKind, score_queries: int) -> None:
        """Args:
        score_queries: the last N queries of a chunk that count; -1 for all.
        """
        self.kind = kind
        self.by_step: dict[int, np.ndarray] = {}
        self.smallest_margin = np.inf  # relative distance of any count decision to its bar
        num = entries[-1].first_id + entries[-1].num_new_tokens
        attention, norms, rows = self._forward(model, tokens[:num], entries)
        scores, live = np.zeros(num), np.zeros(num, bool)
        for e in entries:
            first, n = e.first_id, e.num_new_tokens
            live[:] = False
            live[e.live_ids] = live[first : first + n] = True
            counted = n if score_queries < 0 else min(n, score_queries)
            if kind is ScoreKind.LAST:
                counted = 1
            a = attention[first + n - counted : first + n].sum(0)
            self._update(scores, a, norms, live, n, counted, score_queries, rows)
            self.by_step[e.step_seq] = np.where(live, scores, np.nan)

    def _update(self, scores, a, norms, live, n, counted, score_queries, rows) -> None:
        kind = self.kind
        if kind is ScoreKind.ACCUMULATED:
            scores[live] += a[live]
        elif kind is ScoreKind.LAST:
            scores[live] = a[live]
        elif kind is ScoreKind.WINDOW:
            window = score_queries if score_queries > 0 else 32
            kept = 0.0 if n > 1 else 1.0 - 1.0 / window
            scores[live] = kept * scores[live] + a[live]
        elif kind is ScoreKind.COUNT_ABOVE_THRESHOLD:
            share = a[live] / (rows * counted) * live.sum()
            self.smallest_margin = min(self.smallest_margin, float(np.abs(share - 1).min()))
            scores[live] += share > 1
        elif kind is ScoreKind.KEY_NORM:
            scores[live] = norms[live]

    @staticmethod
    def _forward(model, tokens, entries):
        """float64[T, T] attention summed over layers and heads, float64[T] key norms, and L * H."""
        import torch

        num = len(tokens)
        allowed = torch.from_numpy(attention_mask(num, entries))
        mask = torch.zeros(num, num).masked_fill_(~allowed, torch.finfo(torch.float32).min)
        with torch.inference_mode():
            out = model(
                input_ids=torch.tensor([tokens]),
                attention_mask=mask[None, None],
                position_ids=torch.arange(num)[None],
                use_cache=True,
                output_attentions=True,
            )
        attention = sum(x[0].double().sum(0) for x in out.attentions).numpy()
        keys = [layer.keys for layer in out.past_key_values.layers]
        norms = sum(k[0].double().norm(dim=-1).sum(0) for k in keys).numpy()
        return attention, norms, len(out.attentions) * out.attentions[0].shape[1]

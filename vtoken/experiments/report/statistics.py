"""The one figure that all paired measurements report: a median with its interval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def median_interval(
    samples: Sequence[float], *, confidence: float = 0.95, seed: int = 0
) -> tuple[float, float, float]:
    """The median and the ends of its confidence interval, by bootstrap.

    The median and not the mean: one step that another program interrupted must not decide.
    """
    values = np.asarray(samples, float)
    picks = np.random.default_rng(seed).integers(len(values), size=(2000, len(values)))
    medians = np.median(values[picks], axis=1)
    low, high = np.quantile(medians, ((1 - confidence) / 2, (1 + confidence) / 2))
    return float(np.median(values)), float(low), float(high)

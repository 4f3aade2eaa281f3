"""Rows of a profile: one measurement each, flat, as the result file has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Row = dict[str, object]
Say = Callable[[str], None]


def make_row(
    name: str,
    unit: str,
    *,
    value: float | None = None,
    samples: Sequence[float] = (),
    ratio_to_stock: float | None = None,
    **more: object,
) -> Row:
    """Put a row together.

    Args:
        value: what was measured; the mean of `samples` where it is left out.
        samples: single measurements; they give `p50` and `p95`.
        ratio_to_stock: against stock vLLM, where that compares.
        more: further keys, such as a confidence interval's ends.
    """
    assert value is not None or len(samples), name
    row: Row = {"name": name, "value": float(np.mean(samples) if value is None else value)}
    row["unit"] = unit
    if len(samples):
        row["p50"], row["p95"] = (float(x) for x in np.percentile(samples, (50, 95)))
        row["num_samples"] = len(samples)
    if ratio_to_stock is not None:
        row["ratio_to_stock"] = float(ratio_to_stock)
    return row | more


def fit_slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope and intercept of y over x with relative errors weighted alike.

    Points span three orders of magnitude: unweighted, the largest alone would decide.
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    weights = 1.0 / np.maximum(np.abs(y), 1e-12)
    slope, intercept = np.polyfit(x, y, 1, w=weights)
    return float(slope), float(intercept)

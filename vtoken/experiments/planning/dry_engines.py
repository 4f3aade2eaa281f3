"""Engines with no model behind them, and the attention scores that they make up."""

from __future__ import annotations

from zlib import crc32

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.engine import StepEngine


def open_dry_engine(settings, config: VTokenConfig, **kwargs) -> StepEngine:
    """Build vLLM's scheduler and block pool with no model; see `vtoken.engine.dry.DryEngine`."""
    from vtoken.engine.dry import DryEngine

    return DryEngine(settings, config, **kwargs)


def random_scores(req_id: str, step_seq: int, ids: np.ndarray) -> np.ndarray:
    """Scores for a dry run, which has no attention: float32[n], drawn at random."""
    rng = np.random.default_rng([crc32(req_id.encode()), step_seq])
    return rng.random(len(ids), np.float32)

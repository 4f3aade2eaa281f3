"""Attention over live tokens with fused score sums, relocation copies, key norms; table operations.

    kernels = load()                       # C++ where it builds, torch elsewhere
    layout = kernels.probe(write, kv)      # once, at start-up
    plan = kernels.plan(block_table, seq_lens, query_start_loc, block_size=16, live_mask=bits)
    for layer in layers:                   # one plan serves all layers of a step
        kernels.attention(plan, q, kv, out, layout=layout, scale=scale, step_scores=scores)
    update_scores(kind, scores, ...)       # scores.py: what the policy keeps

contract.py documents every method and is what another device has to implement; base.py, cpp.py and
fallback.py do so for CPUs. `VTOKEN_KERNELS=torch|cpp` forces an implementation. tables.py, the
scheduler's bookkeeping, shares build.py with them and nothing else: it does without torch, and so
does importing this package. vLLM is never imported.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from vtoken.errors import ConfigError, UnsupportedError, nearest
from vtoken.kernels.build import BuildError, available, say_once, usable_variants

if TYPE_CHECKING:
    from vtoken.kernels.contract import Kernels

__all__ = ["available", "describe", "in_use", "load"]

logger = logging.getLogger("vtoken.kernels")
IMPLEMENTATIONS = ("cpp", "torch")
_loaded: dict[str, Kernels] = {}


def load(force: str | None = None) -> Kernels:
    """Choose the kernels: the forced ones, those of $VTOKEN_KERNELS, or C++ if it works here.

    Each is built and checked once per process. Falling back to torch is said once in the log.

    Raises:
        ConfigError: an unknown name.
        UnsupportedError: "cpp" was forced and does not work here.
    """
    option = "force" if force else "VTOKEN_KERNELS"
    choice = force or os.environ.get("VTOKEN_KERNELS") or "auto"
    if choice not in (*IMPLEMENTATIONS, "auto"):
        raise ConfigError(option, choice, nearest(choice, IMPLEMENTATIONS))
    if choice not in _loaded:
        _loaded[choice] = _choose(choice, option)
    return _loaded[choice]


def in_use() -> dict[str, str]:
    """What results say of the kernels that this process has loaded; empty where it has none."""
    # The first are the engine's own; benchmarks load others beside them.
    return describe(next(iter(_loaded.values()))) if _loaded else {}


def describe(kernels: Kernels) -> dict[str, str]:
    """Say which kernels these are, why, and which attention an engine gives to them."""
    own = "holes and scores"
    if kernels.name == "cpp":  # measured faster than the engine's own there
        own += ", and packed batches in modes that evict (without prompts where vLLM has AMX tiles)"
    serves = f"{own}; all else is vLLM's own attention"
    return {"attention": kernels.name, "reason": kernels.why, "serves": serves}


def _choose(choice: str, option: str) -> Kernels:
    from vtoken.kernels.fallback import TorchKernels

    if choice == "torch":
        return TorchKernels(f"torch, as {option} asks")
    kernels, reason = _try_cpp()
    if kernels is not None:
        return kernels
    if choice == "cpp":
        raise UnsupportedError(option, choice, f"{reason}; torch works without")
    say_once(reason, "Attention with holes and scores run on torch, without the C++ kernels")
    return TorchKernels(f"torch, because: {reason}")


def _try_cpp() -> tuple[Kernels | None, str]:
    from vtoken.kernels.cpp import CppKernels
    from vtoken.kernels.selfcheck import differs

    ok, reason = available()
    for variant in usable_variants() if ok else []:
        try:
            kernels = CppKernels(variant)
            fault = differs(kernels)
        except BuildError as error:
            fault = str(error)
        if fault is None:
            kernels.why = f"C++ for {variant}, built with {reason.rsplit(', ')[-1]}"
            return kernels, ""
        reason = f"{variant}: {fault}"
        logger.warning("C++ kernels for %s not used: %s", variant, fault)
    return None, reason

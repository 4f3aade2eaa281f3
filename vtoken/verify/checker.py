"""What the checkers in the scheduler and in the worker share: tally, report, stopping a run."""

from __future__ import annotations

import logging
from pathlib import Path

from vtoken.errors import InvariantViolation
from vtoken.verify.base import Tally, invariant_of
from vtoken.verify.report import ReplayLog, make_report, save_report

logger = logging.getLogger("vllm.vtoken")


def replay_settings(vllm_config) -> dict[str, object]:
    """What an engine of the same behaviour is built from; keys are EngineSettings' fields."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    scheduler = vllm_config.scheduler_config
    blocks = cache.num_gpu_blocks or cache.num_gpu_blocks_override
    return {
        "model": model.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "seed": model.seed,
        "max_model_len": model.max_model_len,
        "block_size": cache.block_size,
        "num_kv_blocks": blocks - 1 if blocks else None,  # less the null block
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "async_scheduling": bool(scheduler.async_scheduling) or None,
    }


class Checker:
    """What both sides share: the tally, the report, and how a run is stopped.

    Attributes:
        tally: events and violations so far.
        report_dir: where a report is written besides being raised; None: nowhere.
    """

    def __init__(self, vllm_config, config) -> None:
        self.every = config.hash_kv_every
        self.tally = Tally()
        self.report_dir: Path | None = Path(".")
        self.replay = ReplayLog(replay_settings(vllm_config), config.model_dump(mode="json"))

    def fail(self, check: str, message: str, **details) -> None:
        """Stop the run.

        Raises:
            InvariantViolation: always; `report` tells everything.
        """
        name = invariant_of(check)
        self.tally.violations[name] += 1
        report = make_report(check, message, replay=self.replay, **details)
        if self.report_dir is not None:
            path = save_report(report, self.report_dir)
            logger.error("vToken: %s violated: %s; report: %s", name, message, path)
        raise InvariantViolation(name, message, report)

    def require(self, check: str, wrong: list[str], **details) -> None:
        """Stop the run if there is something wrong and the check is not left out."""
        if wrong and self.tally.is_on(check):
            self.fail(check, "; ".join(wrong[:4]), **details)

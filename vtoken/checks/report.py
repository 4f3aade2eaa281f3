"""A violation as a file a person can act on, with all that is needed to run it again.

{"schema_version", "command": "verify", "invariant", "check", "message", "step", "request",
 "ids", "slots", "plan": {...}, "operations": [...], "replay": {"settings", "config",
 "requests": [{"step", "req_id", "prompt_token_ids", "max_tokens"}], "fault"}}
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from vtoken.checks.base import invariant_of
from vtoken.checks.operations import OperationLog
from vtoken.checks.plan import Arrival
from vtoken.core.messages import StepPlan
from vtoken.errors import ConfigError

REPORT_VERSION = 1
KEEP_PROMPT_TOKENS = 1 << 20  # of the requests a report can replay, the newest: 4 MiB
SHOWN = 64  # ids and slots in a report


class ReplayLog:
    """What a replay starts from: the engine's settings, and who arrived when.

    Bounded, for a server may be checked for weeks: the oldest arrivals are dropped, and a replay
    then starts with those that are left.
    """

    def __init__(self, settings: dict, config: dict) -> None:
        self.settings, self.config = settings, config
        self.arrivals: deque[Arrival] = deque()
        self._num_tokens = 0

    def extend(self, arrivals: Iterable[Arrival]) -> None:
        """Remember requests that were first scheduled in this step."""
        for arrival in arrivals:
            self.arrivals.append(arrival)
            self._num_tokens += len(arrival.prompt_token_ids)
        while self._num_tokens > KEEP_PROMPT_TOKENS and len(self.arrivals) > 1:
            self._num_tokens -= len(self.arrivals.popleft().prompt_token_ids)

    def as_dict(self) -> dict[str, object]:
        requests = [
            {
                "step": a.step_seq,
                "req_id": a.req_id,
                "prompt_token_ids": a.prompt_token_ids.tolist(),
                "max_tokens": a.max_tokens,
            }
            for a in self.arrivals
        ]
        return {"settings": self.settings, "config": self.config, "requests": requests}


def plan_of(plan: StepPlan | None, req_id: str | None) -> dict[str, object] | None:
    """A request's entry of a step plan, as plain values."""
    if plan is None or req_id not in plan.req_ids:
        return None
    r = plan.req_ids.index(req_id)
    source, destination = plan.moves_of(r)
    return {
        "step": plan.step_seq,
        "num_reclaimed": int(plan.num_reclaimed[r]),
        "new_token_index": int(plan.new_token_index[r]),
        "rewrites_block_table": bool(plan.rewrites_block_table[r]),
        "kept_positions": plan.kept_of(r).tolist(),
        "mask_kind": int(plan.mask_kind[r]),
        "move_source": source.tolist(),
        "move_destination": destination.tolist(),
    }


def make_report(
    check: str,
    message: str,
    *,
    step_seq: int,
    req_id: str | None = None,
    ids: np.ndarray | None = None,
    slots: np.ndarray | None = None,
    plan: StepPlan | None = None,
    log: OperationLog | None = None,
    replay: ReplayLog | None = None,
) -> dict[str, object]:
    """Put a report together."""
    return {
        "schema_version": REPORT_VERSION,
        "command": "verify",
        "invariant": invariant_of(check),
        "check": check,
        "message": message,
        "step": step_seq,
        "request": req_id,
        "ids": [] if ids is None else np.asarray(ids)[:SHOWN].tolist(),
        "slots": [] if slots is None else np.asarray(slots)[:SHOWN].tolist(),
        "plan": plan_of(plan, req_id),
        "operations": [] if log is None else [op.summary() for op in log.recent()],
        "replay": None if replay is None else replay.as_dict(),
    }


def save_report(report: dict, folder: str | Path = ".") -> Path:
    """Write a report as `vtoken-violation-<invariant>-step<N>.json`.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    path = Path(folder) / f"vtoken-violation-{report['invariant']}-step{report['step']}.json"
    unfinished = path.with_suffix(".part")  # a reader never sees half a report
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        allowed = f"a folder that can be written to ({error.strerror})"
        raise ConfigError("--output", str(path.parent), allowed) from error
    return path

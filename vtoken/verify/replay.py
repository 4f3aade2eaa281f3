"""Run again what led to a violation: the same engine, settings, requests and arrival steps.

Steps, requests and ids come out the same; slots do so only where the engine was new.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path

from vtoken.checks.base import Tally
from vtoken.checks.report import REPORT_VERSION
from vtoken.config import VTokenConfig
from vtoken.engine.settings import EngineSettings
from vtoken.errors import ConfigError, InvariantViolation
from vtoken.verify.catalogue import LIVE_FAULTS
from vtoken.verify.runs import checkers, open_checked_engine, tallies, without_frames


def load_report(path: str | Path) -> dict:
    """Read a violation's report.

    Raises:
        ConfigError: it is not one, or of another version.
    """

    def refuse(allowed: str) -> ConfigError:
        return ConfigError("--replay", str(path), allowed)

    try:
        report = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise refuse(f"a readable violation report ({error})") from None
    if not isinstance(report, dict) or not isinstance(report.get("replay"), dict):
        raise refuse("a violation report with a `replay` section")
    if report.get("schema_version") != REPORT_VERSION:
        raise refuse(f"a report with schema_version {REPORT_VERSION}")
    return report


def replay(report: dict) -> tuple[InvariantViolation | None, Tally]:
    """Replay a report's run with every check on.

    Returns:
        The violation it ended in, None if it ran to its end, and what was checked.

    Raises:
        ConfigError: the report's settings cannot be used here.
    """
    section = report["replay"]
    known = {f.name for f in fields(EngineSettings)}
    given = {k: v for k, v in section["settings"].items() if k in known}
    config = VTokenConfig.from_mapping({**section["config"], "hash_kv_every": 1})
    inject = _fault_of(section)
    with open_checked_engine(EngineSettings(**given), config) as engine:
        for checker in checkers(engine):
            checker.report_dir = None
        with inject(engine):
            try:
                _run(engine, section["requests"])
            except InvariantViolation as violation:
                return without_frames(violation), tallies(engine)
        return None, tallies(engine)


def _fault_of(section: dict):
    name = section.get("fault")
    if name is None:
        return nullcontext
    known = {fault.name: fault for fault in LIVE_FAULTS}
    if name not in known:
        raise ConfigError("--replay", name, "a fault that this version knows")
    return known[name].inject


def _run(engine, requests: list[dict]) -> None:
    """Add every request just before the step in which it was first scheduled."""
    waiting = sorted(requests, key=lambda r: r["step"])
    while waiting or engine.has_unfinished():
        next_step = engine.hooks.clock.seq + 1
        # An idle engine makes no steps: time passes until the next arrival.
        idle = not engine.has_unfinished()
        until = waiting[0]["step"] if waiting and idle else next_step
        while waiting and waiting[0]["step"] <= max(until, next_step):
            r = waiting.pop(0)
            engine.add(r["req_id"], r["prompt_token_ids"], r["max_tokens"])
        engine.step()

"""Spans as a Chrome trace: open the file in chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from vtoken.experiments.profile.timer import Span
from vtoken.experiments.report.results import write_json


def trace_events(spans_by_mode: Mapping[str, Sequence[Span]]) -> list[dict[str, object]]:
    """Trace events, microseconds from the first span; each mode is a process of its own.

    A span's `cat` is its phase. Format: "Trace Event Format", complete ("X") events.
    """
    events: list[dict[str, object]] = []
    for pid, (mode, spans) in enumerate(spans_by_mode.items(), start=1):
        name = {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": mode}}
        events.append(name)
        start_ns = min((s.start_ns for s in spans), default=0)
        # Parents first: viewers nest spans by time, and by order where they start together.
        for span in sorted(spans, key=lambda s: (s.start_ns, -s.duration_ns)):
            events.append(
                {
                    "name": span.name, "cat": span.phase, "ph": "X", "pid": pid, "tid": 1,
                    "ts": (span.start_ns - start_ns) / 1e3, "dur": span.duration_ns / 1e3,
                }
            )  # fmt: skip
    return events


def write_trace(path: str | Path, spans_by_mode: Mapping[str, Sequence[Span]]) -> Path:
    """Write the file."""
    content = {"traceEvents": trace_events(spans_by_mode), "displayTimeUnit": "ms"}
    return write_json(path, content)

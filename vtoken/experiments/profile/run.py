"""Run the suites one after another and keep what was measured, also when stopped half-way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vtoken.experiments.profile.chrome_trace import write_trace
from vtoken.experiments.profile.kernels import run_kernels
from vtoken.experiments.profile.overhead import run_overhead
from vtoken.experiments.profile.phase_plots import cost_lines, phase_bars
from vtoken.experiments.profile.profile_options import ProfileSettings
from vtoken.experiments.profile.rows import Row, Say
from vtoken.experiments.profile.scale import run_scale
from vtoken.experiments.profile.step import run_step, stock_ms
from vtoken.experiments.report.plot_style import has_matplotlib
from vtoken.experiments.report.results import utc_now


@dataclass
class ProfileResult:
    """Attributes:
    rows: by suite, in the order they ran.
    step_profiles: of the step suite, for pictures.
    interrupted: the user stopped it; later suites are missing.
    """

    settings: ProfileSettings
    started_at: str
    rows: dict[str, list[Row]] = field(default_factory=dict)
    step_profiles: list = field(default_factory=list)
    interrupted: bool = False


def run_profile(settings: ProfileSettings, say: Say) -> ProfileResult:
    """Run what was asked for.

    Args:
        say: called with what is measured next.
    """
    result = ProfileResult(settings, utc_now())
    try:
        for suite in settings.suites:
            rows = result.rows[suite] = []
            # Row by row, from a generator: what was measured stays when the user stops it.
            rows.extend(_SUITES[suite](result, say))
    except KeyboardInterrupt:
        result.interrupted = True
    return result


def _step(result: ProfileResult, say: Say) -> Iterator[Row]:
    profiles, path = result.step_profiles, result.settings.trace
    for profile in run_step(result.settings, say):
        profiles.append(profile)
        if path is not None:
            write_trace(path, {p.mode: p.spans for p in profiles})
        yield from profile.rows(stock_ms(profiles))


_SUITES: dict[str, Callable[[ProfileResult, Say], Iterable[Row]]] = {
    "overhead": lambda result, say: run_overhead(result.settings, say),
    "step": _step,
    "kernels": lambda result, say: run_kernels(say),
    "scale": lambda result, say: run_scale(result.settings, say),
}


def write_plots(result: ProfileResult, folder: Path) -> list[Path]:
    """Draw what there is to draw; nothing where matplotlib is not installed."""
    if not has_matplotlib():
        return []
    written = []
    if result.step_profiles:
        written.append(phase_bars(result.step_profiles, folder / "step.png"))
    scale = [r for r in result.rows.get("scale", ()) if "series" in r and r["value"] > 0]
    for key, name, unit in (
        ("num_requests", "running requests", "µs per step above native"),
        ("context_tokens", "live tokens of the request", "µs per eviction"),
    ):
        if rows := [r for r in scale if key in r]:
            path, title = folder / f"scale_{key}.png", f"Scheduler's side: cost by {name}"
            written.append(cost_lines(rows, key, path, title=title, xlabel=name, ylabel=unit))
    return written

"""Run the suites one after another and keep what was measured, also when stopped half-way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vtoken.errors import ConfigError
from vtoken.experiments.profile.profile_options import ProfileSettings
from vtoken.experiments.profile.rows import Row, Say
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


def _overhead(result: ProfileResult, say: Say) -> Iterator[Row]:
    from vtoken.experiments.profile.overhead import run_overhead

    return run_overhead(result.settings, say)


def _step(result: ProfileResult, say: Say) -> Iterator[Row]:
    from vtoken.experiments.profile.chrome_trace import write_trace
    from vtoken.experiments.profile.step import run_step, stock_ms

    profiles, path = result.step_profiles, result.settings.trace
    for profile in run_step(result.settings, say):
        profiles.append(profile)
        if path is not None:
            write_trace(path, {p.mode: p.spans for p in profiles})
        yield from profile.rows(stock_ms(profiles))


def _kernels(result: ProfileResult, say: Say) -> Iterator[Row]:
    from vtoken.experiments.profile.kernels import run_kernels

    return run_kernels(say)


def _scale(result: ProfileResult, say: Say) -> Iterator[Row]:
    from vtoken.experiments.profile.scale import run_scale

    return run_scale(result.settings, say)


_SUITES: dict[str, Callable[[ProfileResult, Say], Iterable[Row]]] = {
    "overhead": _overhead, "step": _step, "kernels": _kernels, "scale": _scale,
}  # fmt: skip


def write_plots(result: ProfileResult, folder: Path) -> list[Path]:
    """Draw what there is to draw; nothing where matplotlib is not installed."""
    from vtoken.experiments.profile.phase_plots import cost_lines, phase_bars

    written = []
    try:
        if result.step_profiles:
            written.append(phase_bars(result.step_profiles, folder / "step.png"))
        scale = [r for r in result.rows.get("scale", ()) if "series" in r and r["value"] > 0]
        for key, name, unit in (
            ("num_requests", "running requests", "µs per step above native"),
            ("context_tokens", "live tokens of the request", "µs per eviction"),
        ):
            rows = [r for r in scale if key in r]
            if rows:
                path = folder / f"scale_{key}.png"
                title = f"Scheduler's side: cost by {name}"
                written.append(cost_lines(rows, key, path, title=title, xlabel=name, ylabel=unit))
    except ConfigError as error:
        if error.option != "plots":
            raise
    return written

"""Files of a benchmark: result.json, summary.csv and tables, plots, one self-contained HTML page."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from vtoken.experiments.bench import suite_plots
from vtoken.experiments.bench.run import BenchResult, suite_module
from vtoken.experiments.bench.show import ending_lines, filled_columns
from vtoken.experiments.report.environment import collect_environment
from vtoken.experiments.report.plot_style import has_matplotlib
from vtoken.experiments.report.results import make_result, settings_row, write_bytes
from vtoken.experiments.report.tables import cell

Row = Mapping[str, object]


def make_bench_result(result: BenchResult) -> dict[str, object]:
    """The result file's content."""
    sections: dict[str, object] = {
        "suites": {name: suite.rows for name, suite in result.suites.items()},
        "tables": {name: suite.tables for name, suite in result.suites.items() if suite.tables},
        "advice": [line for suite in result.suites.values() for line in suite.advice],
        "notes": [line for suite in result.suites.values() for line in suite.notes],
    }
    if result.interrupted:
        sections["interrupted"] = True
    engine = result.settings.engine
    return make_result(
        "bench",
        settings_row(result.settings),
        environment=collect_environment(
            block_size=engine.block_size, usable_kv_blocks=engine.num_kv_blocks,
            kernels=_kernels(result),
        ),
        started_at=result.started_at,
        **sections,
    )  # fmt: skip


def _kernels(result: BenchResult) -> dict[str, object]:
    if result.settings.dry_run:
        return {}
    from vtoken.kernels import load

    kernels = load()
    return {kernels.name: kernels.why}


def csv_tables(result: BenchResult) -> dict[str, list[Row]]:
    """Flat tables by name, for `save_result`."""
    rows = [{"suite": name, **row} for name, suite in result.suites.items() for row in suite.rows]
    tables = {"summary": rows}
    for name, suite in result.suites.items():
        tables |= {f"{name}_{table}": rows for table, rows in suite.tables.items()}
    return {name: rows for name, rows in tables.items() if rows}


def write_pages(result: BenchResult, report: Mapping[str, object], folder: Path) -> list[Path]:
    """Write the plots and the page that shows them.

    Returns:
        The plots, empty where matplotlib is not installed.
    """
    plots = draw_plots(result, folder)
    write_bytes(folder / "report.html", make_html(result, report, plots).encode())
    return plots


def draw_plots(result: BenchResult, folder: Path) -> list[Path]:
    """Draw what each suite has to draw."""
    if not has_matplotlib():
        return []
    paths: list[Path] = []
    for name, suite in result.suites.items():
        draw = getattr(suite_plots, f"draw_{name}", None)
        if draw is not None and suite.rows:
            paths += draw(suite, folder)
    return paths


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
       color: #1d2430; background: #fff; }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2.2rem }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #e2e6ec; text-align: right;
         white-space: nowrap }
th.t, td.t { text-align: left } tr.sel { font-weight: 600; background: #eef7f5 }
img { max-width: 100%; height: auto } .advice { background: #eef7f5; padding: .6rem 1rem }
.small { color: #5b6472; font-size: 13px } code { font-size: 13px }
"""


def make_html(result: BenchResult, report: Mapping[str, object], plots: Sequence[Path]) -> str:
    """One page with everything in it; nothing is loaded from anywhere."""
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>vToken benchmark</title><style>{_STYLE}</style></head><body>",
        f"<h1>vToken benchmark: {html.escape(', '.join(result.suites) or 'nothing ran')}</h1>",
        _about(result, report),
    ]
    advice = [line for suite in result.suites.values() for line in suite.advice]
    if advice:
        parts.append("<div class='advice'>" + _paragraphs(advice) + "</div>")
    for name, suite in result.suites.items():
        parts.append(f"<h2>{name}</h2><p class='small'>{suite_module(name).PAPER}</p>")
        parts.append(_paragraphs(suite.notes))
        parts += [_image(path) for path in plots if path.name.startswith(f"{name}_")]
        parts.append(_table(name, suite.rows))
    parts.append(_paragraphs(ending_lines(result)))
    return "\n".join([*parts, "</body></html>\n"])


def _about(result: BenchResult, report: Mapping[str, object]) -> str:
    environment = report["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items())
    gpus = ", ".join(gpu["name"] for gpu in environment["gpus"])
    cpu = environment["cpu"]
    machine = gpus or f"{cpu['model']}, {cpu['num_cores']} cores"
    text = f"{result.settings.engine.model} on {machine}; {result.started_at}; {versions}"
    return f"<p class='small'>{html.escape(text)}</p>"


def _paragraphs(lines: Sequence[str]) -> str:
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def _image(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f"<img alt='{html.escape(path.stem)}' src='data:image/png;base64,{data}'>"


def _table(suite: str, rows: Sequence[Row]) -> str:
    if not rows:
        return "<p>No rows.</p>"
    columns = filled_columns(suite, rows)
    kinds = ["t" if c.digits is None else "" for c in columns]

    def line(tag: str, texts: Sequence[str]) -> str:
        pairs = zip(kinds, map(html.escape, texts), strict=True)
        return "".join(f"<{tag} class='{kind}'>{text}</{tag}>" for kind, text in pairs)

    lines = [
        f"<tr class='{'sel' if row.get('is_selected') else ''}'>"
        f"{line('td', [cell(row, c) for c in columns])}</tr>"
        for row in rows
    ]
    head = line("th", [c.heading for c in columns])
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"

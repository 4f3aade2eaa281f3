"""Plots of the peers suite: a bar is what its row says; and the page that holds the plots."""

from __future__ import annotations

import base64

import pytest
from drawn_axes import keep_axes

pytest.importorskip("matplotlib")

from vtoken.experiments.bench import suite_plots as draw
from vtoken.experiments.bench.bench_options import BenchSettings
from vtoken.experiments.bench.context import SuiteResult
from vtoken.experiments.bench.output_files import draw_plots, make_bench_result, make_html
from vtoken.experiments.bench.run import BenchResult
from vtoken.experiments.report import bar_plots
from vtoken.experiments.report.plot_style import COLOURS, PEER_COLOUR


@pytest.fixture
def drawn(monkeypatch):
    return keep_axes(monkeypatch, bar_plots)


def row(mode: str, throughput: float, policy: str = "", workload: str = "text", spread=()) -> dict:
    fields = {"mode": mode, "policy": policy, "workload": workload, "engine": mode}
    fields["output_throughput"] = throughput
    if spread:
        fields["output_throughput_min"], fields["output_throughput_max"] = spread
    return fields


ROWS = [
    row("stock", 200.0, spread=(190.0, 230.0)),
    row("openvino-eviction:sum", 120.0),
    row("native", 195.0),
    row("naive", 150.0, "h2o"),
    row("vtoken", 160.0, "h2o", spread=(155.0, 161.0)),
    row("vtoken", 170.0, "random"),
]


def spreads(axes) -> list[tuple[float, float, float]]:
    """(x, least, most) of each line that is drawn over a bar."""
    segments = [s for lines in axes.collections for s in lines.get_segments()]
    return [(x, low, high) for (x, low), (_, high) in segments]


def labels(axes) -> list[str]:
    return [tick.get_text() for tick in axes.get_xticklabels()]


def test_a_bar_per_row_with_least_and_most_where_there_are_repeats(tmp_path, drawn) -> None:
    (path,) = draw.draw_peers(SuiteResult(rows=ROWS), tmp_path)
    assert path.name == "peers_throughput_0.png" and path.read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn
    assert [bar.get_height() for bar in axes.patches] == [200, 120, 195, 150, 160, 170]
    assert spreads(axes) == [(0, 190, 230), (4, 155, 161)]
    assert [text.get_text() for text in axes.texts] == [
        "200.0", "120.0", "195.0", "150.0", "160.0", "170.0",
    ]  # fmt: skip
    assert axes.texts[0].xy == (0, 230) and axes.get_ylim()[1] > 230  # above the line
    legend = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert legend == ["least and most of the repeats"]


def test_engines_and_policies_are_told_apart(tmp_path, drawn) -> None:
    draw.draw_peers(SuiteResult(rows=ROWS), tmp_path)
    (axes,) = drawn
    assert labels(axes) == [
        "stock", "openvino-\neviction\nsum", "native", "naive\nh2o", "vtoken\nh2o",
        "vtoken\nrandom",
    ]  # fmt: skip
    colours = [bar.get_facecolor() for bar in axes.patches]
    assert colours[0] == colours[1] not in colours[2:]
    assert len(set(colours)) == len({"peer", "native", "naive", "vtoken"})
    assert PEER_COLOUR not in COLOURS.values()
    hatches = [bar.get_hatch() or "" for bar in axes.patches]
    assert hatches[3] == hatches[4] != hatches[5]


def test_workloads_have_plots_of_their_own_and_one_policy_is_not_repeated(tmp_path, drawn) -> None:
    rows = [
        row(mode, 10.0 + number, policy, workload)
        for number, workload in enumerate(("text:128+64", "/data/chat.json"))
        for mode, policy in (("stock", ""), ("vtoken", "h2o"))
    ]
    paths = draw.draw_peers(SuiteResult(rows=rows), tmp_path)
    assert [p.name for p in paths] == ["peers_throughput_0.png", "peers_throughput_1.png"]
    assert [[bar.get_height() for bar in axes.patches] for axes in drawn] == [[10, 10], [11, 11]]
    assert [axes.get_title(loc="left") for axes in drawn] == [
        "Throughput: text:128+64", "Throughput: /data/chat.json",
    ]  # fmt: skip
    assert labels(drawn[0]) == ["stock", "vtoken"]
    assert not drawn[0].figure.legends  # without repeats there is no line to explain


def test_rows_without_throughput_have_no_bar(tmp_path, drawn) -> None:
    rows = [row("stock", 5.0), row("kvpress", None)]
    draw.draw_peers(SuiteResult(rows=rows), tmp_path)
    assert labels(drawn[0]) == ["stock"]
    draw.draw_peers(SuiteResult(rows=rows[1:]), tmp_path)
    assert [text.get_text() for text in drawn[1].texts] == ["no points"]


def test_the_page_holds_the_plot(tmp_path) -> None:
    settings = BenchSettings(suites=("peers",), dry_run=True)
    result = BenchResult(settings, "2026-01-01T00:00:00+00:00", {"peers": SuiteResult(rows=ROWS)})
    paths = draw_plots(result, tmp_path)
    assert [path.name for path in paths] == ["peers_throughput_0.png"]
    page = make_html(result, make_bench_result(result), paths)
    image = base64.b64encode(paths[0].read_bytes()).decode()
    assert f"<img alt='peers_throughput_0' src='data:image/png;base64,{image}'>" in page

"""Plots: what is drawn is what the rows say. Axes are inspected, and the files are real images."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from drawn_axes import keep_axes

pytest.importorskip("matplotlib")

from vtoken.errors import ConfigError
from vtoken.experiments.report import bar_plots, plots

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def drawn(monkeypatch):
    seen = keep_axes(monkeypatch, plots)
    return keep_axes(monkeypatch, bar_plots, seen)


def point(mode, concurrency, feasible=True, policy="random", **extra):
    return {
        "mode": mode, "policy": "" if mode == "native" else policy, "concurrency": concurrency,
        "feasible": feasible, "output_throughput": 10.0 * concurrency,
        "vtoken_peak_blocks": 32 * concurrency if mode == "native" else 17 * concurrency,
        "ideal_blocks_per_request": 32 if mode == "native" else 16,
    } | extra  # fmt: skip


POINTS = [
    point("vtoken", 8), point("vtoken", 2), point("native", 2), point("native", 4),
    point("native", 5, feasible=False, output_throughput=None),
]  # fmt: skip


def lines(axes) -> dict[str, list[tuple[float, float]]]:
    """Points of each labelled line."""
    out = {}
    for line in axes.get_lines():
        out[line.get_label()] = list(zip(*(map(list, line.get_data())), strict=True))
    return out


def crosses(axes) -> list[tuple[float, float]]:
    return [
        pair for line in axes.get_lines() if line.get_marker() == "x"
        for pair in zip(*(map(list, line.get_data())), strict=True)
    ]  # fmt: skip


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_every_plot_is_a_real_image(tmp_path, drawn):
    from matplotlib.image import imread

    rows = [dict(p, p95_e2el_ms=1000.0, vtoken_memory_utilization=0.6, time_s=1, blocks=5,
                 budget_frac=0.5, accuracy=0.4, max_concurrency=3) for p in POINTS]  # fmt: skip
    made = [
        plots.frontier_bars(rows, tmp_path / "a.png"),
        plots.throughput_by_concurrency(rows, tmp_path / "b.png"),
        plots.block_demand(rows, tmp_path / "c.png", pool_blocks=100),
        plots.demand_over_time(rows, tmp_path / "d.png", pool_blocks=100),
        plots.utilisation_bars(rows, tmp_path / "e.png"),
        plots.latency_by_concurrency(rows, tmp_path / "f.png", sla_ms=900),
        plots.pareto(rows, tmp_path / "g.png"),
        plots.quality_by_budget(rows, tmp_path / "new" / "h.png"),
    ]
    assert len(drawn) == len(made)
    for path in made:
        assert path.read_bytes().startswith(PNG)
        image = imread(path)
        assert image.shape[0] > 500 and image.shape[1] > 600
        assert 0.01 < (image[..., :3] < 0.9).any(axis=-1).mean() < 0.9  # neither blank nor black


def test_every_plot_says_when_there_is_nothing(tmp_path, drawn):
    plots.frontier_bars([], tmp_path / "a.png")
    plots.throughput_by_concurrency([], tmp_path / "b.png")
    plots.block_demand([], tmp_path / "c.png", pool_blocks=100)
    plots.demand_over_time([], tmp_path / "d.png")
    plots.utilisation_bars([point("vtoken", 1)], tmp_path / "e.png")  # without the field
    plots.latency_by_concurrency([], tmp_path / "f.png")
    plots.pareto([point("vtoken", 1)], tmp_path / "g.png")
    plots.quality_by_budget([], tmp_path / "h.png")
    assert len(drawn) == 8
    assert all("no points" in texts(axes) for axes in drawn)


def test_frontier_bars(tmp_path, drawn):
    rows = [
        {"mode": "vtoken", "policy": "random", "max_concurrency": 12},
        {"mode": "native", "policy": "", "max_concurrency": 6},
        {"mode": "naive", "policy": "random", "max_concurrency": 0},
    ]
    plots.frontier_bars(rows, tmp_path / "f.png")
    (axes,) = drawn
    assert [bar.get_height() for bar in axes.patches] == [6, 0, 12]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["native", "naive", "vtoken"]
    assert {"6", "0", "12"} <= set(texts(axes))
    assert axes.get_ylim()[1] > 13
    assert "modelled" not in axes.get_title(loc="left")


def test_frontier_bars_name_policies_where_there_are_several(tmp_path, drawn):
    rows = [
        {"mode": mode, "policy": policy, "max_concurrency": 3, "modelled": True}
        for mode, policy in (("native", ""), ("vtoken", "h2o"), ("vtoken", "random"))
    ]  # fmt: skip
    plots.frontier_bars(rows, tmp_path / "f.png")
    labels = [tick.get_text() for tick in drawn[0].get_xticklabels()]
    assert labels == ["native", "vtoken\nh2o", "vtoken\nrandom"]
    assert drawn[0].get_title(loc="left").endswith("(modelled)")


def test_throughput_joins_feasible_points_and_crosses_the_others(tmp_path, drawn):
    measured = point("vtoken", 9, feasible=False)
    plots.throughput_by_concurrency([*POINTS, measured], tmp_path / "t.png")
    (axes,) = drawn
    found = lines(axes)
    assert found["native"] == [(2, 20.0), (4, 40.0)]
    assert found["vtoken"] == [(2, 20.0), (8, 80.0)]
    assert crosses(axes) == [(5, 0), (9, 90)]
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["native", "vtoken", "infeasible"]
    assert axes.get_ylabel() == "output tokens per second"


def test_no_cross_no_legend_entry(tmp_path, drawn):
    plots.throughput_by_concurrency([point("vtoken", 1)], tmp_path / "t.png")
    assert [text.get_text() for text in drawn[0].get_legend().get_texts()] == ["vtoken"]


def test_block_demand_shows_pool_and_ideal(tmp_path, drawn):
    plots.block_demand(POINTS, tmp_path / "d.png", pool_blocks=130)
    (axes,) = drawn
    found = lines(axes)
    assert found["packed ideal"] == [(2, 32), (8, 128)]
    assert found["vtoken"] == [(2, 34), (8, 136)]
    assert crosses(axes) == [(5, 160)]
    assert any(set(line.get_ydata()) == {130} for line in axes.get_lines())
    assert "pool: 130 blocks" in texts(axes)
    assert axes.get_ylim()[1] > 160  # what exceeds the pool is still seen
    plots.block_demand([point("native", 1)], tmp_path / "d.png", pool_blocks=5427)
    assert "packed ideal" not in lines(drawn[1])
    assert drawn[1].get_ylim()[1] > 5427


def test_measured_and_modelled_are_told_apart(tmp_path, drawn):
    mixed = [point("vtoken", 1), point("native", 1, modelled=True)]
    plots.block_demand(mixed, tmp_path / "d.png", pool_blocks=9)
    assert drawn[0].get_title(loc="left").endswith("(partly modelled)")


def test_demand_over_time_sorts_by_time(tmp_path, drawn):
    rows = [{"mode": "vtoken", "policy": "", "step": t, "blocks": 10 * t} for t in (3, 1, 2)]
    plots.demand_over_time(rows, tmp_path / "d.png", time_key="step", pool_blocks=25)
    (axes,) = drawn
    assert lines(axes)["vtoken"] == [(1, 10), (2, 20), (3, 30)]
    assert axes.get_xlabel() == "step" and axes.get_ylim()[1] > 30


def test_utilisation_is_grouped_and_in_percent(tmp_path, drawn):
    rows = [
        {"mode": m, "policy": p, "workload": "chat", "vtoken_memory_utilization": u}
        for p in ("h2o", "random") for m, u in (("naive", 0.6), ("vtoken", 0.9))
    ]  # fmt: skip
    rows.append(rows[0] | {"vtoken_memory_utilization": 0.5})  # a second run: the mean is shown
    plots.utilisation_bars(rows, tmp_path / "u.png")
    (axes,) = drawn
    heights = sorted(bar.get_height() for bar in axes.patches if bar.get_height() > 0)
    assert heights == pytest.approx([55, 60, 90, 90])
    assert [t.get_text() for t in axes.get_xticklabels()] == ["h2o\nchat", "random\nchat"]


def test_latency_and_pareto(tmp_path, drawn):
    rows = [point("vtoken", c, p95_e2el_ms=100.0 * c) for c in (4, 1)] + [point("naive", 2)]
    plots.latency_by_concurrency(rows, tmp_path / "l.png", sla_ms=250)
    assert lines(drawn[0])["vtoken"] == [(1, 100), (4, 400)]
    assert "SLA 250 ms" in texts(drawn[0])
    assert drawn[0].get_ylabel() == "p95 end-to-end latency (ms)"
    plots.pareto(rows, tmp_path / "p.png")
    assert lines(drawn[1])["vtoken"] == [(100, 10), (400, 40)]
    assert {"1", "4"} <= set(texts(drawn[1])) and "2" not in texts(drawn[1])


def test_quality_band_only_where_full_kv_is_one_number(tmp_path, drawn):
    rows = [
        {"policy": p, "budget_frac": b, "accuracy": b / 2, "full_kv": 0.5}
        for p in ("h2o", "random") for b in (0.5, 0.3)
    ]  # fmt: skip
    plots.quality_by_budget(rows, tmp_path / "q.png")
    found = lines(drawn[0])
    assert found["h2o"] == [(30, 15), (50, 25)]
    assert any("full KV (band: 2 points)" in label for label in found)
    rows[0]["full_kv"] = 0.4
    plots.quality_by_budget(rows, tmp_path / "q.png")
    assert not any("full KV" in label for label in lines(drawn[1]))


def test_unwritable_place_is_a_users_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--output"):
        plots.frontier_bars([], tmp_path / "file" / "f.png")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'vtoken\[plots\]'"):
        plots.frontier_bars([], tmp_path / "f.png")


def test_importing_plots_does_not_import_matplotlib_and_drawing_needs_no_pyplot(tmp_path):
    code = (
        "import sys; from vtoken.experiments.report import plots as p; a = 'matplotlib' in sys.modules; "
        f"p.frontier_bars([], {str(tmp_path / 'f.png')!r}); "
        "print(a, 'matplotlib.pyplot' in sys.modules)"
    )
    root = Path(plots.__file__).parents[2]
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert out.stdout.split() == ["False", "False"]

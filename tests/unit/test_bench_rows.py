"""Records to rows: medians, spread, ratios of pairs; and the journal that keeps records."""

from __future__ import annotations

import json

import pytest

from vtoken.errors import ConfigError
from vtoken.experiments.bench.bench_options import Case
from vtoken.experiments.bench.journal import FILE_NAME, Journal
from vtoken.experiments.bench.measure import Record
from vtoken.experiments.bench.rows import add_ratios, compared_rows, make_row
from vtoken.experiments.bench.show import suite_table


def _records(*throughputs: float, **more) -> list[Record]:
    return [Record(values={"output_throughput": t, **more}) for t in throughputs]


def test_row_holds_medians_spread_and_sums() -> None:
    records = _records(10.0, 30.0, 11.0, vtoken_preemptions=2, vtoken_decisions="own")
    row = make_row(Case(mode="vtoken", policy="h2o"), "text", records, block_size=16)
    assert (row["mode"], row["policy"], row["workload"]) == ("vtoken", "h2o", "text")
    assert (row["output_throughput"], row["repeats"], row["block_size"]) == (11.0, 3, 16)
    assert (row["output_throughput_min"], row["output_throughput_max"]) == (10.0, 30.0)
    assert row["vtoken_preemptions"] == 6 and row["vtoken_decisions"] == "own"


def test_ratio_is_the_median_of_pairs_not_the_ratio_of_medians() -> None:
    row: dict = {}
    ours, naive = _records(10.0, 40.0, 90.0), _records(10.0, 20.0, 30.0)
    add_ratios(row, ours, naive, "naive")
    assert row["throughput_over_naive"] == 2.0
    assert (row["throughput_over_naive_min"], row["throughput_over_naive_max"]) == (1.0, 3.0)
    swapped: dict = {}
    add_ratios(swapped, ours, naive[::-1], "naive")
    assert swapped["throughput_over_naive"] == 2.0
    assert swapped["throughput_over_naive_max"] == 9.0


def test_cases_are_compared_with_their_own_naive_twin() -> None:
    cases = [
        Case(mode=mode, policy="h2o", changes={"eviction_ratio": ratio})
        for ratio in (0.3, 0.5)
        for mode in ("naive", "vtoken")
    ]
    runs = {case.key: _records(10.0 * (n + 1)) for n, case in enumerate(cases)}
    rows = compared_rows(cases, runs, "text")
    found = {(r["mode"], r["eviction_ratio"]): r.get("throughput_over_naive") for r in rows}
    assert found[("vtoken", 0.3)] == 2.0 and found[("vtoken", 0.5)] == pytest.approx(4 / 3)
    assert found[("naive", 0.3)] is None


def test_case_config_replaces_one_budget_by_the_other() -> None:
    from vtoken.config import VTokenConfig

    base = VTokenConfig(kv_budget_tokens=64)
    config = Case(mode="naive", policy="random", changes={"eviction_ratio": 0.3}).config(base)
    assert (config.eviction_ratio, config.kv_budget_tokens) == (0.3, None)
    assert (config.mode, config.policy) == ("naive", "random")


SETTINGS = {"model": "tiny-llama", "repeats": 3}


def test_journal_is_read_back(tmp_path) -> None:
    first = Journal(SETTINGS, tmp_path)
    first.put("a", Record(values={"x": 1.5}, shares=[{"step": 1}], histogram=[0, 2]))
    again = Journal({**SETTINGS, "repeats": 5}, tmp_path / "next", resume=tmp_path)
    assert again.num_resumed == 1 and again.get("a").values == {"x": 1.5}
    assert again.get("a").histogram == [0, 2] and again.get("b") is None
    # The new folder has all of it: a second resumption needs the last folder alone.
    assert len((tmp_path / "next" / FILE_NAME).read_text().splitlines()) == 2


def test_half_a_last_line_is_a_run_that_was_cut_off(tmp_path) -> None:
    journal = Journal(SETTINGS, tmp_path)
    journal.put("a", Record(values={"x": 1}))
    path = tmp_path / FILE_NAME
    path.write_text(path.read_text() + '{"key": "b", "val')
    assert set(Journal(SETTINGS, None, resume=path).records) == {"a"}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "output folder"),
        ('{"settings": {"model": "smollm2-135m", "repeats": 3}}\n', "model was 'smollm2-135m'"),
        ('{"settings": {"model": "tiny-llama"}}\nrubbish\n{"key": 1}\n', "a line of runs"),
    ],
)
def test_what_cannot_be_resumed_is_refused(tmp_path, content, named) -> None:
    if content is not None:
        (tmp_path / FILE_NAME).write_text(content)
    with pytest.raises(ConfigError, match="--resume") as error:
        Journal(SETTINGS, None, resume=tmp_path)
    assert named in str(error.value)


def test_journal_lines_are_json_without_nan(tmp_path) -> None:
    Journal(SETTINGS, tmp_path).put("a", Record(values={"x": float("nan")}))
    last = (tmp_path / FILE_NAME).read_text().splitlines()[-1]
    assert json.loads(last)["values"] == {"x": None}


def test_a_table_names_a_dataset_by_its_file_and_leaves_empty_columns_out():
    row = {"workload": "/data/chat/turns.json:128+48", "policy": "h2o", "mode": "vtoken"}
    table = suite_table("memory", [row | {"eviction_ratio": 0.5}])
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert cells == {
        "workload": ["turns.json:128+48"], "policy": ["h2o"], "mode": ["vtoken"], "ratio": ["0.5"],
    }  # fmt: skip

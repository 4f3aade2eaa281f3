"""Result files: the contract's keys, plain numbers, whole files."""

from __future__ import annotations

import csv
import dataclasses
import enum
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vtoken.errors import ConfigError
from vtoken.experiments.capacity.point import ScanPoint
from vtoken.experiments.capacity.scan_result import frontier_rows
from vtoken.experiments.report import results
from vtoken.experiments.report.environment import collect_environment
from vtoken.experiments.report.results import (
    make_result,
    plain,
    save_result,
    write_csv,
    write_json,
)

CONTRACT = {
    "mode", "policy", "concurrency", "feasible", "reason", "output_throughput",
    "vtoken_preemptions", "vtoken_evicted_tokens", "vtoken_moved_tokens", "vtoken_peak_blocks",
    "vtoken_retained_blocks_per_request", "ideal_blocks_per_request",
}  # fmt: skip


def point(mode="vtoken", concurrency=4, feasible=True, **extra) -> ScanPoint:
    reason = "" if feasible else "1 preemption"
    return ScanPoint(
        mode=mode, policy="random", concurrency=concurrency, feasible=feasible, reason=reason,
        **extra,
    )  # fmt: skip


def test_scan_point_row_has_the_contracts_keys():
    row = point(output_throughput=np.float32(1.5), metrics={"mean_ttft_ms": np.float64(3)}).row()
    assert CONTRACT <= set(row)
    assert "modelled" not in row and "metrics" not in row
    assert row["mean_ttft_ms"] == 3.0 and type(row["output_throughput"]) is float
    assert point(modelled=True).row()["modelled"] is True


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "navite"}, {"concurrency": 0}, {"feasible": False, "reason": ""},
        {"feasible": True, "reason": "preempted"}, {"metrics": {"mode": "x"}},
    ],
)  # fmt: skip
def test_scan_point_refuses_nonsense(wrong):
    good = {"mode": "native", "policy": "", "concurrency": 1, "feasible": True}
    ScanPoint(**good)
    with pytest.raises(AssertionError):
        ScanPoint(**good | wrong)


def test_frontier_stops_at_the_first_failure():
    points = [
        point("native", 4), point("native", 5), point("native", 6, feasible=False),
        point("native", 8),  # luck
        point("vtoken", 12), point("vtoken", 10), point("naive", 1, feasible=False),
    ]  # fmt: skip
    assert frontier_rows(points) == [
        {"mode": "native", "policy": "random", "max_concurrency": 5},
        {"mode": "vtoken", "policy": "random", "max_concurrency": 12},
        {"mode": "naive", "policy": "random", "max_concurrency": 0},
    ]
    assert frontier_rows([point(modelled=True)])[0]["modelled"] is True
    assert frontier_rows([]) == []


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Pair:
    first: object
    second: object


def test_plain_leaves_nothing_but_plain_values():
    value = {
        "i": np.int64(3), "f": np.float32(0.5), "b": np.bool_(True), "a": np.arange(3),
        "nan": float("nan"), "inf": np.inf, "nans": np.array([1.0, np.nan]), "e": Colour.RED,
        "p": Path("/a/b"), "s": {3, 1}, "t": (1, "x"), "d": Pair(np.int8(1), None),
        "points": [point()], 5: "key", "g": (n for n in [1]),
    }  # fmt: skip
    out = plain(value)
    text = json.dumps(out, allow_nan=False)
    back = json.loads(text)
    assert back == out
    assert (out["i"], out["f"], out["b"], out["a"]) == (3, 0.5, True, [0, 1, 2])
    assert out["nan"] is None and out["inf"] is None and out["nans"] == [1.0, None]
    assert (out["e"], out["p"], out["s"], out["t"]) == ("red", "/a/b", [1, 3], [1, "x"])
    assert out["d"] == {"first": 1, "second": None} and out["5"] == "key" and out["g"] == [1]
    assert out["points"][0]["mode"] == "vtoken"
    assert type(out["i"]) is int and type(out["b"]) is bool
    for bad in (object(), b"bytes", Pair, 1j):
        with pytest.raises(TypeError, match="is not a result value"):
            plain(bad)


def test_pydantic_models_become_dicts():
    pydantic = pytest.importorskip("pydantic")

    class Model(pydantic.BaseModel):
        ratio: float = 0.5

    assert plain(Model()) == {"ratio": 0.5}


def test_result_envelope(tmp_path):
    result = make_result(
        "capacity-scan", {"model": "m", "ratio": np.float64(0.5)}, started_at=results.utc_now(),
        environment=collect_environment(block_size=16, usable_kv_blocks=208), points=[point()],
        pool={"usable_blocks": 208, "block_size": 16},
    )  # fmt: skip
    assert list(result)[:5] == [
        "schema_version", "command", "config", "environment", "started_at",
    ]  # fmt: skip
    assert result["config"] == {"model": "m", "ratio": 0.5}
    assert result["started_at"].endswith("+00:00")
    with pytest.raises(AssertionError):
        make_result("x", {}, environment={}, started_at="", schema_version=9)
    paths = save_result(result, tmp_path / "new" / "out", {"points": result["points"]})
    assert [p.name for p in paths] == ["result.json", "points.csv"]
    assert json.loads(paths[0].read_text()) == result
    assert [p.name for p in paths[0].parent.iterdir() if p.name.startswith(".")] == []


def test_environment_describes_this_machine():
    environment = collect_environment(block_size=32, usable_kv_blocks=7, kernels={"cpu": "c++"})
    assert environment["versions"]["numpy"] == np.__version__
    assert environment["cpu"]["num_cores"] == len(os.sched_getaffinity(0))
    assert environment["cpu"]["model"] and environment["cpu"]["memory_bytes"] > 2**28
    assert (environment["block_size"], environment["usable_kv_blocks"]) == (32, 7)
    assert environment["kernels"] == {"cpu": "c++"}
    json.dumps(environment, allow_nan=False)


def test_environment_imports_neither_torch_nor_vllm():
    code = (
        "import sys; from vtoken.experiments.report.environment import collect_environment as c; c(); "
        "print(sorted({'torch', 'vllm', 'matplotlib', 'yaml'} & set(sys.modules)))"
    )
    root = Path(results.__file__).parents[2]
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"


def test_gpus_come_from_the_tool_when_torch_is_not_using_them(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771'\necho 'broken line'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    gpus = collect_environment()["gpus"]
    assert gpus == [{"name": "NVIDIA H200", "memory_bytes": 143771 * 2**20}]
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert collect_environment()["gpus"] == []


def test_failed_write_keeps_the_old_file(tmp_path):
    path = write_json(tmp_path / "r.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o644


def test_unwritable_folder_is_a_users_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--output .*a folder that can be written to"):
        write_json(tmp_path / "file" / "r.json", {})


def test_csv_has_the_union_of_columns(tmp_path):
    rows = [{"a": 1, "b": None}, {"a": np.float64(0.1), "c": {"x": [1]}, "d": 'quo"te, comma'}]
    path = write_csv(tmp_path / "t.csv", rows)
    with path.open(newline="") as file:
        back = list(csv.DictReader(file))
    assert list(back[0]) == ["a", "b", "c", "d"]
    assert back[0] == {"a": "1", "b": "", "c": "", "d": ""}
    assert back[1] == {"a": "0.1", "b": "", "c": '{"x": [1]}', "d": 'quo"te, comma'}
    assert write_csv(tmp_path / "e.csv", []).read_text() == "\n"

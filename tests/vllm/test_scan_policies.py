"""Capacity scans with every policy: packed to the block; recorded scores give the same in a dry run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vtoken.config import VTokenConfig
from vtoken.engine import EngineSettings
from vtoken.errors import ConfigError
from vtoken.experiments.capacity.planned_scan import check_score_free
from vtoken.experiments.capacity.scan import CapacityScan
from vtoken.experiments.capacity.scan_options import ScanSettings
from vtoken.policies.registry import BUILT_IN

pytestmark = pytest.mark.vllm

ENGINE = EngineSettings(
    model="tiny-llama", num_kv_blocks=60, block_size=16, max_num_batched_tokens=256
)
SETTINGS = ScanSettings(
    engine=ENGINE, modes=("vtoken",), concurrency="3", prompt_len=96, output_len=100
)


def scan(settings: ScanSettings):
    result = CapacityScan(settings).run()
    return result, {(r.point.mode, r.point.policy): r.point for r in result.main.runs}


def assert_packed(point) -> None:
    assert point.feasible and point.vtoken_evicted_tokens > 0
    above = point.vtoken_retained_blocks_per_request - point.ideal_blocks_per_request
    assert 0 <= above <= 1, (point.policy, above)


def test_dry_scans_are_packed_to_the_block_with_every_policy():
    _, points = scan(replace(SETTINGS, dry_run=True, policies=tuple(BUILT_IN)))
    assert set(points) == {("vtoken", policy) for policy in BUILT_IN}
    for point in points.values():
        assert_packed(point)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(result, points, scores file) of a real scan; the file is of the last policy, h2o.

    Decisions are recorded in a file beside it.
    """
    path = str(tmp_path_factory.mktemp("scores") / "h2o.jsonl")
    config = VTokenConfig(record_scores=path, record_decisions=path + ".died", score_queries=8)
    return *scan(replace(SETTINGS, config=config, policies=("tova", "h2o"))), path


def victims(path: str) -> list[tuple]:
    """(length, ids) of every eviction in a file of decisions; whose, the prompts do not tell."""
    with open(path) as file:
        entries = [json.loads(line) for line in file]
    return sorted((e["length"], tuple(e["ids"])) for e in entries if "ids" in e)


def test_a_measured_scan_is_packed_too_and_says_what_scores_are_made_of(measured):
    result, points, _ = measured
    assert set(points) == {("vtoken", "tova"), ("vtoken", "h2o")}
    for point in points.values():
        assert_packed(point)
        assert not point.modelled and point.output_throughput > 0
    rows = {row["policy"]: row for row in result.sections()["scores"]}
    assert rows["tova"]["prompt_queries"] == 1 and rows["tova"]["score_kind"] == "last"
    assert rows["h2o"]["prompt_queries"] == 8 and rows["h2o"]["score_kind"] == "accumulated"


def replayed(path: str, **changes) -> ScanSettings:
    fields = {"dry_run": True, "policies": ("h2o",), "replay_scores": path, **changes}
    return replace(SETTINGS, **fields)


def test_a_dry_run_on_recorded_scores_does_what_was_measured(measured, tmp_path):
    _, points, path = measured
    died = str(tmp_path / "died.jsonl")
    result, dry = scan(replayed(path, config=VTokenConfig(record_decisions=died)))
    assert victims(died) == victims(path + ".died") != []
    ours, theirs = dry["vtoken", "h2o"], points["vtoken", "h2o"]
    for name in (
        "vtoken_evicted_tokens", "vtoken_peak_blocks", "vtoken_retained_blocks_per_request",
    ):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name
    assert any(f"recorded in {path}" in note for note in result.notes)
    assert result.sections()["scores"][0]["dry_runs_take"] == "recorded scores"
    check_score_free(replayed(path))  # planning takes it
    with pytest.raises(ConfigError, match="--replay-scores"):
        check_score_free(replayed(path, replay_scores=None))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"policies": ("random",)}, "only with a policy that reads scores"),
        ({"policies": ("tova",)}, "holds accumulated scores, the policy reads last"),
        ({"config": VTokenConfig(eviction_ratio=0.7)}, "recorded with eviction_ratio 0.5"),
        ({"output_len": 300}, "here a request has 396"),
        ({"replay_scores": "/no/such/file"}, "score trace '/no/such/file'"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(measured, changes, says):
    with pytest.raises(ConfigError, match=says):
        scan(replayed(measured[2], **changes))


def test_a_record_without_scores_is_refused(measured, tmp_path):
    path = tmp_path / "empty.jsonl"
    with open(measured[2]) as file:
        path.write_text(json.dumps(json.loads(file.readline())) + "\n")
    with pytest.raises(ConfigError, match="nothing was due"):
        scan(replayed(str(path)))


def test_a_dry_run_records_no_scores():
    with pytest.raises(ConfigError, match="--record-scores 'x'.*no attention"):
        replace(SETTINGS, dry_run=True, config=VTokenConfig(record_scores="x"))

"""Files of recorded decisions: what is written, how requests are named, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from vtoken.config import VTokenConfig
from vtoken.errors import ConfigError
from vtoken.recording.decisions import (
    SCHEMA,
    DecisionRecorder,
    DecisionReplay,
    RequestKey,
    RequestKeys,
    Track,
    decisions_header,
    prompt_hash,
)

KEY = RequestKey("aa", 0)


def header(**changes):
    config = VTokenConfig(policy="h2o", eviction_ratio=0.5)
    made = decisions_header(config, config.make_budget(16), model="tiny-llama", block_size=16)
    return {**made, **changes}


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "decisions.jsonl")


def write(path, *entries, head=None):
    lines = [
        head or header(),
        *({"prompt": "aa", "nth": 0, "preemptions": 0, **e} for e in entries),
    ]
    with open(path, "w") as file:
        file.write("".join(json.dumps(x) + "\n" for x in lines))


def test_what_is_recorded_is_replayed(path):
    recorder = DecisionRecorder(path, header())
    other = RequestKey("aa", 1)
    recorder.died(KEY, 0, 40, np.array([9, 7, 8], np.int32))
    recorder.died(other, 0, 40, np.array([5], np.int32))
    recorder.flush()
    recorder.died(KEY, 0, 56, np.array([20], np.int32))
    recorder.ended(KEY, 0, 60, "finished")
    recorder.flush()
    replay = DecisionReplay(path, header())
    track = replay.track(KEY, 0)
    assert track.lengths == [40, 56] and (track.end_length, track.end) == (60, "finished")
    assert track.ids_at(40).tolist() == [7, 8, 9] and track.ids_at(56).tolist() == [20]
    assert replay.track(other, 0).ids_at(40).tolist() == [5]


def test_nothing_is_in_the_file_before_a_flush_and_a_new_run_starts_it_anew(path):
    recorder = DecisionRecorder(path, header())
    recorder.died(KEY, 0, 40, np.array([1], np.int32))
    assert len(Path(path).read_text().splitlines()) == 1
    recorder.flush()
    assert len(Path(path).read_text().splitlines()) == 2
    DecisionRecorder(path, header())
    assert [json.loads(x)["schema"] for x in Path(path).read_text().splitlines()] == [SCHEMA]


def test_requests_are_named_by_prompt_and_order_of_arrival():
    keys = RequestKeys()
    a, b, c = keys.arrive("x", [1, 2]), keys.arrive("y", [1, 3]), keys.arrive("z", [1, 2])
    assert (a.nth, b.nth, c.nth) == (0, 0, 1) and a.prompt == c.prompt != b.prompt
    keys.forget("x")
    assert keys.of("z") == c and len(keys) == 2
    assert keys.arrive("x", [1, 2]).nth == 2, "a finished request still counts"
    assert prompt_hash([1, 2]) == prompt_hash(np.array([1, 2])) == a.prompt


def test_chunks_end_at_recorded_lengths():
    track = Track(lengths=[40, 56], ids=[np.array([1]), np.array([2])], end_length=60)
    assert [track.cut(at, 30) for at in (0, 10, 39, 40, 41, 56, 58)] == [30, 30, 1, 16, 15, 30, 30]
    assert track.next_length(40) == 40 and track.next_length(41) == 56
    assert track.next_length(57) is None


def test_after_the_recorded_end_the_policy_decides(path):
    write(path, {"length": 40, "ids": [3]}, {"length": 60, "end": "finished"})
    replay = DecisionReplay(path, header())
    track = replay.track(KEY, 0)
    assert replay.due(KEY, track, 0) == replay.due(KEY, track, 40) == 40
    assert replay.due(KEY, track, 41) == replay.due(KEY, track, 60) == 61
    assert replay.due(KEY, track, 61) is None


def test_a_request_preempted_once_more_follows_the_last_track_again(path):
    write(
        path,
        {"length": 40, "ids": [3]}, {"length": 50, "end": "preempted"},
        {"preemptions": 1, "length": 44, "ids": [4]},
    )  # fmt: skip
    replay = DecisionReplay(path, header())
    assert replay.track(KEY, 0).lengths == [40]
    assert replay.track(KEY, 1).lengths == replay.track(KEY, 2).lengths == [44]


def test_a_request_that_lives_on_where_it_was_preempted_does_not_fit(path):
    write(path, {"length": 40, "ids": [3]}, {"length": 50, "end": "preempted"})
    replay = DecisionReplay(path, header())
    track = replay.track(KEY, 0)
    assert replay.due(KEY, track, 50) == 51
    with pytest.raises(ConfigError, match="preempted at 50 tokens when recorded"):
        replay.due(KEY, track, 51)


def test_other_misfits_name_the_request_and_the_reason(path):
    write(path, {"length": 40, "ids": [3, 7]}, {"length": 50, "end": "finished"})
    replay = DecisionReplay(path, header())
    with pytest.raises(ConfigError, match="request 0 of prompt bb: no such request was recorded"):
        replay.track(RequestKey("bb", 0), 0)
    with pytest.raises(ConfigError, match="request 1 of prompt aa: no such request"):
        replay.track(RequestKey("aa", 1), 0)
    track = replay.track(KEY, 0)
    replay.check_start(KEY, track, 40)
    with pytest.raises(ConfigError, match="gives 48 tokens, ids died at 40; turn prefix caching"):
        replay.check_start(KEY, track, 48)
    replay.check_ids(KEY, 40, track.ids_at(40), np.arange(40))
    with pytest.raises(ConfigError, match="token 7 died at length 40, and is dead or shared"):
        replay.check_ids(KEY, 40, track.ids_at(40), np.arange(7))


@pytest.mark.parametrize(
    "name, value",
    [("policy", "random"), ("eviction_ratio", 0.25), ("kv_budget_tokens", 99), ("sink_tokens", 0),
     ("recent_tokens", 8), ("interval_tokens", 1), ("policy_args", {"a": 1}), ("model", "other")],
)  # fmt: skip
def test_a_recording_of_something_else_is_refused(path, name, value):
    write(path, head=header(**{name: value}))
    with pytest.raises(ConfigError, match=f"--replay-decisions .* recorded with {name} "):
        DecisionReplay(path, header())


def test_mode_block_size_and_a_missing_model_may_differ(path):
    write(path, head=header(mode="naive", block_size=32, seed=5, model=None))
    DecisionReplay(path, header())


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "a file that --record-decisions wrote, of schema"),
        ("{}\n", "of schema vtoken-decisions/1"),
        ('{"schema": "vtoken-decisions/0"}\n', "of schema vtoken-decisions/1"),
        ("[1]\n", "line 1 is not a JSON object"),
        ("hello\n", "line 1 is not a JSON object"),
        ("[" * 100_000, "line 1 is not a JSON object"),
        ("HEADER{}\n", "line 2 is not a decision"),
        ('HEADER{"prompt": "a", "nth": 0, "preemptions": 0, "length": 4}\n', "line 2 is not"),
        (
            'HEADER{"prompt": "a", "nth": 0, "preemptions": 0, "length": 4, "ids": ["x"]}\n',
            "line 2",
        ),
        ('HEADER{"prompt": "a", "nth": 0, "preemptions": 0, "length": 4, "ids": 3}\n', "line 2"),
        ('HEADER{"prompt": "a"', "line 2 is not a JSON object"),
    ],
)
def test_damaged_files_are_refused(path, text, message):
    with open(path, "w") as file:
        file.write(text.replace("HEADER", json.dumps(header()) + "\n"))
    with pytest.raises(ConfigError, match=message):
        DecisionReplay(path, header())


def test_decisions_out_of_order_are_refused(path):
    write(path, {"length": 40, "ids": [3]}, {"length": 40, "ids": [4]})
    with pytest.raises(ConfigError, match="line 3 is out of order"):
        DecisionReplay(path, header())


def test_missing_and_unwritable_files(tmp_path):
    missing = str(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="No such file"):
        DecisionReplay(missing, header())
    with pytest.raises(ConfigError, match="--record-decisions .* a file to write"):
        DecisionRecorder(str(tmp_path / "folder" / "file"), header())
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match="binary:1.*UTF-8 text"):
        DecisionReplay(str(binary), header())

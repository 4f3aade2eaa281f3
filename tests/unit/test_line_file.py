"""Files that a run writes as it goes, on a disk that fills up."""

from __future__ import annotations

import json
import resource
import signal

import pytest

from vtoken.errors import ConfigError
from vtoken.recording.line_file import LineFile


@pytest.fixture
def small_disk():
    """Files of this process may have 4 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_ends_the_record_and_not_the_run(small_disk, tmp_path, caplog):
    file = LineFile("--record-decisions", str(tmp_path / "d.jsonl"), {"schema": "x"})
    for i in range(200):
        file.append({"i": i, "ids": list(range(20))})
        file.flush()
    lines = file.path.read_text().splitlines()
    assert [json.loads(line)["i"] for line in lines[1:]] == list(range(len(lines) - 1))
    assert 10 < len(lines) < 200
    said = [r.getMessage() for r in caplog.records if "--record-decisions" in r.getMessage()]
    assert len(said) == 1 and "the run goes on without it" in said[0]


def test_a_folder_that_is_gone_ends_the_record_too(tmp_path, caplog):
    folder = tmp_path / "gone"
    folder.mkdir()
    file = LineFile("--record-scores", str(folder / "s.jsonl"), {})
    file.path.unlink()
    folder.rmdir()
    file.append({"i": 1})
    file.flush()
    file.append({"i": 2})
    file.flush()
    assert len([r for r in caplog.records if "--record-scores" in r.getMessage()]) == 1


def test_a_file_that_cannot_be_begun_is_the_users_mistake(tmp_path):
    with pytest.raises(ConfigError, match="--record-decisions .*: a file to write"):
        LineFile("--record-decisions", str(tmp_path / "no" / "such" / "folder"), {})

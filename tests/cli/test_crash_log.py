"""The log of a failure: private, without keys, and never a failure of its own."""

from __future__ import annotations

import os
import sys

import pytest

from vtoken_cli.crash_log import redact, write_crash_log


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("serve m -- --api-key KEY1 KEY2 --port 80", "serve m -- --api-key *** *** --port 80"),
        ("top --api-key=KEY -n 1", "top --api-key=*** -n 1"),
        ("top --api-key -KEY -n 1", "top --api-key *** -n 1"),
        ("serve -- --api_key KEY", "serve -- --api_key ***"),
        ("serve -- --api-k KEY", "serve -- --api-k ***"),
        ("serve -- --hf-token KEY", "serve -- --hf-token ***"),
        ("serve -- --ssl-keyfile-password KEY", "serve -- --ssl-keyfile-password ***"),
        (
            "bench --sink-tokens 4 --kv-budget-tokens 64",
            "bench --sink-tokens 4 --kv-budget-tokens 64",
        ),
        ("bench --policy keydiff", "bench --policy keydiff"),
    ],
)
def test_values_that_are_secret(given, shown):
    assert redact(given.split()) == shown.split()


def test_the_log_is_private_and_holds_no_key(monkeypatch, tmp_path):
    monkeypatch.setenv("VTOKEN_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["vtoken", "top", "--api-key", "s3cret-key", "not\udcfftext"])
    try:
        raise RuntimeError("refused: Bearer s3cret-key \ud800")
    except RuntimeError as error:
        path = write_crash_log(error)
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    assert "s3cret" not in text and "Bearer ***" in text and "top --api-key ***" in text
    assert "Traceback" in text


@pytest.mark.parametrize("home", ["missing", "not writable"])
def test_where_no_log_can_be_written_that_is_said(monkeypatch, tmp_path, home):
    if home == "missing":
        monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
        for name in ("VTOKEN_CACHE", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
    else:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("VTOKEN_CACHE", str(tmp_path / "file"))
    told = write_crash_log(ValueError("x"))
    assert told.startswith("no log could be written: VTOKEN_CACHE")


def test_output_that_the_terminals_encoding_lacks(cli):
    cli.add("speak", "run.out.print('caf\u00e9 \u2588')\nrun.out.note('\u2588')")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": None}
    done = cli("speak", **plain)
    assert done.returncode == 0 and "caf" in done.stdout, done.stderr


def test_an_argument_that_is_not_text(cli):
    cli.add("speak", "run.out.print(run.vtoken['policy'])")
    done = cli("speak", "--policy", os.fsdecode(b"h2\xff"))
    assert (done.returncode, done.stderr) == (0, "")

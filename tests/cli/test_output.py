"""Results to stdout, everything else to stderr."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from vtoken_cli import output
from vtoken_cli.output import Output


def sinks(**flags):
    out, err = io.StringIO(), io.StringIO()
    return Output(stdout=out, stderr=err, **flags), out, err


def say_everything(out: Output) -> None:
    out.print("a result")
    out.result({"n": np.int64(3), "f": np.float32(0.5), "a": np.arange(2), "p": Path("x")})
    out.note("a note")
    out.detail("a detail")
    out.warn("careful")


@pytest.mark.parametrize(
    ("flags", "stdout", "stderr"),
    [
        ({}, "a result\n", "a note\nwarning: careful\n"),
        ({"quiet": True}, "a result\n", "warning: careful\n"),
        ({"verbose": True}, "a result\n", "a note\na detail\nwarning: careful\n"),
    ],
)
def test_for_people(flags, stdout, stderr):
    out, on_stdout, on_stderr = sinks(**flags)
    say_everything(out)
    assert (on_stdout.getvalue(), on_stderr.getvalue()) == (stdout, stderr)


def test_for_scripts():
    out, on_stdout, on_stderr = sinks(as_json=True)
    say_everything(out)
    assert json.loads(on_stdout.getvalue()) == {"n": 3, "f": 0.5, "a": [0, 1], "p": "x"}
    assert on_stderr.getvalue() == "a note\nwarning: careful\n"


def test_what_is_not_json_is_refused():
    out, _, _ = sinks(as_json=True)
    with pytest.raises(TypeError, match="set in a result is not JSON"):
        out.result({"x": {1}})


def test_progress_off_a_terminal_is_a_line_now_and_then(monkeypatch):
    clock = iter([0.0, 1.0, 11.0, 12.0])
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock))
    out, on_stdout, on_stderr = sinks()
    with out.progress(4, "points") as bar:
        for text in ("a", "b", "c", "d"):
            bar.advance(text=text)
    assert on_stderr.getvalue() == "points: 1/4 a\npoints: 3/4 c\npoints: 4/4 d\n"
    assert on_stdout.getvalue() == ""


def test_progress_of_unknown_length():
    out, _, on_stderr = sinks()
    with out.progress(None, "steps") as bar:
        bar.update(7, total=None)
    assert on_stderr.getvalue() == "steps: 7\n"


def test_quiet_shows_no_progress():
    out, _, on_stderr = sinks(quiet=True)
    with out.progress(1, "points") as bar:
        bar.advance()
        bar.update(1)
    assert on_stderr.getvalue() == ""


def test_progress_on_a_terminal_is_a_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out, on_stdout, on_stderr = sinks()
    on_stderr.isatty = lambda: True
    with out.progress(4, "points") as bar:
        bar.advance(2, text="concurrency 8")
        bar.update(3, text="concurrency 9", total=5)
    assert "points" in on_stderr.getvalue() and "3/5" in on_stderr.getvalue()
    assert "concurrency 9" in on_stderr.getvalue() and on_stdout.getvalue() == ""

"""One list says what works: the checks, `vtoken env` and README's Support section agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vtoken.vllm_plugin.support_list import PROPERTIES, SUPPORT

ROOT = Path(__file__).resolve().parents[2]


def readme_rows() -> list[tuple[str, ...]]:
    """(feature, state, test or reason) of README's table."""
    text = (ROOT / "README.md").read_text().partition("## Support")[2].partition("\n## ")[0]
    lines = [x.strip("|").split(" | ") for x in text.splitlines() if x.startswith("| ")]
    return [tuple(cell.strip() for cell in line) for line in lines[1:]]


def test_rows_are_complete_and_differ():
    rows = [(row.feature, row.state) for row in SUPPORT]
    assert len(set(rows)) == len(rows) > 40
    assert all(row.evidence for row in SUPPORT)


def test_what_works_names_a_test_that_exists():
    for row in SUPPORT:
        if row.state == "works":
            assert (ROOT / row.evidence).is_file(), row


def test_the_readme_has_the_list():
    assert readme_rows() == [(row.feature, row.state, row.evidence) for row in SUPPORT]


def test_the_command_line_shows_the_list(monkeypatch, capsys):
    from vtoken_cli.app import main
    from vtoken_cli.commands import env

    monkeypatch.setattr(env, "kernels_in_use", lambda: {"attention": "none", "reason": "left out"})
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["support"] == [row.as_row() for row in SUPPORT]


@pytest.mark.parametrize("prop", PROPERTIES, ids=lambda prop: prop.name)
def test_the_checks_let_in_what_the_list_says_and_nothing_else(prop, caplog):
    from dataclasses import replace

    from vtoken.errors import UnsupportedError

    def check(value):
        replace(prop, read=lambda subject: value).check(None)

    for value in [*prop.works, *prop.untested]:
        check(value)
    if not prop.works:
        for value in (None, False):
            check(value)
    if prop.why:
        with pytest.raises(UnsupportedError) as caught:
            check("what nobody thought of")
        refused = [row for row in prop.rows() if row.state == "refused"]
        assert caught.value.allowed == prop.why == refused[-1].evidence
        assert "what nobody thought of" in caught.value.value


def test_every_property_is_checked_somewhere():
    source = (ROOT / "vtoken" / "vllm_plugin" / "support.py").read_text()
    assert {f'_check("{prop.of}"' for prop in PROPERTIES} <= {
        line for line in (f'_check("{of}"' for of in ("engine", "gpu", "scheduler", "spec", "specs",
                                                     "layer", "prompt")) if line in source
    }  # fmt: skip

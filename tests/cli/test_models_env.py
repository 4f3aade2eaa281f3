"""`vtoken models` and `vtoken env`."""

from __future__ import annotations

import json

import pytest

from vtoken.models import MODEL_NAMES
from vtoken_cli import app
from vtoken_cli.commands import env as env_module


def run_json(capsys, *args: str):
    assert app.main([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_models_list(capsys, model_path):
    model_path("tiny-llama")
    rows = {row["name"]: row for row in run_json(capsys, "models", "list")["models"]}
    assert tuple(rows) == MODEL_NAMES
    assert rows["tiny-llama"]["prepared"] is True
    assert rows["tiny-llama"]["path"] == str(model_path("tiny-llama"))
    assert rows["tiny-llama"]["size_bytes"] > 50_000_000


def test_bare_models_is_the_list(capsys):
    assert app.main(["models"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in MODEL_NAMES)


def test_models_prepare_and_path(capsys, model_path):
    path = str(model_path("tiny-llama"))
    assert app.main(["models", "prepare", "tiny-llama"]) == 0
    assert capsys.readouterr().out == path + "\n"
    assert app.main(["models", "path", "tiny-llama"]) == 0
    assert capsys.readouterr().out == path + "\n"
    assert run_json(capsys, "models", "path", "tiny-llama") == {"path": path}


def test_path_of_a_model_that_is_not_prepared(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("VTOKEN_CACHE", str(tmp_path))
    assert app.main(["models", "path", "tiny-llama"]) == 2
    assert "not prepared yet: run vtoken models prepare tiny-llama" in capsys.readouterr().err
    rows = run_json(capsys, "models", "list")
    assert not any(row["prepared"] for row in rows["models"])


def test_env_for_scripts(capsys):
    report = run_json(capsys, "env")
    assert report["versions"]["python"] and report["versions"]["numpy"]
    assert report["kernels"]["attention"] in ("cpp", "torch") and report["kernels"]["reason"]
    assert report["cpu"]["num_cores"] >= 1
    for row in report["support"]:
        assert set(row) == {"feature", "state", "test" if row["state"] == "works" else "reason"}


def test_env_for_people(capsys):
    assert app.main(["env"]) == 0
    shown = capsys.readouterr().out
    for text in ("python", "compiler", "kernels", "speculative decoding", "refused"):
        assert text in shown


def test_env_says_when_kernels_cannot_be_imported(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "vtoken.kernels", None)
    assert env_module.kernels_in_use()["attention"] == "none"


@pytest.mark.parametrize("flag", ["--config", "--output"])
def test_options_without_meaning_here_are_refused(flag, capsys):
    assert app.main(["env", flag, "x"]) == 2
    assert f"No such option: {flag}" in capsys.readouterr().err

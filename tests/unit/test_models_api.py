"""From `--model` to a path."""

from __future__ import annotations

import pytest

from vtoken import models
from vtoken.errors import ConfigError
from vtoken.models import tiny


def test_embedded_names_become_folders(model_path):
    assert models.resolve_model("smollm2-135m") == str(model_path("smollm2-135m"))
    assert models.is_prepared("smollm2-135m")


def test_local_folders_and_ids_pass_through(tmp_path):
    assert models.resolve_model(str(tmp_path)) == str(tmp_path)
    assert models.resolve_model("meta-llama/Llama-3.1-8B") == "meta-llama/Llama-3.1-8B"


def test_a_local_folder_named_like_an_id_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert models.resolve_model("org/name") == "org/name"


@pytest.mark.parametrize(
    "path", ["/no/such/folder", "./nothing", "~/nothing-here", "a/b/c", "a b/c"]
)
def test_a_path_that_does_not_exist_is_refused(path):
    with pytest.raises(ConfigError, match="no such path") as caught:
        models.resolve_model(path)
    assert caught.value.option == "--model" and caught.value.value == path


def test_a_typing_error_gets_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'tiny-llama'"):
        models.resolve_model("tiny-lama")
    with pytest.raises(ConfigError, match=r"--model 'gpt': give a local folder"):
        models.resolve_model("gpt")


def test_prepare_takes_embedded_names_only():
    with pytest.raises(ConfigError, match="--model 'org/name': one of"):
        models.prepare("org/name")


def test_prepare_builds_once(tmp_path, monkeypatch, model_path):
    donor = model_path("smollm2-135m")
    monkeypatch.setenv("VTOKEN_CACHE", str(tmp_path))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "smollm2-135m").symlink_to(donor)
    said: list[str] = []
    first = models.prepare("tiny-llama", said.append)
    assert first == tmp_path / "models" / "tiny-llama" and said == ["generating tiny-llama"]
    monkeypatch.setattr(tiny, "build", lambda *a, **k: pytest.fail("built twice"))
    assert models.prepare("tiny-llama", said.append) == first
    assert len(said) == 1

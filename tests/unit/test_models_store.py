"""A model folder appears whole or not at all, whoever else is at it."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest

from vtoken.errors import ConfigError
from vtoken.models import store


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VTOKEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(content):
    def build(folder):
        (folder / "weights").write_text(content)
        return {"source": content}

    return build


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    assert store.cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("VTOKEN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.cache_dir() == tmp_path / "xdg" / "vtoken"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert store.cache_dir() == tmp_path / "home" / ".cache" / "vtoken"


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"VTOKEN_CACHE": "~/vt"}, "HOME/vt"),
        ({"VTOKEN_CACHE": "here"}, "CWD/here"),
        ({"VTOKEN_CACHE": "", "XDG_CACHE_HOME": "relative"}, "HOME/.cache/vtoken"),
        ({"VTOKEN_CACHE": "~nobody-of-this-name/vt"}, None),
        ({"VTOKEN_CACHE": "", "HOME": None}, None),
    ],
)
def test_where_the_cache_is(monkeypatch, tmp_path, variables, found):
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])  # no such user
    monkeypatch.chdir(tmp_path)
    for name, value in {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": "", **variables}.items():
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    if found is None:
        with pytest.raises(ConfigError, match="^VTOKEN_CACHE .*: set it to a folder of your own"):
            store.cache_dir()
        return
    expected = found.replace("HOME", str(tmp_path / "home")).replace("CWD", str(tmp_path))
    assert str(store.cache_dir()) == expected


def test_a_cache_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VTOKEN_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="VTOKEN_CACHE .*file.*: set it .*; (Not a d|File ex)"):
        store.publish("m", 1, write("x"))


@pytest.mark.parametrize("what", ["", "models"])
def test_models_that_another_user_could_change_are_not_used(cache, what):
    store.publish("m", 1, write("x"))
    (cache / what).chmod(0o775)
    for use in (lambda: store.model_dir("m"), lambda: store.publish("m", 2, write("y"))):
        with pytest.raises(ConfigError, match="others may write to it"):
            use()
    (cache / what).chmod(0o755)
    assert store.stored_format(store.model_dir("m")) == 1


def test_publish_makes_a_complete_readable_folder():
    folder = store.publish("m", 3, write("first"))
    assert folder == store.model_dir("m")
    assert (folder / "weights").read_text() == "first"
    assert store.stored_format(folder) == 3
    assert folder.stat().st_mode & 0o777 == 0o755
    assert (folder / "weights").stat().st_mode & 0o777 == 0o644


def test_a_failing_build_leaves_nothing(cache):
    def fail(folder):
        (folder / "half").write_text("x")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        store.publish("m", 1, fail)
    assert list((cache / "models").iterdir()) == []
    assert store.stored_format(store.model_dir("m")) is None


def test_target_is_invisible_while_it_is_built():
    def build(folder):
        assert not store.model_dir("m").exists()
        assert folder.parent == store.model_dir("m").parent
        return {}

    store.publish("m", 1, build)


def test_an_outdated_folder_is_replaced(cache):
    store.publish("m", 1, write("old"))
    store.publish("m", 2, write("new"))
    assert (store.model_dir("m") / "weights").read_text() == "new"
    assert store.stored_format(store.model_dir("m")) == 2
    assert [p.name for p in (cache / "models").iterdir()] == ["m"]


def test_the_first_of_two_wins(cache):
    def overtaken(folder):
        store.publish("m", 1, write("theirs"))
        return write("ours")(folder)

    folder = store.publish("m", 1, overtaken)
    assert (folder / "weights").read_text() == "theirs"
    assert [p.name for p in (cache / "models").iterdir()] == ["m"]


def test_only_abandoned_temporary_folders_are_removed(cache):
    models = cache / "models"
    old, fresh = models / ".m-aaaa.tmp", models / ".m-bbbb.tmp"
    for folder in (old, fresh):
        folder.mkdir(parents=True)
        (folder / "weights").write_text("half")
    long_ago = time.time() - 2 * store._ABANDONED_AFTER_S
    os.utime(old, (long_ago, long_ago))
    store.publish("m", 1, write("x"))
    assert not old.exists() and fresh.exists()


def _publish_from_process(barrier, content):
    def build(folder):
        result = write(content)(folder)
        barrier.wait(30)  # everybody has built before anybody renames
        return result

    store.publish("m", 2, build)


def test_processes_that_publish_at_once(cache):
    store.publish("m", 1, write("outdated"))
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    processes = [
        context.Process(target=_publish_from_process, args=(barrier, f"from {i}")) for i in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (store.model_dir("m") / "weights").read_text() in {"from 0", "from 1", "from 2"}
    assert [p.name for p in (cache / "models").iterdir()] == ["m"]

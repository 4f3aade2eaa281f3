"""Where prepared models live, and how a folder appears there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

_MARKER = "vtoken_model.json"
_ABANDONED_AFTER_S = 24 * 3600


def cache_dir() -> Path:
    """Return vToken's cache folder: `$VTOKEN_CACHE`, else `vtoken` in the user's cache folder."""
    if own := os.environ.get("VTOKEN_CACHE"):
        return Path(own).expanduser()
    users = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(users).expanduser() / "vtoken"


def model_dir(name: str) -> Path:
    """Return the folder of one embedded model, present or not."""
    return cache_dir() / "models" / name


def stored_format(folder: Path) -> int | None:
    """Return the format number a finished folder was written with, None when there is none."""
    try:
        return json.loads((folder / _MARKER).read_text())["format"]
    except (OSError, ValueError, KeyError):
        return None


def publish(name: str, format_number: int, build: Callable[[Path], dict]) -> Path:
    """Build a model in a temporary folder and rename it into place.

    Readers see the old folder, no folder or the whole new one. Two processes may do this at once:
    the first rename wins and the other one's work is dropped.

    Args:
        build: fills the folder it is given; what it returns is kept as the model's provenance.
    """
    target = model_dir(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target.parent)
    temporary = Path(tempfile.mkdtemp(prefix=f".{name}-", suffix=".tmp", dir=target.parent))
    try:
        provenance = build(temporary)
        marker = {"name": name, "format": format_number, **provenance}
        (temporary / _MARKER).write_text(json.dumps(marker, indent=2) + "\n")
        _make_readable(temporary)
        _rename_into_place(temporary, target, format_number)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _make_readable(folder: Path) -> None:
    # mkdtemp and safetensors write for the owner alone; a cache may be shared.
    for path in folder.iterdir():
        path.chmod(0o644)
    folder.chmod(0o755)


def _rename_into_place(temporary: Path, target: Path, format_number: int) -> None:
    while True:
        try:
            return os.rename(temporary, target)
        except OSError:  # POSIX refuses to rename onto a folder that is not empty
            if not target.is_dir():
                raise
            if stored_format(target) == format_number:
                return  # somebody else was faster
            _set_aside(target)


def _set_aside(outdated: Path) -> None:
    # Renamed first, so that nobody sees a half-deleted model. Processes that have its files mapped
    # keep them until they end.
    trash = Path(tempfile.mkdtemp(prefix=f".{outdated.name}-", suffix=".tmp", dir=outdated.parent))
    try:
        os.rename(outdated, trash)
    except FileNotFoundError:
        pass  # another process set it aside
    finally:
        shutil.rmtree(trash, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Delete temporary folders of processes that were killed: they are half a gigabyte each."""
    for folder in parent.glob(".*.tmp"):
        try:
            if time.time() - folder.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:
            pass

"""Where prepared models live, and how a folder appears there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

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


def write_model(folder: Path, config: dict[str, Any], weights: dict[str, np.ndarray]) -> None:
    """Write a Hugging Face config, and weights, into a folder."""
    from safetensors.numpy import save_file

    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in (("config", config), ("generation_config", ids)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


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
    with _temporary_beside(target) as name_of_folder:
        temporary = Path(name_of_folder)
        marker = {"name": name, "format": format_number, **build(temporary)}
        (temporary / _MARKER).write_text(json.dumps(marker, indent=2) + "\n")
        # Temporary folders and safetensors are for the owner alone; a cache may be shared.
        for path in temporary.iterdir():
            path.chmod(0o644)
        temporary.chmod(0o755)
        _rename_into_place(temporary, target, format_number)
    return target


def _temporary_beside(target: Path) -> tempfile.TemporaryDirectory:
    """A folder that is deleted in the end, unless it was renamed."""
    return tempfile.TemporaryDirectory(
        prefix=f".{target.name}-", suffix=".tmp", dir=target.parent, ignore_cleanup_errors=True
    )


def _rename_into_place(temporary: Path, target: Path, format_number: int) -> None:
    while True:
        try:
            return os.rename(temporary, target)
        except OSError:  # POSIX refuses to rename onto a folder that is not empty
            if not target.is_dir():
                raise
        if stored_format(target) == format_number:
            return  # another process was faster
        # Renamed first, so that no reader sees a half-deleted model; processes that have its files
        # mapped keep them until they end.
        with _temporary_beside(target) as trash, suppress(FileNotFoundError):
            os.rename(target, trash)  # unless another process did


def _remove_abandoned(parent: Path) -> None:
    """Delete temporary folders of processes that were killed: they are half a gigabyte each."""
    for folder in parent.glob(".*.tmp"):
        with suppress(FileNotFoundError):
            if time.time() - folder.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(folder, ignore_errors=True)

"""vToken's cache folder, and how a prepared model appears in it whole or not at all.

What lies in the cache is loaded: compiled kernels run. So a folder counts only where this user or
root owns it and no other user can write to it.
"""

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

from vtoken.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

_MARKER = "vtoken_model.json"
_ABANDONED_AFTER_S = 24 * 3600


def cache_dir() -> Path:
    """Return vToken's cache folder: `$VTOKEN_CACHE`, else `vtoken` in the user's cache folder.

    Raises:
        ConfigError: it would be in a home folder, and this user has none.
    """
    own, users = os.environ.get("VTOKEN_CACHE"), os.environ.get("XDG_CACHE_HOME", "")
    if not own:  # a relative XDG_CACHE_HOME is to be ignored, says its specification
        own = f"{users if users.startswith('/') else '~/.cache'}/vtoken"
    try:
        return Path(own).expanduser().absolute()
    except RuntimeError:
        raise ConfigError("VTOKEN_CACHE", own, f"{_A_FOLDER}; no such home folder") from None


def open_cache(name: str, *, writes: bool = True) -> Path:
    """Return a folder of the cache, made where it is missing.

    Args:
        writes: False: it may be missing, and need not be writable.

    Raises:
        ConfigError: it cannot be made or written, or another user could change what is in it.
    """
    root = cache_dir()
    folder = root / name
    try:
        for path in (root, folder) if writes else ():
            path.mkdir(parents=True, exist_ok=True, mode=0o755)
    except OSError as error:
        raise ConfigError("VTOKEN_CACHE", str(root), f"{_A_FOLDER}; {error.strerror}") from None
    for path in (root, folder):
        if path.exists() and not is_trusted(path):
            why = f"{path} belongs to another user, or others may write to it"
            raise ConfigError("VTOKEN_CACHE", str(root), f"{_A_FOLDER}; {why}")
    if writes and not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError("VTOKEN_CACHE", str(root), f"{_A_FOLDER}; {folder} is read-only")
    return folder


_A_FOLDER = "set it to a folder of your own"


def is_trusted(path: Path) -> bool:
    """Tell whether only this user, or root, can change a file or folder (False where it is not)."""
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & 0o022


def model_dir(name: str) -> Path:
    """Return the folder of one embedded model, present or not; raises as `open_cache` does."""
    return open_cache("models", writes=False) / name


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
    target = open_cache("models") / name
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

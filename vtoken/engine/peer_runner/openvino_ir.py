"""A model as OpenVINO reads it: exported once by optimum-intel, kept in vToken's cache."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .base import Refused


def openvino_ir(settings: dict) -> str:
    """The folder of the model as OpenVINO reads it; exported once into vToken's cache.

    Raises:
        Refused: there is nothing that exports, or it does not export this model.
    """
    if given := settings.get("ir"):
        if not (Path(given) / "openvino_model.xml").is_file():
            raise Refused(
                f"--peer-args {settings['peer']}.ir", given, "a folder with openvino_model.xml"
            )
        return str(given)
    weights = "fp32" if settings["dtype"] == "float32" else "fp16"
    folder = Path(settings["cache"]) / f"{_model_key(settings['model'])}-{weights}"
    if not (folder / "openvino_model.xml").is_file():
        _export(settings, weights, folder)
    return str(folder)


def _model_key(model: str) -> str:
    """A model's name and a hash of its path and of its files' sizes and times."""
    path = Path(model).resolve() if Path(model).is_dir() else None
    files = sorted(path.iterdir()) if path else []
    stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    digest = hashlib.sha256(repr((str(path or model), stats)).encode()).hexdigest()
    return f"{Path(model).name}-{digest[:16]}"


def _export(settings: dict, weights: str, folder: Path) -> None:
    if importlib.util.find_spec("optimum") is None or (
        importlib.util.find_spec("optimum.intel") is None
    ):
        raise Refused(
            "--peers", f"{settings['peer']}={sys.executable}",
            "a Python that also has optimum-intel, which exports the model once; or name an "
            f"exported one by --peer-args '{{\"{settings['peer']}\": {{\"ir\": \"FOLDER\"}}}}'",
        )  # fmt: skip
    folder.parent.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    if Path(settings["model"]).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "ir"
        command = [
            sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino",
            "--model", settings["model"], "--task", "text-generation-with-past",
            "--weight-format", weights, str(made),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode or not (made / "openvino_model.xml").is_file():
            why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise Refused("--model", settings["model"], f"one that optimum-intel exports ({why})")
        if not folder.exists():  # another run may have been first
            made.rename(folder)

"""What a user gave, from the command line and a `--config` file, converted and sorted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vtoken.errors import ConfigError, nearest
from vtoken.modes import MODES
from vtoken.units import AUTO, read_text
from vtoken_cli.options import ENGINE, FILES, OUTPUT, VTOKEN, Opt, by_key
from vtoken_cli.output import Output
from vtoken_cli.parsers import comma_list

_ALREADY_USED = {row.key for row in (*FILES, *OUTPUT)}


@dataclass
class Run:
    """What a user asked of a command: only what was given, converted.

    Attributes:
        vtoken, engine: {"eviction_ratio": 0.5}, {"model": "tiny-llama"}: keys are the fields of
            VTokenConfig and EngineSettings.
        own: {"prompt_len": 256}: rows that are in neither table.
        many: {"mode": ["native", "vtoken"]}: comma lists.
        out: results, notes, progress.
        extra_args: what followed `--`.
    """

    out: Output
    vtoken: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    many: dict[str, list[str]] = field(default_factory=dict)
    output_dir: Path | None = None
    extra_args: list[str] = field(default_factory=list)

    def vllm_args(self) -> dict[str, Any]:
        """Read the options after `--` with vLLM's own parser (imports vLLM)."""
        from vtoken.engine.vllm_args import parse_vllm_args

        return parse_vllm_args(self.extra_args) if self.extra_args else {}

    def settings(self) -> dict[str, Any]:
        """What scans, benchmarks and profiles have in common: config, engine, modes, policies."""
        from vtoken.config import VTokenConfig
        from vtoken.engine.settings import EngineSettings

        engine = dict(self.engine)
        if engine.get("max_model_len") == AUTO:
            del engine["max_model_len"]  # these commands know how long their requests get
        names = {"modes": "mode", "policies": "policy"}
        return {
            "config": VTokenConfig.from_mapping(self.vtoken),
            "engine": EngineSettings(**engine, vllm_args=self.vllm_args()),
            **{name: tuple(self.many[key]) for name, key in names.items() if key in self.many},
        }


def build_run(given: dict[str, Any], rows: Sequence[Opt], many: tuple[str, ...]) -> Run:
    """Convert given options and sort them into a `Run`."""
    known = by_key(rows)
    parsed = {
        key: comma_list(value, known[key].name) if key in many else known[key].read(value)
        for key, value in given.items()
    }
    _check_modes(parsed.get("mode"))
    run = Run(out=Output(**{key: parsed.get(key, False) for key in by_key(OUTPUT)}))
    run.output_dir = Path(parsed["output"]).expanduser() if "output" in parsed else None
    if parsed.pop("hash_kv", False):
        parsed.setdefault("hash_kv_every", 1)
    shared = {
        **dict.fromkeys(by_key(VTOKEN), run.vtoken),
        **dict.fromkeys(by_key(ENGINE), run.engine),
    }
    for key, value in parsed.items():
        if key in many:
            run.many[key] = value
        elif key not in _ALREADY_USED:
            shared.get(key, run.own)[key] = value
    if "seed" in run.vtoken:
        run.engine["seed"] = run.vtoken["seed"]
    return run


def _check_modes(modes: str | list[str] | None) -> None:
    for mode in [modes] if isinstance(modes, str) else modes or []:
        if mode not in MODES:
            raise ConfigError("--mode", mode, nearest(mode, MODES))


def read_yaml(file: str | None, rows: Sequence[Opt]) -> dict[str, Any]:
    """Read a `--config` file into values by option key; null means not given."""
    if file is None:
        return {}
    import yaml

    written = read_text(Path(file).expanduser(), "--config")
    try:
        content = yaml.safe_load(written)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError("--config", file, f"is not YAML: {problem}") from None
    if not isinstance(content, dict):
        raise ConfigError("--config", file, "must hold one mapping of option names to values")
    rows_by_name = {name: row for row in rows for name in row.yaml_keys if row.key != "config"}
    given: dict[str, Any] = {}
    for key, value in content.items():
        row = rows_by_name.get(str(key).replace("-", "_"))
        if row is None:
            spellings = {name.replace("_", "-") for name in rows_by_name}
            hint = nearest(str(key).replace("_", "-"), spellings)
            raise ConfigError(f"--config {file}", str(key), f"unknown key; {hint}")
        if row.key in given:
            raise ConfigError(f"--config {file}", str(key), f"{row.name} is there twice")
        if value is not None:
            given[row.key] = value
    return given

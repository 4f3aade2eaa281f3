"""From what Typer parsed to a running command: YAML, conversion, environment, output."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vtoken.errors import ConfigError, nearest
from vtoken_cli.options import ENGINE, MODES, VTOKEN, Opt, Run, by_key
from vtoken_cli.output import Output
from vtoken_cli.parsers import comma_list

_ALREADY_USED = ("config", "output", "as_json", "quiet", "verbose")


def invoke(
    function: Callable[[Run], None],
    rows: Sequence[Opt],
    values: dict[str, Any],
    extra_args: list[str],
    many: tuple[str, ...],
    starts_engine: bool,
) -> None:
    """Run a command with what the user gave.

    Args:
        values: what Typer found, by key: text, True for a switch, None or False when not given.
        extra_args: what followed `--`.

    Raises:
        ConfigError: an option, a value or the `--config` file is wrong.
    """
    given = {key: value for key, value in values.items() if value not in (None, False)}
    given = {**_read_yaml(given.get("config"), rows), **given}
    run = build_run(given, rows, many)
    if extra_args and not starts_engine:
        raise ConfigError("--", " ".join(extra_args), "this command passes no options to vLLM")
    run.extra_args = extra_args
    if not starts_engine:
        return function(run)
    _prepare_process(run.out)
    with run.out.stdout_claimed():
        function(run)


def build_run(given: dict[str, Any], rows: Sequence[Opt], many: tuple[str, ...]) -> Run:
    """Convert given options and sort them into a `Run`."""
    known = by_key(rows)
    parsed = {
        key: comma_list(value, known[key].name) if key in many else known[key].read(value)
        for key, value in given.items()
    }
    _check_modes(parsed.get("mode"))
    out = Output(
        as_json=parsed.get("as_json", False),
        quiet=parsed.get("quiet", False),
        verbose=parsed.get("verbose", False),
    )
    run = Run(out=out)
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


def _read_yaml(file: str | None, rows: Sequence[Opt]) -> dict[str, Any]:
    """Read a `--config` file into values by option key; null means not given."""
    if file is None:
        return {}
    import yaml

    try:
        content = yaml.safe_load(Path(file).expanduser().read_text())
    except OSError as error:
        raise ConfigError("--config", file, f"cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
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


def _interrupt_once(signum, frame) -> None:
    """End a job as Ctrl-C does: `timeout` and batch systems do it this way, and may do it twice.

    Raises:
        KeyboardInterrupt: what was measured is kept.
    """
    signal.signal(signum, signal.SIG_IGN)
    raise KeyboardInterrupt


def _prepare_process(out: Output) -> None:
    """Get the process ready for an engine. May start it over, so nothing has happened before."""
    from vtoken_cli.cpu_runtime import ensure_cpu_runtime

    ensure_cpu_runtime(out.note)
    signal.signal(signal.SIGTERM, _interrupt_once)
    if not out.verbose:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")

"""Run vLLM's own server in this process: its argument parser, its `serve` command, our settings.

What a user gave becomes an argument list for vLLM, with defaults first and the user's own flags
last, so that theirs win.
"""

from __future__ import annotations

import json
import os
from argparse import SUPPRESS
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any, NoReturn

from vtoken.config import VTokenConfig
from vtoken.errors import ConfigError, EngineError

DEFAULT_SETTINGS: dict[str, Any] = {"evict_when": "pressure"}
"""vToken's settings where the user does not give them: nobody loses a token while there is room."""

PLUGIN_NAME = "vtoken"
ENDPOINT_GROUP = "vllm.endpoint_plugins"


def merge_settings(given: dict[str, Any], from_vllm: dict[str, Any]) -> VTokenConfig:
    """Settings of the server: the defaults, `--additional-config`, then the command line.

    Raises:
        ConfigError: one of them is wrong.
    """
    asked = {**from_vllm, **given}
    config = VTokenConfig.from_mapping({**DEFAULT_SETTINGS, **_platform_policy(), **asked})
    if config.trace or config.record_scores:
        key = "trace" if config.trace else "record_scores"
        raise ConfigError(key, getattr(config, key), "grows without end; not in a server")
    return config


def _platform_policy() -> dict[str, str]:
    """A default policy that this platform can run: scores exist on CPUs only."""
    from vtoken.engine.cpu import engine_runs_on_cpu

    return {} if engine_runs_on_cpu() else {"policy": "streaming-llm"}


def vllm_argv(
    config: VTokenConfig, engine: dict[str, Any], extra: Sequence[str], given: dict[str, Any]
) -> list[str]:
    """vLLM's argument list.

    Args:
        engine: what the user gave, keys are EngineSettings' fields.
        extra: what followed `--`.
        given: `extra` as vLLM's parser reads it, only what is there.
    """
    from vtoken.engine.cpu import platform_defaults
    from vtoken.engine.settings import EngineSettings
    from vtoken.models import resolve_model

    settings = EngineSettings(**engine)  # checks the values
    wanted = {"model": resolve_model(settings.model)}
    if "served_model_name" not in given:
        wanted["served_model_name"] = settings.model
    wanted |= platform_defaults(
        {*given, *engine}, config, pool_bytes=1 << 30 if "num_kv_blocks" in engine else 2 << 30
    )
    taken = settings.vllm_settings()
    wanted |= {name: taken[name] for name in engine if name in taken and name != "model"}
    if "num_gpu_blocks_override" in taken:
        wanted["num_gpu_blocks_override"] = taken["num_gpu_blocks_override"]
    argv = [word for name, value in wanted.items() for word in _as_flag(name, value)] + [*extra]
    additional = given.get("additional_config") or {}
    data = config.model_dump(exclude_unset=True) | {"mode": config.mode}
    return [*argv, "--additional-config", json.dumps({**additional, "vtoken": data})]


def _as_flag(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value)]


def make_parser(extra: Sequence[str]):
    """vLLM's parser of `vllm serve`, whose complaints are ours.

    Raises (when it parses):
        ConfigError: vLLM does not know an option or refuses a value.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError("--", " ".join(extra), f"vLLM says: {message}")

    return make_arg_parser(Parser(add_help=False))


def read_given(extra: Sequence[str]) -> dict[str, Any]:
    """What is in vLLM's options, without vLLM's defaults."""
    parser = make_parser(extra)
    for action in parser._actions:
        action.default = SUPPRESS
    given = vars(parser.parse_args(list(extra)))
    if given.get("model_tag") or given.get("model"):
        raise ConfigError("--", " ".join(extra), "give the model to vtoken serve, before the --")
    return given


def allow_status_page(wanted: bool) -> bool | str:
    """Make vLLM load our endpoint plugin: it loads only those that `VLLM_PLUGINS` names.

    The variable is a list of all plugins to load, so where it is not set yet the others that are
    installed must be named too, or they would be left out.

    Returns:
        True, or the reason why there will be no page.
    """
    os.environ["VTOKEN_STATUS_PAGE"] = "1" if wanted else "0"
    listed = os.environ.get("VLLM_PLUGINS")
    if listed is not None:  # without our name there would be no eviction either
        names = [n for n in listed.split(",") if n]
        if PLUGIN_NAME not in names:
            os.environ["VLLM_PLUGINS"] = ",".join([*names, PLUGIN_NAME])
    if not wanted:
        return "--no-status-page"
    if listed is not None:
        return True
    installed = {ep.name for group in _PLUGIN_GROUPS for ep in entry_points(group=group)}
    pages = {ep.name for ep in entry_points(group=ENDPOINT_GROUP)} - {PLUGIN_NAME}
    if pages & installed:
        return (
            f"it would switch on the pages of {', '.join(sorted(pages & installed))}; "
            "set VLLM_PLUGINS to choose"
        )
    os.environ["VLLM_PLUGINS"] = ",".join(sorted(installed | {PLUGIN_NAME}))
    return True


_PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)


def serve(
    given: dict[str, Any],
    engine: dict[str, Any],
    extra: Sequence[str],
    *,
    status_page: bool = True,
    show: Callable[[dict[str, Any]], None],
) -> None:
    """Serve until a signal ends it.

    Args:
        given, engine: vToken's and the engine's settings that the user gave.
        extra: flags for vLLM.
        show: gets the panel's facts once the engine is up.

    Raises:
        ConfigError: a setting is wrong.
        EngineError: the engine did not start, or died.
    """
    # A wrong setting is said at once, not after half a minute of imports.
    VTokenConfig.from_mapping(given).make_policy(block_size=16)
    from vtoken.vllm_plugin import compat, plugin

    compat.check_version(compat.vllm_version())
    plugin.register()  # also where vLLM finds no entry point: a source tree that is not installed
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args

    cli_env_setup()
    from_user = read_given(extra)
    config = merge_settings(given, (from_user.get("additional_config") or {}).get("vtoken", {}))
    page = allow_status_page(status_page)
    args = make_parser(extra).parse_args(vllm_argv(config, engine, extra, from_user))
    configure_logging_from_args(args)
    command = ServeSubcommand()
    try:
        command.validate(args)
    except ValueError as error:
        raise ConfigError("--", " ".join(extra), f"vLLM says: {error}") from None
    died = _watch_server(config, page, show)
    try:
        command.cmd(args)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise EngineError(f"vLLM's server ended with status {error.code}") from None
    except Exception as error:
        raise _as_ours(error) from error
    if any(died):
        raise EngineError("the engine died; its log is above")


def _as_ours(error: Exception) -> Exception:
    from vtoken.engine.real import _config_cause

    if isinstance(error, OSError):
        return ConfigError("--host/--port", error.strerror or str(error), "cannot be listened on")
    return _config_cause(error) or EngineError(f"vLLM's server failed: {error}")


def _watch_server(config: VTokenConfig, page: bool | str, show) -> list[bool]:
    """Learn when the engine is up, and in the returned list whether it was dead at the end.

    vLLM calls `build_and_serve` between the two; with several API servers that happens in child
    processes, which show no panel.
    """
    from vllm.entrypoints.launchers.api_server import entry

    stock, died = entry.build_and_serve, []

    async def build_and_serve(engine_client, listen_address, *rest, **kwargs):
        shut_down = engine_client.shutdown

        def note_and_shut_down(*args, **kwargs):
            # Afterwards it counts as dead however it ended: the first call is the one to ask in.
            if not died:
                died.append(engine_client.errored)
            return shut_down(*args, **kwargs)

        engine_client.shutdown = note_and_shut_down
        url = public_url(listen_address)
        show(collect_facts(engine_client.vllm_config, config, url=url, status_page=page))
        return await stock(engine_client, listen_address, *rest, **kwargs)

    entry.build_and_serve = build_and_serve
    return died


def public_url(listen_address: str) -> str:
    """An address to open: a server on all interfaces is shown as the local one."""
    return listen_address.replace("://0.0.0.0:", "://127.0.0.1:").replace("://[::]:", "://[::1]:")


def collect_facts(vllm_config, config: VTokenConfig, *, url: str, status_page: bool | str) -> dict:
    """The panel's facts, with the kernels that this machine gets."""
    from vtoken.server.panel import facts

    return facts(
        vllm_config, config, url=url, kernels=kernels_text(vllm_config), status_page=status_page
    )


def kernels_text(vllm_config) -> str:
    """What computes attention over holes and scores."""
    if vllm_config.device_config.device_type != "cpu":
        return "stock attention where a request is packed"
    from vtoken.kernels import load

    kernels = load()
    return f"{kernels.name}: {kernels.why}"

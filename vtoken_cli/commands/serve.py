"""`vtoken serve`: vLLM's OpenAI-compatible server with vToken in it."""

from __future__ import annotations

import os

from vtoken.errors import ConfigError
from vtoken_cli.command import command
from vtoken_cli.given import Run
from vtoken_cli.options import Opt, shared_rows
from vtoken_cli.parsers import count, text

OWN = (
    Opt("model_name", positional=True, help="The model; the same as --model."),
    Opt("host", parse=text, metavar="HOST", default="all interfaces", help="Where to listen."),
    Opt("port", parse=count, metavar="PORT", default="8000", help="Port to listen on."),
    Opt("no_status_page", switch=True, help="No pages at /vtoken and /vtoken/state."),
)  # fmt: skip


@command(OWN[0], *shared_rows(evict_when="pressure"), *OWN[1:], starts_engine=True)
def serve(run: Run) -> None:
    """Serve a model with the OpenAI API: vLLM's own server with vToken in it.

    Every option of vllm serve can follow --, for example -- --api-key KEY.
    """
    from vtoken.engine.server import serve as run_server
    from vtoken.server.panel import render

    if not run.out.quiet and os.environ.get("VLLM_LOGGING_LEVEL") == "WARNING":
        os.environ["VLLM_LOGGING_LEVEL"] = "INFO"  # a server's log is what one watches
    if "port" in run.own and not 0 < run.own["port"] < 65536:
        raise ConfigError("--port", run.own["port"], "a port, from 1 to 65535")

    def show(facts: dict) -> None:
        run.out.print(render(facts))
        run.out.result(facts)

    listen = [
        x for key in ("host", "port") if key in run.own for x in (f"--{key}", str(run.own[key]))
    ]
    run_server(
        run.vtoken,
        engine_settings(run),
        [*listen, *run.extra_args],
        status_page=not run.own.get("no_status_page", False),
        show=show,
    )


def engine_settings(run: Run) -> dict:
    """The engine's settings, with the model from either place."""
    named = run.own.get("model_name")
    if named and run.engine.get("model", named) != named:
        raise ConfigError("--model", run.engine["model"], f"MODEL says {named}; give one of them")
    return {**run.engine, **({"model": named} if named else {})}

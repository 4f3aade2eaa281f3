"""The `vtoken` command. Subcommands are imported when they are called, never for `--help`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import typer
from typer.core import TyperGroup

import vtoken
from vtoken.errors import VTokenError, nearest

# name -> (module in vtoken_cli.commands, also the attribute in it; line in the help)
COMMANDS = {
    "serve": ("serve", "Serve a model: vLLM's OpenAI-compatible server with vToken in it."),
    "capacity-scan": ("capacity_scan", "Find how many requests fit into the KV pool at once."),
    "bench": ("bench", "Compare modes and policies in paired runs."),
    "profile": ("profile", "Measure what the mechanism costs."),
    "verify": ("verify", "Check invariants, outputs and fault detection."),
    "models": ("models", "List, prepare and locate the embedded models."),
    "env": ("env", "Show what is installed, used and supported."),
    "top": ("top", "Watch a running server."),
    "load": ("load", "Put load on a running server, or compare two."),
}
INTERRUPTED = 130
_PLAIN = {"rich_markup_mode": None, "pretty_exceptions_enable": False, "add_completion": False}


class LazyGroup(TyperGroup):
    """A group whose help is a table in this file and whose commands are imported on use."""

    def list_commands(self, ctx: typer.Context) -> list[str]:
        return available_commands()

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:
        return load_command(cmd_name) if cmd_name in available_commands() else None

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in available_commands():
            ctx.fail(f"no command {args[0]!r}: {nearest(args[0], available_commands())}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in available_commands()])


def available_commands() -> list[str]:
    """Return the commands whose modules are there, in the order of the help."""
    return [n for n, (module, _) in COMMANDS.items() if find_spec(f"vtoken_cli.commands.{module}")]


def load_command(name: str) -> Any:
    """Import one command and make it ready to run. It is a function or a Typer app of its own."""
    module = COMMANDS[name][0]
    found = getattr(import_module(f"vtoken_cli.commands.{module}"), module)
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(**_PLAIN)
        found.command(name)(function)
    loaded = typer.main.get_command(found)
    loaded.name = name
    return loaded


app = typer.Typer(cls=LazyGroup, **_PLAIN)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vtoken {vtoken.__version__}")
        raise typer.Exit


@app.callback()
def _vtoken(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version."
    ),
) -> None:
    """Token-level KV cache for stock vLLM: evict tokens, get whole blocks back.

    Options after `--` go to vLLM unchanged.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run `vtoken` and return its exit code (the console script exits with it).

    0 done, 1 a check failed, 2 bad usage or configuration, 3 the engine failed, 130 interrupted.
    """
    for stream in (sys.stdout, sys.stderr):  # no terminal's encoding may end a command
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    args = list(sys.argv[1:] if argv is None else argv)
    own, extra = split_extra_args(args)
    try:
        # Not command(...): Typer would turn interrupts and closed pipes into codes of its own.
        vtoken_command = typer.main.get_command(app)
        with vtoken_command.make_context("vtoken", own or ["--help"], obj=extra) as context:
            vtoken_command.invoke(context)
        return 0
    except typer.Exit as done:
        return done.exit_code
    except VTokenError as error:
        return _report(error, error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        print("vtoken: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return _give_up_stdout()
    except Exception as error:  # noqa: BLE001 - the last line of defence: no traceback for users
        if hasattr(error, "format_message"):  # Typer's own: wrong usage
            return _say(f"{error.format_message()}{_where(error)}", 2)
        return _report(error, 3)


def split_extra_args(args: list[str]) -> tuple[list[str], list[str]]:
    """Split at the first `--`: ours before it, vLLM's after it."""
    cut = args.index("--") if "--" in args else len(args)
    return args[:cut], args[cut + 1 :]


def _report(error: Exception, exit_code: int) -> int:
    """Say in one line what went wrong; keep the traceback of what is not the user's doing."""
    message = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, VTokenError):
        message = f"{type(error).__name__}: {message}"
    if exit_code == 3:
        from vtoken_cli.crash_log import write_crash_log

        message += f" (details: {write_crash_log(error)})"
    return _say(message, exit_code)


def _say(message: str, exit_code: int) -> int:
    print(f"vtoken: {message}", file=sys.stderr)
    return exit_code


def _where(error: Exception) -> str:
    path = getattr(getattr(error, "ctx", None), "command_path", None)
    return f" (see {path} --help)" if path else ""


def _give_up_stdout() -> int:
    # The reader of a pipe went away, as in `vtoken models | head -1`. Python would complain once
    # more when it flushes stdout at exit.
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


def run() -> None:
    """Exit with `main`'s code."""
    sys.exit(main())


if __name__ == "__main__":
    run()

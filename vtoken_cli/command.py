"""A command: its options declared to Typer, what was given read, the process made ready.

    @command(*VTOKEN, *ENGINE, Opt("prompt_len", parse=count, metavar="TOKENS", help="..."),
             many=("mode", "policy"), starts_engine=True)
    def capacity_scan(run: Run) -> None:
        '''What the command does: its help text.'''

`command` makes a function that Typer takes as it is. It receives what the user gave, converted and
checked, with nothing filled in; defaults are decided where the settings are used. Every command
also has `--json`, `--quiet` and `--verbose`, and where `config=True` (the default) `--config` and
`--output`.
"""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from vtoken.errors import ConfigError
from vtoken_cli.given import Run, build_run, read_yaml
from vtoken_cli.options import FILES, OUTPUT, Opt
from vtoken_cli.output import Output

_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def command(
    *rows: Opt,
    many: Sequence[str] = (),
    starts_engine: bool = False,
    config: bool = True,
) -> Callable[[Callable[[Run], None]], Callable[..., None]]:
    """Turn a function of a `Run` into one that Typer takes.

    Args:
        rows: the options, shared and own.
        many: keys of options that take a comma list here; they go to `Run.many`.
        starts_engine: prepare the process for an engine, and let options for vLLM follow `--`.
        config: offer `--config` and `--output`.
    """
    rows = (*rows, *(FILES if config else ()), *OUTPUT)

    def wrap(function: Callable[[Run], None]) -> Callable[..., None]:
        def typer_function(ctx: typer.Context, **values: Any) -> None:
            run = _read(rows, values, tuple(many))
            run.extra_args = ctx.obj or []
            if not starts_engine:
                if run.extra_args:
                    given = " ".join(run.extra_args)
                    raise ConfigError("--", given, "this command passes no options to vLLM")
                return function(run)
            _prepare_process(run.out)
            with run.out.stdout_claimed():
                function(run)

        typer_function.__name__ = function.__name__
        typer_function.__module__ = function.__module__
        typer_function.__doc__ = inspect.getdoc(function)
        context = inspect.Parameter("ctx", _KEYWORD, annotation=typer.Context)
        parameters = [context, *(_parameter(row) for row in rows)]
        typer_function.__signature__ = inspect.Signature(parameters)
        typer_function.__annotations__ = {p.name: p.annotation for p in parameters}
        typer_function.rows = rows
        return typer_function

    return wrap


def _read(rows: Sequence[Opt], values: dict[str, Any], many: tuple[str, ...]) -> Run:
    """What Typer found, by key: text, True for a switch, None or False when not given."""
    given = {key: value for key, value in values.items() if value not in (None, False)}
    return build_run({**read_yaml(given.get("config"), rows), **given}, rows, many)


def _parameter(row: Opt) -> inspect.Parameter:
    """Declare a row to Typer, which only ever sees text: conversion and messages are ours."""
    shown = f"{row.help} [default: {row.default}]" if row.default else row.help
    if row.positional:
        metavar = row.name if row.metavar == "TEXT" else row.metavar
        declared = typer.Argument(help=shown, show_default=False, metavar=metavar)
    elif row.switch:
        return inspect.Parameter(
            row.key,
            _KEYWORD,
            default=False,
            annotation=Annotated[bool, typer.Option(*row.flags, help=shown, show_default=False)],
        )
    else:
        declared = typer.Option(*row.flags, help=shown, metavar=row.metavar, show_default=False)
    annotation = Annotated[str | None, declared]
    return inspect.Parameter(row.key, _KEYWORD, default=None, annotation=annotation)


def _interrupt_once(signum, frame) -> None:
    """End a job as Ctrl-C does: `timeout` and batch systems do it this way, and may do it twice."""
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

"""`vtoken models`: list, prepare and locate the embedded models."""

from __future__ import annotations

from pathlib import Path

import typer

from vtoken.errors import ConfigError, nearest
from vtoken.models import MODEL_NAMES, is_prepared, prepare
from vtoken.models.store import model_dir
from vtoken_cli.command import command
from vtoken_cli.given import Run
from vtoken_cli.options import Opt

_ABOUT = {"smollm2-135m": "SmolLM2-135M-Instruct, from a wheel of 89 MiB, Apache-2.0"}
_ABOUT_OTHERS = "generated, 2 layers, for tests"

models = typer.Typer(rich_markup_mode=None, help="List, prepare and locate the embedded models.")
_NAME = Opt("name", positional=True, help=f"One of {', '.join(MODEL_NAMES)}.")


@command(config=False)
def list_models(run: Run) -> None:
    """List the embedded models and where they are."""
    from rich.table import Table

    rows = [
        {
            "name": name,
            "prepared": is_prepared(name),
            "path": str(model_dir(name)),
            "size_bytes": _size_bytes(model_dir(name)) if is_prepared(name) else None,
            "about": _ABOUT.get(name, _ABOUT_OTHERS),
        }
        for name in MODEL_NAMES
    ]
    table = Table("model", "about", "size", "path")
    for row in rows:
        size = f"{row['size_bytes'] / 2**20:.0f} MiB" if row["prepared"] else "not prepared"
        table.add_row(row["name"], row["about"], size, row["path"] if row["prepared"] else "")
    run.out.print(table)
    run.out.result({"models": rows})


@command(_NAME, config=False)
def prepare_model(run: Run) -> None:
    """Download or generate a model, and print its folder."""
    path = prepare(_given_name(run), progress=run.out.note)
    _print_path(run, path)


@command(_NAME, config=False)
def locate_model(run: Run) -> None:
    """Print the folder of a prepared model."""
    name = _given_name(run)
    if not is_prepared(name):
        raise ConfigError("NAME", name, f"not prepared yet: run vtoken models prepare {name}")
    _print_path(run, model_dir(name))


@models.callback(invoke_without_command=True)
def _bare(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        list_models(ctx, as_json=False, quiet=False, verbose=False)


models.command("list")(list_models)
models.command("prepare")(prepare_model)
models.command("path")(locate_model)


def _given_name(run: Run) -> str:
    name = run.own.get("name")
    if name not in MODEL_NAMES:
        raise ConfigError("NAME", name or "", nearest(name or "", MODEL_NAMES))
    return name


def _print_path(run: Run, path: Path) -> None:
    # Not through Rich, which would wrap a long path.
    if not run.out.as_json:
        print(path, file=run.out.stdout)
    run.out.result({"path": str(path)})


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())

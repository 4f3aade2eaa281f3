"""Run `vtoken` in a process of its own, with a command that tests write."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

# Stands for the console script; the extra folder holds the test's own command modules.
_LAUNCHER = """
import sys
import vtoken_cli.commands
from vtoken_cli import app
folder, *names = {names!r}
vtoken_cli.commands.__path__.append(folder)
app.COMMANDS.update({{name: (name, "a test's command") for name in names}})
sys.exit(app.main())
"""


class Cli:
    """Start `vtoken` with the commands that were added."""

    def __init__(self, folder) -> None:
        self._names = [str(folder)]
        self._folder = folder

    def add(self, name: str, body: str, decorator: str = "@command(*VTOKEN, *ENGINE)") -> None:
        """Add a command whose function body (it sees `run`) is `body`."""
        header = "from vtoken_cli.options import *\nfrom vtoken_cli.command import command\n"
        body = textwrap.indent(textwrap.dedent(body).strip(), "    ")
        source = f'{header}\n{decorator}\ndef {name}(run):\n    """Help of {name}."""\n{body}\n'
        (self._folder / f"{name}.py").write_text(source)
        self._names.append(name)

    def arguments(self, *args: str) -> list[str]:
        return [sys.executable, "-c", _LAUNCHER.format(names=self._names), *args]

    def __call__(self, *args: str, **environment: str | None) -> subprocess.CompletedProcess:
        env = {k: v for k, v in {**os.environ, **environment}.items() if v is not None}
        return subprocess.run(
            self.arguments(*args), check=False, capture_output=True, text=True, env=env, timeout=300
        )


@pytest.fixture
def cli(tmp_path):
    folder = tmp_path / "commands"
    folder.mkdir()
    return Cli(folder)

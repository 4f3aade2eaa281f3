"""The frame around all commands: help, exit codes, messages, clean output."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

from vtoken_cli import app


def test_help_imports_nothing_heavy(cli):
    """What keeps `vtoken --help` fast; the time itself depends on the machine."""
    code = (
        "import sys; from vtoken_cli.app import main; main(['--help']); "
        "print('IMPORTED', *sorted(sys.modules))"
    )
    done = subprocess.run(
        [cli.arguments()[0], "-c", code], check=True, capture_output=True, text=True
    )
    imported = set(done.stdout.partition("IMPORTED")[2].split())
    heavy = {"torch", "vllm", "numpy", "pydantic", "yaml", "transformers", "rich.console"}
    assert "typer" in imported and not imported & heavy
    assert not {name for name in imported if name.startswith("vtoken_cli.commands.")}


def test_help_lists_the_commands_that_exist(capsys):
    assert app.main([]) == 0
    shown = capsys.readouterr().out
    for name in app.available_commands():
        assert app.COMMANDS[name][1].split(":")[0][:30] in " ".join(shown.split())
    assert {"models", "env"} <= set(app.available_commands())


def test_commands_without_a_module_are_not_offered(monkeypatch, capsys):
    monkeypatch.setitem(app.COMMANDS, "no-such", ("no_such", "not there"))
    assert "no-such" not in app.available_commands()
    assert app.main(["no-such"]) == 2
    assert "no command 'no-such'" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(app.available_commands()))
def test_every_command_explains_itself(name, capsys):
    assert app.main([name, "--help"]) == 0
    assert f"Usage: vtoken {name}" in capsys.readouterr().out


def test_version(capsys):
    import vtoken

    assert app.main(["--version"]) == 0
    assert capsys.readouterr().out == f"vtoken {vtoken.__version__}\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["modles"], "vtoken: no command 'modles': did you mean 'models'? (see vtoken --help)"),
        (["models", "lst"], "No such command 'lst'"),
        (["env", "--jsno"], "No such option: --jsno"),
        (["models", "path", "tiny-lama"], "NAME 'tiny-lama': did you mean 'tiny-llama'?"),
        (["models", "prepare"], "NAME '': one of"),
        (["env", "--", "--enforce-eager"], "this command passes no options to vLLM"),
    ],
)
def test_bad_usage_is_one_line_and_code_2(args, message, capsys):
    assert app.main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        ("ConfigError('--x', 5, 'at most 4')", 2, "vtoken: --x 5: at most 4\n"),
        ("UnsupportedError('vtoken with', 'LoRA', 'no')", 2, "vtoken: vtoken with 'LoRA': no\n"),
        ("InvariantViolation('I2', 'two tokens, one slot')", 1, "vtoken: I2: two tokens, one slot\n"),
    ],
)  # fmt: skip
def test_our_errors_become_exit_codes(cli, error, code, message):
    cli.add("fail", f"from vtoken import errors\nraise errors.{error}")
    done = cli("fail")
    assert (done.returncode, done.stderr, done.stdout) == (code, message, "")


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("EngineError('worker 1 died\\nof hunger')", "vtoken: worker 1 died of hunger (details: "),
        ("KeyError('seq')", "vtoken: KeyError: 'seq' (details: "),
    ],
)
def test_failures_leave_a_log(cli, tmp_path, raised, said):
    cli.add("fail", f"from vtoken.errors import EngineError\nraise {raised}")
    done = cli("fail", VTOKEN_CACHE=str(tmp_path))
    assert done.returncode == 3 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(said)
    (log,) = (tmp_path / "logs").iterdir()
    assert str(log) in done.stderr
    assert "Traceback" in log.read_text() and "fail.py" in log.read_text()


def test_interrupt(cli):
    cli.add("wait", "import time\nrun.out.note('waiting')\ntime.sleep(60)")
    process = subprocess.Popen(
        cli.arguments("wait"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # Jobs that a shell puts into the background ignore it, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )  # fmt: skip
    assert process.stderr.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.strip()) == (130, "", "vtoken: interrupted")


def test_a_command_decides_its_exit_code(cli):
    cli.add("check", "import typer\nrun.out.print('no')\nraise typer.Exit(1)")
    assert cli("check").returncode == 1


ENGINE_COMMAND = "@command(starts_engine=True)"


def test_json_alone_on_stdout_whatever_libraries_print(cli):
    cli.add(
        "noisy",
        """
        import os
        print("from Python")
        os.system("echo from a child process")
        os.write(1, b"from C\\n")
        run.out.print("[bold]a table[/]")
        run.out.note("a note")
        run.out.result({"answer": 42})
        """,
        ENGINE_COMMAND,
    )
    done = cli("noisy", "--json")
    assert done.returncode == 0 and json.loads(done.stdout) == {"answer": 42}
    for text in ("from Python", "from a child process", "from C", "a note"):
        assert text in done.stderr
    assert "a table" not in done.stdout + done.stderr

    done = cli("noisy", "--quiet")
    assert done.stdout == "a table\n" and "a note" not in done.stderr


def test_stdout_comes_back_after_a_command(cli, capfd):
    import sys

    from vtoken_cli.output import Output

    out = Output()
    with capfd.disabled():
        before = os.fstat(1)
        with out.stdout_claimed():
            assert os.path.sameopenfile(1, 2)
        after = os.fstat(1)
    assert (before.st_ino, before.st_dev) == (after.st_ino, after.st_dev)
    assert out.stdout is sys.stdout


def test_a_closed_pipe_is_no_error(cli):
    cli.add("long", "for i in range(20000): run.out.print(f'line {i}')")
    process = subprocess.Popen(
        cli.arguments("long"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "line 0\n"
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 0 and err == ""

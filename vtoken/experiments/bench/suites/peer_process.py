"""Engines of other environments, each in a process of its own that stays up."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread

from vtoken.engine import peer_runner
from vtoken.engine.peer_runner.serve import ENGINES
from vtoken.errors import ConfigError, EngineError, nearest

STOCK = "stock"
SCRIPT = Path(peer_runner.__file__).resolve().with_name("__main__.py")


def engine_of(name: str, option: str = "--peers") -> str:
    """The engine of a peer: `NAME`, or `NAME:LABEL` for a second line of the same engine."""
    engine = name.partition(":")[0]
    if engine not in ENGINES:
        raise ConfigError(
            option, name, nearest(engine, set(ENGINES) - {STOCK}) + " (or NAME:LABEL)"
        )
    return engine


def check_peer_args(peers: Iterable[str], peer_args: Mapping[str, object]) -> None:
    """Refuse settings of a peer that is not there, or that it does not have."""
    for name, given in peer_args.items():
        if name not in peers:
            raise ConfigError("--peer-args", name, nearest(name, peers))
        if not isinstance(given, Mapping):
            raise ConfigError("--peer-args", f"{name}={given}", "an object of settings by name")
        known = ENGINES[engine_of(name, "--peer-args")].args
        for key in given:
            if known is not None and key not in known:
                raise ConfigError("--peer-args", f"{name}.{key}", nearest(key, known))


def check_interpreter(name: str, python: str) -> None:
    """Refuse a peer that cannot run, before anything is measured."""
    module = ENGINES[engine_of(name)].module
    try:
        done = subprocess.run(
            [python, "-c", f"import {module}"], capture_output=True, text=True, timeout=300,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        why = getattr(error, "strerror", None) or "it does not answer"
        raise ConfigError("--peers", f"{name}={python}", f"a Python that runs ({why})") from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it fails"])[-1]
        raise ConfigError(
            "--peers", f"{name}={python}", f"a Python that can import {module} ({why})"
        )


class Peer:
    """A process that runs another engine.

    Attributes:
        about: what it said of itself: version, pool_tokens, budget_tokens, eviction.
    """

    def __init__(self, name: str, python: str, settings: Mapping[str, object]) -> None:
        self.name = name
        environment = {k: v for k, v in os.environ.items() if not k.startswith("VTOKEN_")}
        self.process = subprocess.Popen(
            [python, str(SCRIPT), engine_of(name), json.dumps({**settings, "peer": name})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip
        self._last: deque[str] = deque(maxlen=50)
        # What it logs must be read, or it would wait for a full pipe.
        self._reader = Thread(target=self._drain, daemon=True)
        self._reader.start()
        try:
            self.about: dict[str, object] = self._wait_for(peer_runner.READY)
        except BaseException:
            self.close()
            raise

    def _drain(self) -> None:
        for line in self.process.stderr:
            self._last.append(line.rstrip())

    def _wait_for(self, word: str):
        for line in self.process.stdout:
            said, _, body = line.partition(" ")
            if said == peer_runner.REFUSED:
                raise ConfigError(**json.loads(body))
            if said == peer_runner.FAILED:
                raise EngineError(f"the peer {self.name} failed: {json.loads(body)}")
            if said == word:
                return json.loads(body)
        code = self.process.wait()
        self._reader.join(timeout=5)
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        last = next((line.strip() for line in reversed(self._last) if line.strip()), "no word")
        raise EngineError(f"the peer {self.name} ended {how}: {last}")

    def run(self, requests, concurrency: int) -> dict:
        """Run requests; {"times", "wall_s", "values"} as in peer_runner."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "result.json"
            job = {
                "requests": [(list(r.prompt_token_ids), r.output_len) for r in requests],
                "concurrency": concurrency,
                "result": str(path),
            }
            try:
                self.process.stdin.write(json.dumps(job) + "\n")
                self.process.stdin.flush()
            except OSError:
                pass  # it has died; waiting says why
            self._wait_for(peer_runner.DONE)
            return json.loads(path.read_text())

    def close(self) -> None:
        """End the process: at the end of its input, or after a while by a signal."""
        with suppress(OSError):  # a job that was never read
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(timeout=5)
        self.process.stdout.close()
        self.process.stderr.close()

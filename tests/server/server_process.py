"""A `vtoken serve` of the test's own: started, asked, stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from vtoken.server.terminal import read_state, state_url

START_TIMEOUT_S = 900.0  # three Pythons that import vLLM, on a busy machine
STOP_TIMEOUT_S = 90.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Server:
    """One server process with its children, in a process group of its own."""

    def __init__(self, log: Path, *options: str, vllm: tuple[str, ...] = (), api_key=None, **env):
        self.port, self.api_key = free_port(), api_key
        self.url = f"http://127.0.0.1:{self.port}"
        self.out, self.log = log.with_suffix(".out"), log
        command = [sys.executable, "-m", "vtoken_cli.app", "serve", "tiny-llama", *options]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--"]
        # The worker inside the engine's process: one import of vLLM less to wait for.
        command += ["--distributed-executor-backend", "uni", *vllm]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "VTOKEN_NO_REEXEC": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOG_STATS_INTERVAL": "1",
            "VLLM_NO_USAGE_STATS": "1",
            **env,
        }
        environment.pop("VLLM_LOGGING_LEVEL", None)
        with self.out.open("wb") as out, self.log.open("wb") as err:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=err, env=environment, start_new_session=True
            )

    def wait_until_up(self) -> Server:
        """Wait for /health; fail with the log's end when the process dies first."""
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"ended with {self.process.returncode}: {self.log_text()[-3000:]}"
                )
            if self.status("/health") == 200:
                return self
            time.sleep(0.5)
        raise RuntimeError(f"not up after {START_TIMEOUT_S} s: {self.log_text()[-3000:]}")

    def status(self, path: str, body: bytes | None = None, headers: dict | None = None) -> int:
        """HTTP status of a request; 0 where nobody listens."""
        return self.ask(path, body, headers)[0]

    def ask(self, path: str, body: bytes | None = None, headers: dict | None = None):
        """(status, headers, text) of a request; sends the API key unless `headers` are given."""
        if headers is None:
            headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        if body is not None:
            headers = {"Content-Type": "application/json", **headers}
        request = urllib.request.Request(self.url + path, data=body, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.headers, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read().decode()
        except OSError:
            return 0, {}, ""

    def engine(self) -> dict:
        """The first engine's part of /vtoken/state."""
        return read_state(state_url(self.url), self.api_key)["engines"][0]

    def wait_idle(self) -> dict:
        """The state once no request holds a block; the last one seen otherwise."""
        for _ in range(200):
            state = self.engine()
            if (
                not state["num_running"]
                and not state["num_waiting"]
                and not state["blocks"]["owned"]
            ):
                return state
            time.sleep(0.1)
        return state

    def client(self):
        import openai

        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=self.api_key or "none", max_retries=0, timeout=300
        )

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def children(self) -> list[int]:
        """Process ids of direct children."""
        pid = self.process.pid
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def child_named(self, name: str) -> int:
        """The process id of the child whose title holds `name`."""
        for pid in self.children():
            title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            if name in title:
                return pid
        raise AssertionError(f"no child is called {name}")

    def wait_exit(self, timeout_s: float = STOP_TIMEOUT_S) -> int | None:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> int | None:
        """SIGTERM; the exit status, None when it had to be killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.wait_exit()
        self.kill()
        return code

    def kill(self) -> None:
        """End whatever is left of the process group."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait(30)

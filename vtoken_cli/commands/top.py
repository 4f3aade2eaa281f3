"""`vtoken top URL`: a running server's pool and requests in a terminal."""

from __future__ import annotations

import os
import time

from vtoken_cli.command import command
from vtoken_cli.given import Run
from vtoken_cli.options import Opt
from vtoken_cli.parsers import duration_s, integer, text

DEFAULT_URL = "http://127.0.0.1:8000"

OWN = (
    Opt("url", positional=True, help=f"The server's address; {DEFAULT_URL} where none is given."),
    Opt("api_key", parse=text, metavar="KEY", default="$VLLM_API_KEY", help="The server's key."),
    Opt("interval_s", "--interval", parse=duration_s, metavar="TIME", default="1s",
        help="Time between two looks."),
    Opt("count", "-n --count", parse=integer, metavar="N", default="until Ctrl-C",
        help="Looks to take."),
)  # fmt: skip


@command(*OWN, config=False)
def top(run: Run) -> None:
    """Watch a server that vtoken serve started: its block pool, requests and counters.

    With --json, prints the state once.
    """
    from vtoken.server.terminal import read_state, render, state_url

    url = state_url(run.own.get("url") or DEFAULT_URL)
    key = run.own.get("api_key") or os.environ.get("VLLM_API_KEY")
    state = read_state(url, key)
    if run.out.as_json:
        run.out.result(state)
        return
    looks, interval_s = run.own.get("count"), run.own.get("interval_s", 1.0)
    console = run.out.console
    if looks == 1 or not console.is_terminal:
        run.out.print(render(state, width=console.width))
        return
    from rich.live import Live

    before, taken = None, 1
    with Live(render(state, width=console.width), console=console, screen=looks is None) as live:
        while looks is None or taken < looks:
            time.sleep(interval_s)
            before, state = state, read_state(url, key)
            live.update(render(state, before, console.width))
            taken += 1

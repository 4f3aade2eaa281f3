"""What `vtoken top` shows: `/vtoken/state` as Rich renderables, and the client that reads it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from vtoken.errors import ConfigError, EngineError

MAX_ROWS = 40
KINDS = ("live", "dead", "tail", "cached")
STYLES = {
    "live": "blue", "dead": "red", "tail": "bright_black", "cached": "cyan", "free": "grey30",
}  # fmt: skip
GLYPHS = {"live": "█", "dead": "▓", "tail": "░", "cached": "▒", "free": "·"}
TIMEOUT_S = 15.0


def state_url(address: str) -> str:
    """The state's address, from a server's.

    Raises:
        ConfigError: not an http address.
    """
    full = address if "://" in address else f"http://{address}"
    parts = urlsplit(full)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("URL", address, "a server's address, as in http://127.0.0.1:8000")
    path = parts.path.rstrip("/")
    for tail in ("/vtoken/state", "/vtoken", "/v1"):
        path = path.removesuffix(tail)
    return f"{parts.scheme}://{parts.netloc}{path}/vtoken/state"


def read_state(url: str, api_key: str | None = None) -> dict[str, Any]:
    """Ask a server once.

    Raises:
        ConfigError: the server wants a key, or has no status page.
        EngineError: no answer.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # A proxy's own localhost is another machine.
    proxies = [urllib.request.ProxyHandler({})] if is_local(urlsplit(url).hostname) else []
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.build_opener(*proxies).open(request, timeout=TIMEOUT_S) as answer:
            state = _printable(json.load(answer))
        if not isinstance(state, dict) or not isinstance(state.get("engines"), list):
            raise ConfigError("URL", url, "answered, but is no server of vtoken serve")
        return state
    except ConfigError:
        raise
    except urllib.error.HTTPError as error:
        if error.code == 401:
            allowed = "wants an API key: give --api-key, or set VLLM_API_KEY"
            raise ConfigError("URL", url, allowed) from None
        if error.code == 403:
            allowed = "shows its state to its own machine only: start it with -- --api-key KEY"
            raise ConfigError("URL", url, allowed) from None
        if error.code == 404:
            allowed = "has no status page: start it with vtoken serve, without --no-status-page"
            raise ConfigError("URL", url, allowed) from None
        raise EngineError(f"{url} answered {error.code}: {error.reason}") from None
    except (OSError, ValueError, RecursionError, HTTPException) as error:
        raise EngineError(f"no answer from {url}: {getattr(error, 'reason', error)}") from None


def is_local(host: str | None) -> bool:
    """Tell whether an address is this machine's own."""
    if host == "localhost":
        return True
    try:
        address = ip_address(host or "")
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _printable(value: Any) -> Any:
    """A JSON value without control characters: clients choose request ids, terminals obey them."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in value)
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list) else value


def render(state: dict[str, Any], before: dict[str, Any] | None = None, width: int = 100):
    """Everything that is shown.

    Args:
        before: the state one refresh ago: counters show their growth.
        width: columns of the terminal.
    """
    from rich.console import Group

    old = {e["engine"]: e for e in (before or {}).get("engines", ())}
    parts = []
    for engine in state["engines"]:
        parts += [
            _headline(state["model"], engine, old.get(engine["engine"])),
            pool_map(engine, max(16, width - 4)),
            _requests(engine),
        ]
    return Group(*parts)


def _headline(model: str, engine: dict, before: dict | None):
    from rich.markup import escape
    from rich.table import Table

    blocks, counters = engine["blocks"], engine["counters"]
    grid = Table.grid(padding=(0, 2))
    mode = ", ".join(filter(None, (engine["mode"], engine["policy"])))
    grid.add_row(
        f"[bold]{escape(model)}[/]  engine {engine['engine']}, mode {escape(mode)}",
        f"[bold]{engine['num_running']}[/] running, {engine['num_waiting']} waiting",
    )
    grid.add_row(
        f"blocks: {blocks['owned']} in use, {blocks['free']} free of {blocks['usable']} "
        f"({blocks['cached']} with a reusable prefix)",
        f"tokens: {engine['tokens']['live']:,} live, {engine['tokens']['dead']:,} dead "
        f"({100 * engine['fragmentation_ratio']:.1f}%)",
    )
    names = ("evicted_tokens", "moved_tokens", "released_blocks", "reused_slots", "preemptions")
    shown = [f"{n.replace('_', ' ')} {_grown(n, counters, before)}" for n in names if n in counters]
    for i in range(0, len(shown), 3):
        grid.add_row(", ".join(shown[i : i + 3]))
    return grid


def _grown(name: str, counters: dict, before: dict | None) -> str:
    growth = counters[name] - before["counters"].get(name, 0) if before else 0
    return f"{counters[name]:,}" + (f" [green](+{growth:,})[/]" if growth > 0 else "")


def pool_map(engine: dict, columns: int):
    """One glyph a cell, by what fills most of it; cells are merged until they fit 12 lines."""
    from rich.text import Text

    cells, N = engine["cells"], engine["block_size"]
    merge = max(1, -(-len(cells) // (columns * 12)))
    slots_per_cell, usable_slots = engine["blocks_per_cell"] * N, engine["blocks"]["usable"] * N
    text = Text(no_wrap=False)
    for i in range(0, len(cells), merge):
        group = cells[i : i + merge]
        amounts = dict(zip(KINDS, (sum(c[k] for c in group) for k in range(4)), strict=True))
        size = min(slots_per_cell * len(group), usable_slots - i * slots_per_cell)
        amounts["free"] = size - sum(amounts.values())
        kind = max(amounts, key=lambda k: amounts[k])
        text.append(GLYPHS[kind], STYLES[kind])
        if (i // merge + 1) % columns == 0:
            text.append("\n")
    text.append("\n")
    for kind in (*KINDS, "free"):
        text.append(f" {GLYPHS[kind]}", STYLES[kind])
        text.append(f" {kind} ", "dim")
    return text


def _requests(engine: dict):
    from rich.markup import escape
    from rich.table import Table

    columns = ("prompt_tokens", "output_tokens", "live", "dead", "blocks", "evicted", "moved",
               "preemptions")  # fmt: skip
    table = Table("request", box=None, header_style="dim", pad_edge=False)
    for name in columns:
        table.add_column(name.replace("_tokens", ""), justify="right")
    for row in engine["requests"][:MAX_ROWS]:
        table.add_row(escape(row["id"][:28]), *(f"{row[name]:,}" for name in columns))
    hidden = engine["num_running"] - min(MAX_ROWS, len(engine["requests"]))
    if hidden > 0:
        table.add_row(f"and {hidden} more")
    return table

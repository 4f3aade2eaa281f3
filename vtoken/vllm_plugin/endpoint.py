"""vLLM's endpoint plugin: the status page at /vtoken and its figures at /vtoken/state.

vLLM loads endpoint plugins only where `VLLM_PLUGINS` names them; `vtoken serve` does so, with
plain vLLM it is `VLLM_PLUGINS=vtoken vllm serve ...`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import os
import secrets
import time
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from vtoken.server.terminal import is_local

PAGE = Path(__file__).parent.parent / "server" / "page.html"
UTILITY = "vtoken_state"  # the method that `install_utility` gives to vLLM's EngineCore
OFF = "VTOKEN_STATUS_PAGE"
MAX_AGE_S = 0.25  # viewers share a snapshot of this age
TIMEOUT_S = 10.0  # a step may take that long on a busy CPU

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


def install_utility() -> None:
    """Give vLLM's EngineCore a method that describes its scheduler; may be called again."""
    from vllm.v1.engine.core import EngineCore

    if hasattr(EngineCore, UTILITY):
        return

    def vtoken_state(self) -> dict:
        from vtoken.server.snapshot import snapshot

        return snapshot(self.scheduler, getattr(self, "engine_index", 0))

    setattr(EngineCore, UTILITY, vtoken_state)


class StateReader:
    """Asks all engines for their state, once for all who look at the same time."""

    def __init__(self, engine_client, model_name: str) -> None:
        self.engine_client, self.model_name = engine_client, model_name
        self._lock = asyncio.Lock()
        self._state: dict | None = None
        self._read_at_s = 0.0

    async def read(self) -> dict:
        """The state of all engines.

        Raises:
            TimeoutError: an engine did not answer in time.
        """
        async with self._lock:
            if self._state is None or time.monotonic() - self._read_at_s > MAX_AGE_S:
                ask = self.engine_client.engine_core.call_utility_all_async(UTILITY)
                engines = await asyncio.wait_for(ask, TIMEOUT_S)
                self._state = {"model": self.model_name, "engines": engines}
                self._read_at_s = time.monotonic()
            return self._state


class StatusPage:
    """See `vllm.plugins.endpoint_plugins.interface.EndpointPlugin`."""

    name = "vtoken"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        if os.environ.get(OFF) == "0":
            return
        keys = _api_keys(app.state.args)

        async def page(request: Request) -> Response:
            return _refuse(request, keys) or HTMLResponse(
                PAGE.read_text(encoding="utf-8"), headers=HEADERS
            )

        async def state(request: Request) -> Response:
            refused = _refuse(request, keys)
            if refused is not None:
                return refused
            return await _answer(request.app.state.vtoken_reader)

        app.add_api_route("/vtoken", page, methods=["GET"], include_in_schema=False)
        app.add_api_route("/vtoken/state", state, methods=["GET"], include_in_schema=False)

    async def init_state(self, engine_client, state, args) -> None:
        names = args.served_model_name or [args.model]
        state.vtoken_reader = StateReader(engine_client, names[0])


async def _answer(reader: StateReader) -> Response:
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        return JSONResponse(await reader.read(), headers={"Cache-Control": "no-store"})
    except TimeoutError:
        return JSONResponse({"error": "the engine did not answer in time"}, status_code=503)
    except EngineDeadError:
        return JSONResponse({"error": "the engine has died"}, status_code=503)


def _api_keys(args) -> list[bytes]:
    """Digests of the keys that guard vLLM's own API, found as vLLM finds them."""
    from vllm import envs

    keys = [k for k in (getattr(args, "api_key", None) or [envs.VLLM_API_KEY]) if k]
    return [hashlib.sha256(k.encode()).digest() for k in keys]


def _refuse(request: Request, keys: list[bytes]) -> Response | None:
    """Status 401 when a key is set and not given, 403 from elsewhere when none is set.

    vLLM's own check of keys covers /v1 only, and a server listens on all interfaces. A browser
    sends the key as the password of Basic authentication, which it asks for itself.
    """
    if not keys and (request.client is None or is_local(request.client.host)):
        return None  # no client: a Unix socket
    if not keys:
        told = "only from the server's own machine, unless it is started with an API key"
        return JSONResponse({"error": told}, status_code=403)
    if _is_known(_given_digest(request.headers.get("authorization", "")), keys):
        return None
    return JSONResponse(
        {"error": "Unauthorized"},
        status_code=401,
        headers={"WWW-Authenticate": 'Basic realm="vToken: any user, the API key as password"'},
    )


def _is_known(digest: bytes | None, known: list[bytes]) -> bool:
    """Whether a digest is among those known, in constant time."""
    return sum(secrets.compare_digest(k, digest or b"") for k in known) > 0


def _given_digest(header: str) -> bytes | None:
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "basic":
        try:
            value = base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return None
    elif scheme.lower() != "bearer":
        return None
    return hashlib.sha256(value.encode()).digest()

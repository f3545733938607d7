"""API keys: one rule in one place, closed for every path but the one that says whether the process lives.

It stands before the router, so a route can't forget it, and paths that no route has are closed too.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api_keys import ApiKeys
from gateway.error_responses import error_response
from weir.core.errors import AuthenticationError

OPEN_PATH = "/health"
SCOPE_KEY = "weir.api_key"

REFUSAL = "a valid API key is needed: send it as `Authorization: Bearer KEY`"


class AuthMiddleware:
    """Lets a request with a right key through, and puts the key into the scope."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._keys = ApiKeys(api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        key = self._keys.find([value for name, value in scope["headers"] if name == b"authorization"])
        if key is None and scope["path"] != OPEN_PATH:
            await _refuse(scope, receive, send)
            return
        await self._app({**scope, SCOPE_KEY: key or ""}, receive, send)


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    await error_response(AuthenticationError(REFUSAL))(scope, receive, send)

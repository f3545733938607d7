"""API keys: one rule in one place, closed for every path but the one that says whether the process lives.

It stands before the router, so a route can't forget it, and paths that no route has are closed too.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.error_responses import error_response
from weir.core.errors import AuthenticationError

OPEN_PATH = "/health"
SCOPE_KEY = "weir.api_key"

_SCHEME = b"bearer"


class AuthMiddleware:
    """Lets a request with a right key through, and puts the key into the scope.

    Args:
        api_keys: any of them opens; with none every request passes and its key is empty.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._digests = {sha256(key.encode()).digest(): key for key in api_keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not self._digests:
            await self._app({**scope, SCOPE_KEY: ""}, receive, send)
            return
        key = self._find_key(scope)
        if key is None and scope.get("path") != OPEN_PATH:
            await _refuse(scope, receive, send)
            return
        await self._app({**scope, SCOPE_KEY: key or ""}, receive, send)

    def _find_key(self, scope: Scope) -> str | None:
        """The known key in the one Authorization header; compared without a hint of how much of it was right."""
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(values) != 1:
            return None
        scheme, _, given = values[0].strip().partition(b" ")
        if scheme.lower() != _SCHEME:
            return None
        digest = sha256(given.strip()).digest()
        found: str | None = None
        for known, key in self._digests.items():
            if hmac.compare_digest(known, digest):
                found = key
        return found


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    error = AuthenticationError("a valid API key is needed: send it as `Authorization: Bearer KEY`")
    await error_response(error)(scope, receive, send)

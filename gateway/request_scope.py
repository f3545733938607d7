"""What surrounds every request: its ids, its trace, and the last net under faults of our own.

A pure ASGI middleware: it passes messages through as they come, so streams and disconnects work as without it.
"""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any

from opentelemetry import context as trace_context
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import auth, caller
from gateway.caller import Caller
from gateway.error_responses import INTERNAL_ERROR, error_response
from gateway.openai_api import MAX_LABEL_CHARS
from weir.runtime import logs
from weir.runtime.tracing import extract

logger = logging.getLogger(__name__)

BODY_SEND_KEY = "weir.body_send"
"""In the scope: the server's own `send`, for the many body messages of a stream. Headers take the way through the
middlewares, which look at nothing else."""

REQUEST_ID_HEADER = b"x-request-id"
TRACE_HEADER = b"traceparent"


class RequestScopeMiddleware:
    """Gives each HTTP request an id for the log, repeats the client's own in the answer, catches what nobody did."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        label = _label(headers.get(REQUEST_ID_HEADER, b""))
        answer = _Answer(send, label)
        scope[caller.SCOPE_KEY] = Caller(api_key=scope.get(auth.SCOPE_KEY, ""), label=label, arrived_s=time.monotonic())
        scope[BODY_SEND_KEY] = send
        log_token = logs.request_id.set(f"req-{uuid.uuid4().hex}")
        trace_token = trace_context.attach(extract(_trace_headers(scope))) if TRACE_HEADER in headers else None
        try:
            await self._app(scope, receive, answer.send)
        except ClientDisconnect:
            logger.info("the client left while it sent its request")
        except Exception:
            logger.exception("%s %s failed for a fault of this gateway", scope["method"], scope["path"])
            if answer.is_started:
                raise
            await error_response(INTERNAL_ERROR)(scope, receive, answer.send)
        finally:
            if trace_token is not None:
                trace_context.detach(trace_token)
            logs.request_id.reset(log_token)


class _Answer:
    """Adds an id to the header of an answer: the client's own, else the one that the log and the cluster know."""

    def __init__(self, send: Send, label: str) -> None:
        self._send = send
        self._label = label
        self.is_started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.is_started = True
            request_id = (self._label or logs.request_id.get()).encode("ascii")
            headers: list[Any] = [*message.get("headers", ()), (REQUEST_ID_HEADER, request_id)]
            message = {**message, "headers": headers}
        await self._send(message)


def _label(raw: bytes) -> str:
    """The client's id if it is printable ASCII of a bearable length, else empty."""
    try:
        label = raw.decode("ascii").strip()
    except UnicodeDecodeError:
        return ""
    return label if label.isprintable() and len(label) <= MAX_LABEL_CHARS else ""


def _trace_headers(scope: Scope) -> dict[str, str]:
    names = (b"traceparent", b"tracestate")
    return {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in names}

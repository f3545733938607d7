"""The one map from errors to HTTP answers, in OpenAI's shape.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

A failure of a hop also names it (`hop`). No answer ever holds a stack trace.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from weir.core import errors
from weir.core.errors import WeirError

logger = logging.getLogger(__name__)

STATUS_OF_ERROR: dict[type[WeirError], HTTPStatus] = {
    errors.WeirError: HTTPStatus.INTERNAL_SERVER_ERROR,
    errors.InvalidRequestError: HTTPStatus.BAD_REQUEST,
    errors.ContextLengthError: HTTPStatus.BAD_REQUEST,
    errors.CapacityExceededError: HTTPStatus.BAD_REQUEST,
    errors.UnsupportedFeatureError: HTTPStatus.BAD_REQUEST,
    errors.AuthenticationError: HTTPStatus.UNAUTHORIZED,
    errors.NotFoundError: HTTPStatus.NOT_FOUND,
    errors.ModelNotFoundError: HTTPStatus.NOT_FOUND,
    errors.RequestNotFoundError: HTTPStatus.NOT_FOUND,
    errors.ConflictError: HTTPStatus.CONFLICT,
    errors.PayloadTooLargeError: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    errors.OverloadedError: HTTPStatus.TOO_MANY_REQUESTS,
    errors.UnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.NoWorkerError: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.DeadlineExceededError: HTTPStatus.GATEWAY_TIMEOUT,
    errors.RequestCancelledError: HTTPStatus.CONFLICT,
    errors.HopFailedError: HTTPStatus.BAD_GATEWAY,
    errors.WorkerLostError: HTTPStatus.BAD_GATEWAY,
    errors.HandoffError: HTTPStatus.BAD_GATEWAY,
    errors.HandoffLostError: HTTPStatus.BAD_GATEWAY,
    errors.WrongIncarnationError: HTTPStatus.BAD_GATEWAY,
    errors.FingerprintMismatchError: HTTPStatus.BAD_GATEWAY,
    errors.TransferProtocolError: HTTPStatus.BAD_GATEWAY,
    errors.ConfigError: HTTPStatus.INTERNAL_SERVER_ERROR,
    errors.ModelLoadError: HTTPStatus.INTERNAL_SERVER_ERROR,
}
"""Every class of the tree by itself: a new one without a row fails a test, it does not silently become its parent's."""

_TYPE_OF_STATUS = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}

INTERNAL_ERROR = WeirError("the gateway failed on this request; its log says why", hop="gateway")
"""What a client is told of a fault of ours."""


def status_of(error: WeirError) -> HTTPStatus:
    """The HTTP status of an error."""
    return STATUS_OF_ERROR[type(error)]


def error_object(error: WeirError) -> dict[str, Any]:
    """The error in OpenAI's shape, for a body or for an event in mid-stream."""
    status = status_of(error)
    kind = _TYPE_OF_STATUS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return _shape(error.message, kind=kind, param=error.param, code=error.code, hop=error.hop)


def error_response(error: WeirError) -> Response:
    """The whole answer, with `Retry-After` where the error knows when to come back."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, errors.AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, errors.PayloadTooLargeError):
        headers["connection"] = "close"
    return _json_response(error_object(error), status_of(error), headers)


def refusal_of_status(
    status: HTTPStatus, message: str, *, headers: Mapping[str, str] | None = None, closes: bool = False
) -> Response:
    """What HTTP itself refuses; the code is the name of the status.

    Args:
        closes: the connection can't be used any more.
    """
    kind = "invalid_request_error" if status < 500 else "server_error"
    own = {"connection": "close"} if closes else {}
    return _json_response(_shape(message, kind=kind, code=status.name.lower()), status, {**(headers or {}), **own})


def install_error_handlers(app: FastAPI) -> None:
    """Give every error that a route or the router raises the same shape."""
    app.add_exception_handler(WeirError, _on_weir_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)


async def _on_weir_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, WeirError)
    if status_of(exc) >= 500:
        logger.warning("request failed at hop %s: %s: %s", exc.hop, type(exc).__name__, exc.message)
    return error_response(exc)


async def _on_http_exception(request: Request, exc: Exception) -> Response:
    """What Starlette itself refuses: no such route, wrong method, a wrong content type."""
    assert isinstance(exc, HTTPException)
    status = HTTPStatus(exc.status_code)
    where = f"{request.method} {request.url.path}"
    if status is HTTPStatus.NOT_FOUND:
        body = _shape(f"{where}: no such route", kind="not_found_error", code="route_not_found")
    elif status is HTTPStatus.METHOD_NOT_ALLOWED:
        body = _shape(f"{where}: method not allowed", kind="invalid_request_error", code="method_not_allowed")
    else:
        return refusal_of_status(status, str(exc.detail), headers=exc.headers)
    return _json_response(body, status, exc.headers or {})


async def _on_validation_error(request: Request, exc: Exception) -> Response:
    """Path and query parameters; bodies are checked by `request_body`."""
    assert isinstance(exc, RequestValidationError)
    first = exc.errors()[0]
    name = ".".join(str(part) for part in first["loc"][1:])
    body = _shape(f"{name}: {first['msg']}", kind="invalid_request_error", param=name, code="invalid_request")
    return _json_response(body, HTTPStatus.BAD_REQUEST, {})


def _shape(
    message: str, *, kind: str, param: str | None = None, code: str | None = None, hop: str | None = None
) -> dict[str, Any]:
    fields: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    if hop is not None:
        fields["hop"] = hop
    return {"error": fields}


def _json_response(body: Mapping[str, Any], status: HTTPStatus, headers: Mapping[str, str]) -> Response:
    return Response(json.dumps(body), status_code=status, headers=dict(headers), media_type="application/json")

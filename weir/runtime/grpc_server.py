"""A gRPC server with what every one of Weir's needs: errors by table, context, health, reflection, keep-alive."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, NoReturn, Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from opentelemetry.context import attach

from weir.core.errors import ConfigError, WeirError, find_error
from weir.runtime.grpc_client import KEEPALIVE_TIMEOUT_MS, MAX_MESSAGE_BYTES, REQUEST_ID_KEY
from weir.runtime.grpc_status import error_metadata, shorten, status_of
from weir.runtime.logs import request_id
from weir.runtime.tracing import extract

logger = logging.getLogger(__name__)

MIN_PING_INTERVAL_MS = 5_000
"""Clients ping every 10 s, also without calls; a server that allows only five minutes answers with GOAWAY."""


class GrpcServer:
    """Serves from entry to exit of its `async with`; calls still running at exit get `grace_s`, then are cancelled.

    Args:
        port: 0 for a free one; `address` has the real one.
        add_services: each adds one servicer, as the generated `add_XServicer_to_server` does.
        service_names: full names, for reflection and for health by service.
        tls: None serves plain text.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        add_services: Sequence[Callable[[grpc.aio.Server], None]],
        service_names: Sequence[str] = (),
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        tls: grpc.ServerCredentials | None = None,
        grace_s: float = 1.0,
    ) -> None:
        self._host = host
        self._port = port
        self._add_services = tuple(add_services)
        self._service_names = tuple(service_names)
        self._max_message_bytes = max_message_bytes
        self._tls = tls
        self._grace_s = grace_s
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        """host:port it listens on."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._port}"

    async def __aenter__(self) -> Self:
        """Raises ConfigError when the address is taken."""
        server = grpc.aio.server(
            interceptors=(_ContextInterceptor(), _ErrorInterceptor()),
            options=(
                ("grpc.max_send_message_length", self._max_message_bytes),
                ("grpc.max_receive_message_length", self._max_message_bytes),
                ("grpc.so_reuseport", 0),  # a port that is taken is an error, not a second listener
                ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
                ("grpc.http2.max_pings_without_data", 0),
            ),
        )
        for add_service in self._add_services:
            add_service(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        await self.set_serving(False)
        reflection.enable_server_reflection(
            (*self._service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        try:
            if self._tls is None:
                self._port = server.add_insecure_port(self.address)
            else:
                self._port = server.add_secure_port(self.address, self._tls)
        except RuntimeError as exc:
            raise ConfigError(f"port: cannot listen on {self.address}; is it in use?", param="port") from exc
        await server.start()
        self._server = server
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._server is not None:
            await self._health.enter_graceful_shutdown()
            await self._server.stop(self._grace_s)

    async def set_serving(self, is_serving: bool) -> None:
        """What grpc.health.v1 answers, for the server and each of its services; not serving until told."""
        status = health_pb2.HealthCheckResponse
        for name in ("", *self._service_names):
            await self._health.set(name, status.SERVING if is_serving else status.NOT_SERVING)


class _ContextInterceptor(grpc.aio.ServerInterceptor):
    """Puts the caller's request id and trace context around the call; each call runs in a task of its own."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        metadata = tuple(handler_call_details.invocation_metadata or ())
        for key, value in metadata:
            if key == REQUEST_ID_KEY and isinstance(value, str):
                request_id.set(value)
        attach(extract(metadata))
        return await continuation(handler_call_details)


class _ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls that raise with the status of the table, and the error itself in the trailing metadata."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        streaming = (handler.request_streaming, handler.response_streaming)
        behavior = getattr(handler, "_".join("stream" if streams else "unary" for streams in streaming))
        wrapped = _guard_stream(behavior, method) if handler.response_streaming else _guard_unary(behavior, method)
        return _MAKERS[streaming](wrapped, handler.request_deserializer, handler.response_serializer)


_MAKERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _guard_unary(behavior: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await behavior(request, context)
        except Exception as exc:  # noqa: BLE001 - the edge: every failure becomes a status
            await _abort(context, exc, method)

    return guarded


def _guard_stream(behavior: Callable[..., Any], method: str) -> Callable[..., AsyncIterator[Any]]:
    """Servicers write either as async generators or with `context.write` in a coroutine."""

    async def guarded(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            answer = behavior(request, context)
            if hasattr(answer, "__aiter__"):
                async with aclosing(answer):
                    async for message in answer:
                        yield message
            else:
                await answer
        except Exception as exc:  # noqa: BLE001 - the edge: every failure becomes a status
            await _abort(context, exc, method)

    return guarded


async def _abort(context: grpc.aio.ServicerContext, exc: Exception, method: str) -> NoReturn:
    """End the call; raises what gRPC uses for that."""
    if isinstance(exc, grpc.aio.AbortError):
        raise exc
    error = find_error(exc, WeirError)
    if error is None:
        logger.error("%s failed", method, exc_info=exc)
        error = WeirError("internal error")
    await context.abort(status_of(error), shorten(error.message), trailing_metadata=error_metadata(error))
    raise AssertionError("abort returned")

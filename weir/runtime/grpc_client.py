"""Calling Weir's gRPC services: channels, metadata, and errors translated once, here."""

from __future__ import annotations

import math

import grpc

from weir.core import errors
from weir.core.deadline import Deadline
from weir.core.errors import WeirError
from weir.runtime.grpc_status import error_from_metadata
from weir.runtime.logs import request_id
from weir.runtime.tracing import inject

REQUEST_ID_KEY = "x-request-id"
MAX_MESSAGE_BYTES = 64 * 2**20

KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000

_CLASS_BY_STATUS: dict[grpc.StatusCode, type[WeirError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: errors.AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: errors.AuthenticationError,
    grpc.StatusCode.NOT_FOUND: errors.NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: errors.ConflictError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.ConflictError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceededError,
    # Without an error of ours these come from the transport: the peer went away, or shuts down and cancels its calls.
    grpc.StatusCode.UNAVAILABLE: errors.WorkerLostError,
    grpc.StatusCode.CANCELLED: errors.WorkerLostError,
}


def open_channel(address: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Channel:
    """A channel to `host:port` that notices a dead peer within 15 s and comes back within 2 s.

    Connects at the first call. The caller closes it.
    """
    return grpc.aio.insecure_channel(
        address,
        options=(
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2_000),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
        ),
    )


def call_metadata(label: str | None = None) -> tuple[tuple[str, str], ...]:
    """Metadata of an outgoing call: the request id (default: the current task's) and the trace context."""
    carrier: dict[str, str] = {}
    inject(carrier)
    name = request_id.get() if label is None else label
    if name:
        carrier[REQUEST_ID_KEY] = name
    return tuple(carrier.items())


def call_timeout_s(deadline: Deadline) -> float | None:
    """The `timeout=` of a call: gRPC carries it to the server as the time that remains; None for no deadline."""
    remaining_s = deadline.remaining_s()
    return None if math.isinf(remaining_s) else remaining_s


def translate(error: grpc.aio.AioRpcError, *, hop: str) -> WeirError:
    """What a failed call means in Weir's tree; raise it `from error`.

    An error that a Weir server sent comes back as its own class, with its own hop if it has one.
    """
    sent = error_from_metadata(error.trailing_metadata())
    if sent is not None:
        sent.hop = sent.hop or hop
        return sent
    details = error.details() or error.code().name
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        is_size = "message larger than max" in details
        return (errors.PayloadTooLargeError if is_size else errors.OverloadedError)(details, hop=hop)
    return _CLASS_BY_STATUS.get(error.code(), errors.HopFailedError)(f"{hop}: {details}", hop=hop)

"""How an error of Weir's tree travels over gRPC, and comes back as the same class.

The status code is for foreign clients; Weir's own read the trailing metadata `weir-error-bin`, which holds the whole
error as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import grpc

from weir.core import errors
from weir.core.errors import WeirError, error_from_dict

ERROR_KEY = "weir-error-bin"

MAX_MESSAGE_CHARS = 1024
"""Longer messages are cut: gRPC allows 8 KiB of metadata by default, and percent-encoding triples a character."""

STATUS_BY_CLASS: dict[type[WeirError], grpc.StatusCode] = {
    errors.WeirError: grpc.StatusCode.INTERNAL,
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ContextLengthError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.CapacityExceededError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnsupportedFeatureError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.AuthenticationError: grpc.StatusCode.UNAUTHENTICATED,
    errors.NotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.ModelNotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.RequestNotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.ConflictError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.PayloadTooLargeError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.NoWorkerError: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceededError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.RequestCancelledError: grpc.StatusCode.CANCELLED,
    errors.HopFailedError: grpc.StatusCode.ABORTED,
    errors.WorkerLostError: grpc.StatusCode.UNAVAILABLE,
    errors.HandoffError: grpc.StatusCode.ABORTED,
    errors.HandoffLostError: grpc.StatusCode.ABORTED,
    errors.WrongIncarnationError: grpc.StatusCode.ABORTED,
    errors.FingerprintMismatchError: grpc.StatusCode.ABORTED,
    errors.TransferProtocolError: grpc.StatusCode.ABORTED,
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ModelLoadError: grpc.StatusCode.FAILED_PRECONDITION,
}


def status_of(error: WeirError) -> grpc.StatusCode:
    return STATUS_BY_CLASS[type(error)]


def shorten(message: str) -> str:
    """At most `MAX_MESSAGE_CHARS` characters of a message."""
    return message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 4] + " ..."


def error_metadata(error: WeirError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata that carries `error`."""
    fields = error.to_dict()
    fields["message"] = shorten(error.message)
    return ((ERROR_KEY, json.dumps(fields, ensure_ascii=False).encode()),)


def error_from_metadata(metadata: Iterable[tuple[str, Any]] | None) -> WeirError | None:
    """The error that `error_metadata` wrote, or None where a foreign server or the transport ended the call."""
    for key, value in metadata or ():
        if key == ERROR_KEY:
            try:
                fields = json.loads(value)
            except ValueError:
                return None
            return error_from_dict(fields) if isinstance(fields, dict) else None
    return None

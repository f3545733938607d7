"""Every failure Weir names, as one tree.

    WeirError
    ├── InvalidRequestError            the caller's input; nothing was started
    │   ├── ContextLengthError         prompt plus asked tokens exceed the model's context
    │   ├── CapacityExceededError      can never fit the KV pool of the worker
    │   └── UnsupportedFeatureError    a field or value that is refused by name
    ├── AuthenticationError            no key, or a wrong one
    ├── NotFoundError
    │   ├── ModelNotFoundError
    │   └── RequestNotFoundError
    ├── ConflictError                  an id is in use, or a state does not allow the move
    ├── PayloadTooLargeError
    ├── OverloadedError                admission is full; retry_after_s says when to come back
    ├── UnavailableError               no worker, draining, or a dependency is away
    │   └── NoWorkerError              no worker of a role serves the model
    ├── DeadlineExceededError
    ├── RequestCancelledError          the caller left
    ├── HopFailedError                 a hop (gateway, prefill, transfer, decode) failed in mid-request
    │   ├── WorkerLostError            the process behind a hop is gone
    │   └── HandoffError               the KV of a sequence cannot be moved
    │       ├── HandoffLostError       the source no longer has it: expired, released, used up or unknown
    │       ├── WrongIncarnationError  named a start of a worker process that is over
    │       ├── FingerprintMismatchError  two workers' KV layouts differ
    │       └── TransferProtocolError  bytes that no correct peer sends
    ├── ConfigError                    a setting; raised before anything loads
    └── ModelLoadError                 a checkpoint; names the file or the tensor

Classes know no status code: `gateway.error_responses` and `weir.runtime.grpc_status` map them, and tests hold both maps
complete. `to_dict`/`error_from_dict` carry an error between processes without losing its class.
"""

from __future__ import annotations

from typing import Any, ClassVar


class WeirError(Exception):
    """Root of the tree.

    Args:
        message: for the person who reads it; names the field, the value and the limit where there are any.
        param: the request field or setting at fault.
        hop: where in the request's walk it happened: gateway, prefill, transfer or decode.
        retry_after_s: seconds after which the same call may succeed.
    """

    code: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        hop: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.hop = hop
        self.retry_after_s = retry_after_s

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form from which `error_from_dict` rebuilds the same class."""
        fields = {
            "error": type(self).__name__,
            "message": self.message,
            "param": self.param,
            "hop": self.hop,
            "retry_after_s": self.retry_after_s,
        }
        return {name: value for name, value in fields.items() if value is not None}


class InvalidRequestError(WeirError):
    code = "invalid_request"


class ContextLengthError(InvalidRequestError):
    code = "context_length_exceeded"


class CapacityExceededError(InvalidRequestError):
    code = "kv_capacity_exceeded"


class UnsupportedFeatureError(InvalidRequestError):
    code = "unsupported_feature"


class AuthenticationError(WeirError):
    code = "invalid_api_key"


class NotFoundError(WeirError):
    code = "not_found"


class ModelNotFoundError(NotFoundError):
    code = "model_not_found"


class RequestNotFoundError(NotFoundError):
    code = "request_not_found"


class ConflictError(WeirError):
    code = "conflict"


class PayloadTooLargeError(WeirError):
    code = "payload_too_large"


class OverloadedError(WeirError):
    code = "overloaded"


class UnavailableError(WeirError):
    code = "unavailable"


class NoWorkerError(UnavailableError):
    code = "no_worker"


class DeadlineExceededError(WeirError):
    code = "deadline_exceeded"


class RequestCancelledError(WeirError):
    code = "cancelled"


class HopFailedError(WeirError):
    code = "hop_failed"


class WorkerLostError(HopFailedError):
    code = "worker_lost"


class HandoffError(HopFailedError):
    code = "handoff_failed"


class HandoffLostError(HandoffError):
    code = "handoff_lost"


class WrongIncarnationError(HandoffError):
    code = "wrong_incarnation"


class FingerprintMismatchError(HandoffError):
    code = "fingerprint_mismatch"


class TransferProtocolError(HandoffError):
    code = "transfer_protocol_error"


class ConfigError(WeirError):
    code = "invalid_configuration"


class ModelLoadError(WeirError):
    code = "model_load_failed"


def all_error_classes() -> tuple[type[WeirError], ...]:
    """Every class of the tree, root first."""
    found: list[type[WeirError]] = [WeirError]
    for cls in found:
        found.extend(cls.__subclasses__())
    return tuple(found)


def error_from_dict(fields: dict[str, Any]) -> WeirError:
    """Rebuild what `to_dict` wrote. A class this version does not know becomes its root, message kept."""
    by_name = {cls.__name__: cls for cls in all_error_classes()}
    cls = by_name.get(str(fields.get("error")), WeirError)
    return cls(
        str(fields.get("message", "")),
        param=fields.get("param"),
        hop=fields.get("hop"),
        retry_after_s=fields.get("retry_after_s"),
    )


def find_error(exc: BaseException, *classes: type[WeirError]) -> WeirError | None:
    """The first error of one of `classes` in `exc`, which may be a (nested) group of a TaskGroup; or None."""
    if isinstance(exc, BaseExceptionGroup):
        found = (find_error(inner, *classes) for inner in exc.exceptions)
        return next((error for error in found if error is not None), None)
    return exc if isinstance(exc, classes) else None

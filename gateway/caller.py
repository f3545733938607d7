"""Who made a request, as far as the gateway knows."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Scope

SCOPE_KEY = "weir.caller"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The maker of one HTTP request.

    Attributes:
        api_key: the key it came with; empty when none is asked for.
        label: the client's own id of the request (`X-Request-Id`), not unique; empty without one.
        arrived_s: when the request reached the gateway, on the monotonic clock.
    """

    api_key: str
    label: str
    arrived_s: float


def caller_of(scope: Scope) -> Caller:
    """The caller that `RequestScopeMiddleware` put into the scope."""
    caller = scope[SCOPE_KEY]
    assert isinstance(caller, Caller)
    return caller

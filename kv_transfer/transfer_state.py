"""The values and the states of a hand-off that both of its ends and the services share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from weir.core.request import FirstToken


class SourceState(Enum):
    """A hand-off on the prefill worker."""

    OFFERED = "offered"
    """Held; nobody fetches."""
    STREAMING = "streaming"
    """A decode worker fetches and has not been sent everything."""
    SENT = "sent"
    """Everything is sent, the seal too; COMMIT or NACK comes next."""
    ENDING = "ending"
    """The hold is over, but bytes of it are still in flight."""
    ENDED = "ended"
    """The blocks are reusable."""


class SinkState(Enum):
    """A hand-off on the decode worker."""

    IDLE = "idle"
    """No connection carries it."""
    REQUESTED = "requested"
    """FETCH is sent, nothing has come."""
    STAGING = "staging"
    """Blocks came before the sink was there; they wait, within the first credit."""
    RECEIVING = "receiving"
    """Blocks go to the sink."""
    CONFIRMING = "confirming"
    """All that was pulled is in place and COMMIT is sent; COMMITTED says whether it was the source's until then."""
    COMMITTED = "committed"
    """All is verified and in place, COMMIT is sent."""
    FAILED = "failed"
    """It ended without the blocks; nobody writes to the sink any more."""


class EndReason(Enum):
    """Why a hold ended."""

    COMMITTED = "committed"
    RELEASED = "released"
    EXPIRED = "expired"
    ABORTED = "aborted"
    FAILED = "failed"
    SUPERSEDED = "superseded"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """What is known of a hand-off once its prompt is computed.

    Attributes:
        num_tokens: tokens whose K and V are in the source's blocks; they fill `ceil(num_tokens / block_size)` blocks.
        num_cached_tokens: those of them that the source's prefix cache gave.
    """

    num_tokens: int
    first_token: FirstToken
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A hand-off that has arrived.

    Attributes:
        size_bytes: payload bytes that crossed the wire, those sent again included.
        transfer_s: from the call of fetch to the commit.
        exposed_s: from the end of the computation on the prefill worker to the commit, but for one network latency.
    """

    seal: Seal
    size_bytes: int
    transfer_s: float
    exposed_s: float

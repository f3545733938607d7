"""What passes between a session and its gateway, as values: what is opened, and the news of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weir.core.errors import WeirError
from weir.core.request import HandoffKey, HandoffTimings, SequenceRequest, TokenDelta, TokenLogprobs
from weir.core.worker import Incarnation, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffSource:
    """The prefill worker that serves the blocks of a sequence."""

    worker_id: WorkerId
    incarnation: Incarnation
    transfer_address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSequence:
    """One sequence that a gateway asks for.

    Attributes:
        stream_id: the gateway's name for it, unique in the session.
        source: None where this worker computes the prompt itself.
        incarnation: of the decode worker that is meant.
        trace_context: W3C headers of the request's span.
    """

    stream_id: int
    key: HandoffKey
    request: SequenceRequest
    source: HandoffSource | None
    incarnation: Incarnation
    trace_context: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The worker has taken the sequence: `num_cached_tokens` are here, `num_claimed_blocks` are promised."""

    stream_id: int
    num_cached_tokens: int
    num_claimed_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Denied:
    """The pool is full now; the stream has ended."""

    stream_id: int
    retry_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """New tokens; the stream ends with the delta that has a finish reason.

    Attributes:
        timings: with the first delta that has a token made here, after a hand-off.
    """

    stream_id: int
    delta: TokenDelta
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    timings: HandoffTimings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The stream has ended without its tokens; the error names its hop."""

    stream_id: int
    error: WeirError


SessionEvent = Granted | Denied | Tokens | Failed

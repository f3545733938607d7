"""What the pipeline asks of workers: the seam behind which gRPC stands, or a fake.

Calls that only take something back (`release`, `cancel`) never wait and never fail, so that they can stand in any
`finally`; everything else is a coroutine with a deadline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gateway.fleet import Fleet
from weir.core.errors import WeirError
from weir.core.request import (
    FirstToken,
    HandoffKey,
    HandoffTimings,
    RequestId,
    SequenceRequest,
    TokenDelta,
    TokenLogprobs,
)
from weir.core.worker import Incarnation, WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChoice:
    """One choice of a prompt that a prefill worker computes, and the decode worker its KV is for."""

    choice_index: int
    key: HandoffKey
    decode_incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """A prompt, computed: one first token for each choice, in any order.

    Attributes:
        num_cached_tokens: prompt tokens that a prefix hit gave.
        prompt_logprobs: for prompt positions 1 and up, if asked for.
        queue_s, prefill_s: how long it waited there, and how long it was computed.
    """

    first_tokens: tuple[FirstToken, ...]
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    queue_s: float = 0.0
    prefill_s: float = 0.0


class PrefillClient(Protocol):
    """One incarnation of a prefill worker."""

    @property
    def info(self) -> WorkerInfo: ...

    async def prefill(self, request: SequenceRequest, choices: tuple[PrefillChoice, ...]) -> PrefillResult:
        """Compute a prompt once for all of its choices; the release of all of them stops the work at its next chunk.

        Cancelling ends the wait alone. Raises WeirError; the hop is prefill unless the worker said otherwise.
        """
        ...

    async def rebind(self, key: HandoffKey, decode_incarnation: Incarnation) -> None:
        """Bind a hold to another decode worker. Raises HandoffLostError, or HopFailedError for a worker lost."""
        ...

    async def renew(self, keys: tuple[HandoffKey, ...]) -> tuple[HandoffKey, ...]:
        """Keep holds for another lease; returns those that are gone already."""
        ...

    def release(self, keys: tuple[HandoffKey, ...], reason: str) -> None:
        """End holds by name, whatever their state; sent in the background, within a time-out of its own."""
        ...

    async def abort(self, request_id: RequestId) -> int:
        """Abort everything of a request there, at any epoch; returns how many sequences that ended."""
        ...

    async def reset_prefix_cache(self) -> bool:
        """Forget the prefix cache; False while blocks of it are in use."""
        ...


class DecodeListener(Protocol):
    """Hears of one sequence on a decode worker. Called from the session's reader: must return at once."""

    def on_granted(self) -> None: ...

    def on_denied(self, retry_after_s: float) -> None: ...

    def on_delta(
        self, delta: TokenDelta, prompt_logprobs: tuple[TokenLogprobs, ...], timings: HandoffTimings | None
    ) -> None: ...

    def on_failed(self, error: WeirError) -> None: ...


class OpenSequence(Protocol):
    """One sequence on a decode worker, until its last event."""

    def cancel(self) -> None:
        """End it there; its listener hears nothing more. Does nothing when it has ended already."""
        ...


class DecodeClient(Protocol):
    """The session with one incarnation of a decode worker."""

    @property
    def info(self) -> WorkerInfo: ...

    def open(
        self, request: SequenceRequest, key: HandoffKey, *, source: WorkerInfo | None, listener: DecodeListener
    ) -> OpenSequence:
        """Ask for a sequence; `source` is the prefill worker that computes its prompt, None to compute it there.

        Raises WorkerLostError when there is no session now. Whatever comes later, the listener hears.
        """
        ...

    async def abort(self, request_id: RequestId) -> int:
        """Abort everything of a request there, at any epoch; returns how many sequences that ended."""
        ...

    async def reset_prefix_cache(self) -> bool:
        """Forget the prefix cache; False while blocks of it are in use."""
        ...


class WorkerClients(Protocol):
    """A client for each worker that can be reached now."""

    @property
    def fleet(self) -> Fleet:
        """The workers that are registered and connected."""
        ...

    def get_prefill(self, worker: WorkerInfo) -> PrefillClient:
        """Raises WorkerLostError for one that has left."""
        ...

    def get_decode(self, worker: WorkerInfo) -> DecodeClient:
        """Raises WorkerLostError for one that has left."""
        ...

    async def wait_for_change(self) -> None:
        """Return once `fleet` is another one than at the call."""
        ...

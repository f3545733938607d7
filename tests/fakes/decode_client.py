"""A decode worker as the pipeline sees it, played by the test: it grants, denies and makes tokens when told to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from gateway.worker_protocols import DecodeListener
from weir.core.errors import WeirError, WorkerLostError
from weir.core.request import (
    FinishReason,
    HandoffKey,
    HandoffTimings,
    RequestId,
    SequenceRequest,
    TokenDelta,
    TokenLogprobs,
)
from weir.core.worker import WorkerInfo


@dataclass(eq=False)
class FakeSequence:
    """One sequence that the pipeline opened."""

    request: SequenceRequest
    key: HandoffKey
    source: WorkerInfo | None
    listener: DecodeListener
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_cancelled(self) -> bool:
        return self.cancelled.is_set()

    def cancel(self) -> None:
        self.cancelled.set()

    def grant(self) -> None:
        self.listener.on_granted()

    def deny(self, retry_after_s: float = 0.001) -> None:
        self.listener.on_denied(retry_after_s)

    def tokens(
        self,
        first_index: int,
        *token_ids: int,
        finish: FinishReason | None = None,
        num_cached_tokens: int = 0,
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
        timings: HandoffTimings | None = None,
    ) -> None:
        delta = TokenDelta(
            first_index=first_index,
            token_ids=token_ids,
            finish_reason=finish,
            num_cached_tokens=num_cached_tokens,
        )
        self.listener.on_delta(delta, prompt_logprobs, timings)

    def fail(self, error: WeirError) -> None:
        self.listener.on_failed(error)


@dataclass(eq=False)
class FakeDecodeClient:
    info: WorkerInfo
    is_connected: bool = True
    sequences: list[FakeSequence] = field(default_factory=list)
    aborted: list[RequestId] = field(default_factory=list)
    reset_error: WeirError | None = None
    _opened: asyncio.Event = field(default_factory=asyncio.Event)

    def open(
        self, request: SequenceRequest, key: HandoffKey, *, source: WorkerInfo | None, listener: DecodeListener
    ) -> FakeSequence:
        if not self.is_connected:
            raise WorkerLostError("no session", hop="decode")
        sequence = FakeSequence(request, key, source, listener)
        self.sequences.append(sequence)
        self._opened.set()
        return sequence

    async def opened(self, number: int) -> FakeSequence:
        """The sequence that was opened as number `number`, from 0; waits for it."""
        while len(self.sequences) <= number:
            self._opened.clear()
            await self._opened.wait()
        return self.sequences[number]

    def die(self) -> None:
        """The session ends: every sequence fails, and no new one can be opened."""
        self.is_connected = False
        for sequence in self.sequences:
            if not sequence.is_cancelled:
                sequence.fail(WorkerLostError("the session ended", hop="decode"))

    async def abort(self, request_id: RequestId) -> int:
        self.aborted.append(request_id)
        return sum(sequence.request.request_id == request_id for sequence in self.sequences)

    async def reset_prefix_cache(self) -> bool:
        if self.reset_error is not None:
            raise self.reset_error
        return True

"""Everything that one gateway has open on this worker.

News leaves in one piece for all sequences: what the engine's step made, merged for each sequence while nobody read. So
a slow gateway costs memory in proportion to its sequences, never to its slowness. The session's end ends them all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from opentelemetry.context import attach
from opentelemetry.trace import Span

from decode_service.events import Denied, Failed, OpenSequence, SessionEvent, Tokens
from kv_transfer.transfer_state import Received
from weir.core.deadline import Clock
from weir.core.errors import ConflictError, HopFailedError, InvalidRequestError, RequestCancelledError, WeirError
from weir.core.request import HandoffTimings, RequestId
from weir.runtime.logs import request_id as current_request_id
from weir.runtime.tracing import extract, tracer

if TYPE_CHECKING:
    from weir.engine.async_engine import AsyncEngine
    from weir.engine.token_stream import SequenceNews, TokenStream

logger = logging.getLogger(__name__)


class SequenceStarter(Protocol):
    """Brings a sequence as far as its first step; the worker."""

    async def start(self, stream: OpenSequence, session: Session) -> Received | None:
        """Grant and start it, or `session.emit` a denial. Gives what a hand-off brought, if there was one.

        Raises:
            WeirError: it does not run and owns nothing any more.
        """
        ...

    def ended(self, stream: OpenSequence) -> None:
        """It has ended or is about to, however."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Stream:
    """One open sequence, and what its hand-off brought until that was reported."""

    opened: OpenSequence
    task: asyncio.Task[None] | None = None
    span: Span | None = None
    received: Received | None = None
    committed_s: float = 0.0


class Session:
    """The open sequences of one gateway; made by `DecodeWorker.session`, which also ends it."""

    def __init__(
        self,
        gateway_id: str,
        engine: AsyncEngine,
        starter: SequenceStarter,
        group: asyncio.TaskGroup,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self.gateway_id = gateway_id
        self.tokens: TokenStream = engine.open_stream()
        self._engine = engine
        self._starter = starter
        self._group = group
        self._clock = clock
        self._streams: dict[int, _Stream] = {}
        self._by_sequence: dict[str, _Stream] = {}
        self._events: list[SessionEvent] = []
        self._news: tuple[SequenceNews, ...] = ()
        self._has_something = asyncio.Event()
        self._has_room = asyncio.Event()
        self._is_closed = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._pump = group.create_task(self._pump_news())

    @property
    def num_open(self) -> int:
        return len(self._streams)

    def open(self, opened: OpenSequence) -> None:
        """Start a sequence; what becomes of it is read.

        Raises:
            InvalidRequestError: its stream id is in use; a gateway that does that has lost count.
        """
        if opened.stream_id in self._streams:
            raise InvalidRequestError(f"stream {opened.stream_id} is open already", param="stream_id", hop="decode")
        if self._is_closed:
            return
        sequence_id = opened.request.sequence_id
        if sequence_id in self._by_sequence:
            self.refuse(opened.stream_id, ConflictError(f"sequence {sequence_id} runs here already", hop="decode"))
            return
        stream = _Stream(opened=opened)
        self._streams[opened.stream_id] = stream
        self._by_sequence[sequence_id] = stream
        self._is_idle.clear()
        stream.task = self._group.create_task(self._run(stream))

    def refuse(self, stream_id: int, error: WeirError) -> None:
        """Answer an open that cannot be."""
        self._append(Failed(stream_id=stream_id, error=error))

    def cancel(self, stream_id: int) -> None:
        """End a sequence without news of it; one that has ended is ignored."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._stop(stream)
            self._events = [event for event in self._events if event.stream_id != stream_id]

    def abort(self, request_id: RequestId) -> int:
        """End the sequences of a request and tell the gateway; how many there were."""
        return self._fail_all(
            [stream for stream in self._streams.values() if stream.opened.request.request_id == request_id],
            RequestCancelledError("the request was aborted by its id", hop="decode"),
        )

    def fail_all(self, error: WeirError) -> int:
        """End every sequence with `error`; how many there were."""
        return self._fail_all(list(self._streams.values()), error)

    def emit(self, event: SessionEvent) -> None:
        """Queue what the engine does not say of an open sequence: grants, denials and failures, two at most."""
        stream = self._streams.get(event.stream_id)
        if stream is None:
            return  # cancelled meanwhile
        if isinstance(event, (Denied, Failed)):
            self._forget(stream)
        self._append(event)

    async def read(self) -> tuple[SessionEvent, ...]:
        """The news of all sequences since the last read, at least one; () once the session is closed.

        A grant comes before its tokens. For one reader.
        """
        while True:
            if not self._is_closed:
                await self._has_something.wait()
                self._has_something.clear()
            events = self._events
            self._events = []
            for news in self._news:
                event = self._to_event(news)
                if event is not None:
                    events.append(event)
            self._news = ()
            self._has_room.set()
            if events:
                return tuple(events)
            if self._is_closed:
                return ()

    async def wait_until_idle(self) -> None:
        """Until no sequence is open and the last event of each was read."""
        await self._is_idle.wait()

    def close(self) -> None:
        """End everything that is open; what was not read is read once more."""
        self._is_closed = True
        for stream in list(self._streams.values()):
            self._stop(stream)
        self._pump.cancel()
        self.tokens.close()
        self._has_something.set()

    async def _run(self, stream: _Stream) -> None:
        """Bring one sequence to its first step; from then on the engine makes its news."""
        opened = stream.opened
        current_request_id.set(opened.request.request_id)
        attach(extract(opened.trace_context))
        try:
            stream.received = await self._starter.start(opened, self)
            stream.committed_s = self._clock()
            if opened.stream_id in self._streams:
                stream.span = tracer().start_span("decode")
        except asyncio.CancelledError:
            self._engine.abort(opened.request.sequence_id)
            raise
        except WeirError as error:
            error.hop = error.hop or "decode"
            self.emit(Failed(stream_id=opened.stream_id, error=error))
        except Exception:
            logger.exception("a sequence could not be started")
            self._engine.abort(opened.request.sequence_id)
            self.emit(Failed(stream_id=opened.stream_id, error=HopFailedError("internal error", hop="decode")))

    async def _pump_news(self) -> None:
        """Take the engine's news only when the last was read: until then the token stream merges them."""
        while news := await self.tokens.read():
            self._has_room.clear()
            self._news = news
            self._has_something.set()
            await self._has_room.wait()

    def _to_event(self, news: SequenceNews) -> SessionEvent | None:
        stream = self._by_sequence.get(news.sequence_id)
        if stream is None:
            return None  # cancelled meanwhile
        stream_id = stream.opened.stream_id
        if news.is_last:
            self._forget(stream)
            if stream.task is not None and not stream.task.done():
                stream.task.cancel()  # a deadline that passed during the hand-off
        if news.error is not None:
            news.error.hop = news.error.hop or "decode"
            return Failed(stream_id=stream_id, error=news.error)
        if news.delta is None:
            return None
        return Tokens(
            stream_id=stream_id,
            delta=news.delta,
            prompt_logprobs=news.prompt_logprobs,
            timings=self._timings(stream, news.delta.first_index + len(news.delta.token_ids)),
        )

    def _timings(self, stream: _Stream, num_output_tokens: int) -> HandoffTimings | None:
        """The timings of a hand-off, once, with the first token made here; the first of all came with it."""
        request = stream.opened.request
        received = stream.received
        if received is None or num_output_tokens <= len(request.resumed_output_token_ids) + 1:
            return None
        stream.received = None
        return HandoffTimings(
            transfer_s=received.transfer_s,
            exposed_s=received.exposed_s,
            first_step_s=self._clock() - stream.committed_s,
            size_bytes=received.size_bytes,
        )

    def _fail_all(self, streams: list[_Stream], error: WeirError) -> int:
        for stream in streams:
            self._stop(stream)
            self._append(Failed(stream_id=stream.opened.stream_id, error=error))
        return len(streams)

    def _append(self, event: SessionEvent) -> None:
        self._events.append(event)
        self._has_something.set()

    def _stop(self, stream: _Stream) -> None:
        """End a sequence in whatever state: one that is being started ends once its fetch has ended."""
        self._forget(stream)
        if stream.task is not None and not stream.task.done():
            stream.task.cancel()
        else:
            self._engine.abort(stream.opened.request.sequence_id)

    def _forget(self, stream: _Stream) -> None:
        self._streams.pop(stream.opened.stream_id, None)
        self._by_sequence.pop(stream.opened.request.sequence_id, None)
        if not self._streams:
            self._is_idle.set()
        self._starter.ended(stream.opened)
        if stream.span is not None:
            stream.span.end()

"""One multiplexed connection: frames in and out of a byte transport, turns among producers, signs of life.

Knows the handshake and the shape of frames, nothing of hand-offs: those are its handler's. Everything happens in
callbacks of the loop's thread, so after `discard_payload` not one more byte goes to the old destination, and a frame
counts as flushed when the transport's buffer is empty: its limit is 0, so that it says so after every write.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

from kv_transfer.framing import (
    MAX_HANDSHAKE_HEADER_BYTES,
    MAX_HEADER_BYTES,
    FrameParser,
    FrameReceived,
    PayloadBegins,
    encode_frame,
)
from kv_transfer.handshake import HandshakeRefused, Peer, SinkHandshake, SourceHandshake
from kv_transfer.producer import OutgoingFrame, Producer
from kv_transfer.settings import ConnectionTiming
from kv_transfer.stats import TransferStats
from kv_transfer.timer import PeriodicTimer
from protos.kv_transfer_pb2 import Frame, Ping
from weir.core.deadline import Clock
from weir.core.errors import HopFailedError, TransferProtocolError, WorkerLostError

logger = logging.getLogger(__name__)

YIELD_BYTES = 512 << 10
"""Written before other callbacks get the loop; a socket that stays writable would starve them."""

MAX_QUEUED_FRAMES = 16384
"""Control frames that may wait for a peer that does not read; it is given up then."""


class ConnectionHandler(Protocol):
    """Who owns the hand-offs of a connection. What it raises as TransferProtocolError closes the connection."""

    def connection_ready(self, connection: Connection) -> None:
        """The handshake is done; `peer` is known."""
        ...

    def payload_target(self, connection: Connection, frame: Frame, size_bytes: int) -> memoryview | None:
        """Where the payload of that header goes, or None to discard it."""
        ...

    def frame_received(self, connection: Connection, frame: Frame, payload: memoryview | None) -> None:
        """A whole frame has come, its payload (if any) lies where `payload_target` said."""
        ...

    def connection_lost(self, connection: Connection, failure: HopFailedError) -> None:
        """It is over, and nothing of it is in flight. Called once, also without `connection_ready`."""
        ...


class Connection(asyncio.BufferedProtocol):
    """The protocol object of one transport, on either side.

    Args:
        name: what the peer is called in messages until it has said its own name.
        transport_name: label of the transport in counters.
    """

    def __init__(
        self,
        handler: ConnectionHandler,
        handshake: SinkHandshake | SourceHandshake,
        *,
        name: str,
        transport_name: str,
        timing: ConnectionTiming,
        stats: TransferStats,
        clock: Clock,
    ) -> None:
        self.tune: Callable[[asyncio.Transport], None] | None = None  # what its transport does once it is made
        self._transport_name = transport_name
        self._stats = stats
        self._handler = handler
        self._handshake = handshake
        self._name = name
        self._timing = timing
        self._clock = clock
        self._waste = memoryview(bytearray(4096))  # what still comes after the end
        self._parser = FrameParser(max_header_bytes=MAX_HANDSHAKE_HEADER_BYTES)
        self._transport: asyncio.Transport | None = None
        self._peer: Peer | None = None
        self._failure: HopFailedError | None = None
        self._is_closed = False
        self._control: deque[bytes] = deque()
        self._producers: deque[Producer] = deque()  # whose turn it is, first
        self._waking: set[Producer] = set()  # the same, for look-ups
        self._unflushed: list[tuple[Producer, OutgoingFrame]] = []  # what is in the transport's buffer
        self._is_writable = True
        self._is_pump_scheduled = False
        self._opened_s = self._last_received_s = clock()
        self._has_written = False
        self._heartbeat = PeriodicTimer(timing.heartbeat_s, self._beat)
        self._settled = asyncio.Event()

    @property
    def peer(self) -> Peer:
        """Only after the handshake."""
        assert self._peer is not None
        return self._peer

    @property
    def is_open(self) -> bool:
        """The handshake is done and the transport is there."""
        return self._peer is not None and not self._is_closed

    async def wait_ready(self) -> None:
        """Until the handshake is done. Raises the HopFailedError for which it is not."""
        await self._settled.wait()
        if self._failure is not None:
            raise self._failure

    def send(self, frame: Frame) -> None:
        """Queue a frame before all bulk. Does nothing once the connection is over."""
        if self._is_closed:
            return
        if len(self._control) >= MAX_QUEUED_FRAMES:
            self.close(WorkerLostError(f"{self._name} does not read", hop="transfer"))
            return
        self._control.append(encode_frame(frame))
        self._schedule_pump()

    def wake(self, producer: Producer) -> None:
        """Give a producer its next turn behind those that wait; idempotent."""
        if not self._is_closed and producer not in self._waking:
            self._waking.add(producer)
            self._producers.append(producer)
            self._schedule_pump()

    def discard_payload(self, belongs: Callable[[Frame], bool]) -> None:
        """If the payload that is arriving belongs to such a frame, the rest of it goes nowhere."""
        frame = self._parser.payload_frame
        if frame is not None and belongs(frame):
            self._parser.direct_payload(None)

    def close(self, failure: HopFailedError) -> None:
        """End it now, without flushing. The handler hears `failure` from the loop; only the first reason counts."""
        if self._end(failure) and self._transport is not None:
            self._transport.abort()

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._is_closed:
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=0)
        if self.tune is not None:
            self.tune(self._transport)
        self._opened_s = self._last_received_s = self._clock()
        self._heartbeat.start()
        if (hello := self._handshake.start()) is not None:
            self.send(hello)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._waste if self._is_closed else self._parser.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_closed:
            return
        self._last_received_s = self._clock()
        try:
            for event in self._parser.buffer_updated(nbytes):
                if self._is_closed:
                    return
                match event:
                    case PayloadBegins() if self._peer is None:
                        raise TransferProtocolError("payload before the handshake", hop="transfer")
                    case PayloadBegins(frame, size_bytes):
                        self._stats.bytes_by_transport[self._transport_name] += size_bytes
                        self._parser.direct_payload(self._handler.payload_target(self, frame, size_bytes))
                    case FrameReceived(frame, payload):
                        self._frame_received(frame, payload)
        except HandshakeRefused as refusal:
            self._refuse(refusal)
        except TransferProtocolError as error:
            logger.warning("%s: %s; closing the connection", self._name, error.message)
            self.close(error)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._is_writable = False

    def resume_writing(self) -> None:
        self._is_writable = True
        self._report_flushed()
        self._schedule_pump()

    def connection_lost(self, exc: Exception | None) -> None:
        self._heartbeat.stop()
        self._is_closed = True
        self.discard_payload(lambda _: True)
        if self._failure is None:
            why = f": {exc}" if exc else ""
            self._failure = WorkerLostError(f"the connection to {self._name} is lost{why}", hop="transfer")
        self._control.clear()
        self._producers.clear()
        self._waking.clear()
        self._report_flushed()
        self._settled.set()
        self._handler.connection_lost(self, self._failure)

    # Reading

    def _frame_received(self, frame: Frame, payload: memoryview | None) -> None:
        if self._peer is None:
            step = self._handshake.receive(frame)
            if step.reply is not None:
                self.send(step.reply)
            if step.peer is not None:
                self._peer = step.peer
                self._name = f"{step.peer.worker_id} at {self._name}"
                self._parser.max_header_bytes = MAX_HEADER_BYTES
                self._settled.set()
                self._handler.connection_ready(self)
        elif not frame.HasField("ping"):
            self._handler.frame_received(self, frame, payload)

    def _refuse(self, refusal: HandshakeRefused) -> None:
        logger.warning("%s: %s", self._name, refusal.failure.message)
        if refusal.reply is None or self._transport is None:
            self.close(refusal.failure)
        elif self._end(refusal.failure):
            self._transport.write(encode_frame(refusal.reply))
            self._transport.close()  # which flushes; for as long as a handshake may take
            asyncio.get_running_loop().call_later(self._timing.handshake_timeout_s, self._transport.abort)

    def _end(self, failure: HopFailedError) -> bool:
        """Read and write nothing more. False if that is so already."""
        if self._is_closed:
            return False
        self._is_closed = True
        self._failure = failure
        self._heartbeat.stop()
        self.discard_payload(lambda _: True)
        return True

    # Writing

    def _schedule_pump(self) -> None:
        if self._is_writable and not self._is_pump_scheduled and not self._is_closed:
            self._is_pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._is_pump_scheduled = False
        num_bytes = 0
        while self._is_writable and not self._is_closed and self._transport is not None:
            if num_bytes >= YIELD_BYTES:
                self._schedule_pump()
                return
            if self._control:
                queued = b"".join(self._control)
                self._control.clear()
                self._write(queued, None)
                num_bytes += len(queued)
                continue
            if not self._producers:
                return
            producer = self._producers.popleft()
            outgoing = producer.next_frame()
            if outgoing is None:
                self._waking.discard(producer)
                continue
            self._producers.append(producer)
            num_bytes += self._write_bulk(producer, outgoing)

    def _write_bulk(self, producer: Producer, outgoing: OutgoingFrame) -> int:
        payload = outgoing.payload
        payload_bytes = 0 if payload is None else payload.nbytes
        header = encode_frame(outgoing.frame, payload_bytes)
        self._stats.bytes_by_transport[self._transport_name] += payload_bytes
        self._unflushed.append((producer, outgoing))
        self._write(header, payload)
        return len(header) + payload_bytes

    def _write(self, header: bytes, payload: memoryview | None) -> None:
        """Hand bytes to the transport, which keeps a reference to them until it is writable again."""
        assert self._transport is not None
        self._has_written = True
        if payload is None:
            self._transport.write(header)
        else:
            self._transport.writelines((header, payload))
        if self._is_writable:
            self._report_flushed()

    def _report_flushed(self) -> None:
        flushed, self._unflushed = self._unflushed, []
        for producer, outgoing in flushed:
            producer.frame_flushed(outgoing)

    # Signs of life

    def _beat(self) -> None:
        now_s = self._clock()
        if self._peer is None and now_s - self._opened_s > self._timing.handshake_timeout_s:
            self.close(WorkerLostError(f"{self._name} does not finish the handshake", hop="transfer"))
        elif now_s - self._last_received_s > self._timing.idle_timeout_s:
            silence_s = now_s - self._last_received_s
            self.close(WorkerLostError(f"{self._name} was silent for {silence_s:.1f} s", hop="transfer"))
        elif self._peer is not None and self._is_writable and not self._has_written:
            self.send(Frame(ping=Ping()))
        self._has_written = False

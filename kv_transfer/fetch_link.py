"""One connection to a prefill worker with the hand-offs it carries: gives each frame to its hand-off, renews holds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kv_transfer.blocks import PeerMemory
from kv_transfer.connection import Connection
from kv_transfer.handoff_sink import HandoffSink
from kv_transfer.handshake import SinkHandshake, TransferIdentity
from kv_transfer.settings import ReceiverConfig
from kv_transfer.stats import TransferStats
from kv_transfer.timer import PeriodicTimer
from kv_transfer.transport import scheme_of
from kv_transfer.wire import abort_ack_frame, abort_frame, frame_key
from protos.convert import key_from_proto, key_to_proto
from protos.kv_transfer_pb2 import Frame, Renew
from weir.core.deadline import Clock, Deadline
from weir.core.errors import ConflictError, HopFailedError, TransferProtocolError, UnavailableError, WeirError
from weir.core.request import HandoffKey

logger = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 6

MapMemory = Callable[[bytes], Awaitable[PeerMemory]]
"""Maps the memory that a handle names; raises UnavailableError where that cannot be."""


class FetchLink:
    """The handler of one `Connection`, from before it is made until it is lost."""

    def __init__(
        self,
        address: str,
        identity: TransferIdentity,
        config: ReceiverConfig,
        stats: TransferStats,
        clock: Clock,
        *,
        map_memory: MapMemory | None = None,
    ) -> None:
        self.connection = Connection(
            self,
            SinkHandshake(identity, wants_checksums=config.wants_checksums),
            name=f"the prefill worker on {address}",
            transport_name=scheme_of(address),
            timing=config.timing,
            stats=stats,
            clock=clock,
        )
        self._stats = stats
        self._handoffs: dict[HandoffKey, HandoffSink] = {}
        self._receiving: HandoffSink | None = None  # whose payload comes, unless it is discarded
        self._renewals: PeriodicTimer | None = None
        self._failure: HopFailedError | None = None
        self._identity = identity
        self._map_memory = map_memory
        self._memory_handle: bytes | None = None
        self._has_handle = asyncio.Event()  # or never will
        self._memory: PeerMemory | None = None

    @property
    def failure(self) -> HopFailedError | None:
        """Why the connection was lost, if it is."""
        return self._failure

    async def open(self) -> None:
        """Until it carries hand-offs: the handshake is done and the source's memory is mapped, if that can be.

        Raises:
            HopFailedError: see `Connection.wait_ready`.
        """
        await self.connection.wait_ready()
        if self._map_memory is not None and self.connection.peer.shares_memory:
            await self._has_handle.wait()
            if self._memory_handle is None:
                assert self._failure is not None
                raise self._failure
            try:
                self._memory = await self._map_memory(self._memory_handle)
            except UnavailableError as error:
                peer = self.connection.peer.worker_id
                logger.warning("the KV memory of %s cannot be mapped, frames carry its blocks: %s", peer, error.message)

    def start(self, handoff: HandoffSink, incarnation: str, deadline: Deadline) -> None:
        """Carry a hand-off: FETCH goes out.

        Raises:
            ConflictError: the same hand-off is being fetched.
        """
        if handoff.key in self._handoffs:
            raise ConflictError(f"{handoff.key} is being fetched already", hop="transfer")
        if self._failure is not None:
            return  # lost since it was asked for: the hand-off stays idle
        self._handoffs[handoff.key] = handoff
        if self._memory is not None and self._memory.is_lost:
            self._memory = None  # from now on frames carry the blocks
        memory = self._memory if self.connection.peer.block_size == self._identity.layout.block_size else None
        handoff.start(self.connection, incarnation=incarnation, deadline=deadline, memory=memory)

    def stop(self, handoff: HandoffSink, reason: WeirError | None) -> None:
        """Carry it no longer: when this returns, no byte goes to its sink any more. `reason` is told to the source."""
        if self._handoffs.pop(handoff.key, None) is None:
            return
        self.connection.discard_payload(lambda frame: frame_key(frame) == handoff.key)
        if reason is not None:
            self.connection.send(abort_frame(handoff.key, reason))
        handoff.stop()

    # ConnectionHandler

    def connection_ready(self, connection: Connection) -> None:
        """See ConnectionHandler."""
        if connection.peer.lease_s > 0:
            self._renewals = PeriodicTimer(connection.peer.lease_s / RENEWALS_PER_LEASE, self._renew)
            self._renewals.start()

    def payload_target(self, connection: Connection, frame: Frame, size_bytes: int) -> memoryview | None:
        """See ConnectionHandler."""
        key = frame_key(frame)
        if not frame.HasField("blocks") or key is None:
            return None
        handoff = self._handoffs.get(key)
        if handoff is None:
            self._stats.stale_frames_total += 1
            return None
        self._receiving = handoff
        return handoff.payload_target(frame.blocks, size_bytes)

    def frame_received(self, connection: Connection, frame: Frame, payload: memoryview | None) -> None:
        """See ConnectionHandler."""
        if payload is not None:
            assert self._receiving is not None
            self._receiving.payload_received(frame.blocks, payload)
            return
        body = frame.WhichOneof("body")
        if body == "memory":
            self._memory_handle = frame.memory.handle
            self._has_handle.set()
            return
        if body == "computing":
            for message in frame.computing.keys:
                if (waiting := self._handoffs.get(key_from_proto(message))) is not None:
                    waiting.still_computing()
            return
        key = frame_key(frame)
        if key is None or body == "abort_ack":
            return
        handoff = self._handoffs.get(key)
        match body:
            case "abort":
                if handoff is not None:
                    handoff.lost(frame.abort.reason)
                connection.send(abort_ack_frame(key, drained=True))
            case "blocks" if handoff is not None and frame.blocks.HasField("memory_offset"):
                self._stats.bytes_by_transport["memory"] += frame.blocks.size_bytes
                handoff.piece_named(frame.blocks)
            case "blocks":
                pass  # the payload went nowhere: its hand-off is over
            case "committed" if handoff is not None:
                handoff.committed()
            case "seal" | "handoff_lost" | "committed" if handoff is None:
                self._stats.stale_frames_total += 1
            case "seal" if handoff is not None:
                handoff.seal(frame.seal)
            case "handoff_lost" if handoff is not None:
                handoff.lost(frame.handoff_lost.reason)
            case _:
                raise TransferProtocolError(f"{body} from a prefill worker", hop="transfer")

    def connection_lost(self, connection: Connection, failure: HopFailedError) -> None:
        """See ConnectionHandler."""
        self._stats.connections_lost_total += 1
        self._failure = failure
        self._has_handle.set()
        if self._renewals is not None:
            self._renewals.stop()
        handoffs, self._handoffs = self._handoffs, {}
        for handoff in handoffs.values():
            handoff.stop()

    def _renew(self) -> None:
        if self._handoffs:
            self.connection.send(Frame(renew=Renew(keys=[key_to_proto(key) for key in self._handoffs])))

"""The prefill worker's end: offers hand-offs, serves the decode workers that fetch them, ends their holds.

Owns the listeners, the table of holds, their leases and the fetches that came too early. Knows neither engine nor
gateway; one `TransferServer` per process, used from its loop's thread only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Self

from kv_transfer.blocks import BlockSource
from kv_transfer.connection import Connection
from kv_transfer.ended_handoffs import EndedHandoffs
from kv_transfer.handoff_source import HandoffSource, SourceLink
from kv_transfer.handshake import SourceHandshake, TransferIdentity
from kv_transfer.lease import LeaseTable
from kv_transfer.offer import Offer
from kv_transfer.parked_fetches import ParkedFetch, ParkedFetches
from kv_transfer.settings import SenderConfig
from kv_transfer.stats import TransferStats
from kv_transfer.tcp import SocketTransport
from kv_transfer.timer import PeriodicTimer
from kv_transfer.transfer_state import EndReason, Seal
from kv_transfer.transport import Listener, Transport, scheme_of
from kv_transfer.wire import abort_ack_frame, abort_frame, frame_key, handoff_lost_frame
from protos.common_pb2 import HandoffKey as HandoffKeyMessage
from protos.convert import key_from_proto, key_to_proto
from protos.kv_transfer_pb2 import Computing, Fetch, Frame, Memory
from weir.core.deadline import Clock, Deadline
from weir.core.errors import (
    ConflictError,
    HandoffError,
    HandoffLostError,
    HopFailedError,
    TransferProtocolError,
    UnavailableError,
    WeirError,
    WorkerLostError,
    WrongIncarnationError,
)
from weir.core.request import HandoffId, HandoffKey
from weir.runtime.ports import cannot_listen

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0  # for reads of blocks that were begun; a device that takes longer is dead


class TransferServer:
    """Serves hand-offs of one prefill worker; an async context manager that listens while it is entered.

    Args:
        listen: addresses, `tcp://host:port` (port 0 takes a free one) or `unix:///path`.
        export_memory: makes a handle with which one decode worker of the same memory domain maps the KV memory here.
    """

    def __init__(
        self,
        identity: TransferIdentity,
        listen: Sequence[str],
        config: SenderConfig | None = None,
        *,
        export_memory: Callable[[], bytes] | None = None,
        transport: Transport | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.stats = TransferStats()
        self._identity = identity
        self._export_memory = export_memory
        self._listen = tuple(listen)
        self._config = config or SenderConfig()
        self._transport = transport or SocketTransport()
        self._clock = clock
        self._leases = LeaseTable(self._config.lease_s, clock)
        self._listeners: list[Listener] = []
        self._connections: set[Connection] = set()
        self._sources: dict[HandoffKey, HandoffSource] = {}
        self._epochs: dict[HandoffId, int] = {}  # of the sources that are held
        self._ended = EndedHandoffs(clock)
        self._parked = ParkedFetches(self._config.max_parked, self._config.park_timeout_s, clock)
        sweep_s = min(1.0, self._config.lease_s / 10, self._config.park_timeout_s / 4)
        self._sweeper = PeriodicTimer(sweep_s, self.sweep)
        self._announcer = PeriodicTimer(self._config.timing.heartbeat_s, self._announce_computing)
        self._has_ended = asyncio.Event()
        self._exit_stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Raises ConfigError for an address that cannot be listened on."""
        async with AsyncExitStack() as stack:
            for address in self._listen:
                listener = await self._start_listening(address)
                self._listeners.append(listener)
                stack.push_async_callback(listener.close)
            self._sweeper.start()
            self._announcer.start()
            stack.push_async_callback(self._close)
            self._exit_stack = stack.pop_all()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End every hold and close every connection; then nothing is in flight and every `on_end` was called."""
        await self._exit_stack.aclose()

    async def _start_listening(self, address: str) -> Listener:
        try:
            return await self._transport.listen(address, partial(self._accept, address))
        except OSError as exc:
            raise cannot_listen("transfer_listen", address, exc) from exc

    # For the prefill service

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it really listens, in the order of `listen`."""
        return tuple(listener.address for listener in self._listeners)

    @property
    def num_held(self) -> int:
        """Holds that have not ended."""
        return len(self._leases)

    @property
    def num_unreleased(self) -> int:
        """Hand-offs whose `on_end` was not called yet: held ones and those with bytes in flight."""
        return len(self._sources)

    @property
    def num_in_flight(self) -> int:
        """Hand-offs that a decode worker is fetching now."""
        return sum(source.link is not None for source in self._sources.values())

    @property
    def oldest_progress_age_s(self) -> float:
        """Longest time for which a transfer could have sent bytes and has not; 0 without one."""
        return max((source.progress_age_s() for source in self._sources.values()), default=0.0)

    def offer(
        self,
        key: HandoffKey,
        *,
        decode_incarnation: str,
        adapter: str,
        source: BlockSource,
        deadline: Deadline,
        on_end: Callable[[HandoffKey, EndReason], None],
    ) -> Offer:
        """Hold a sequence's blocks for one decode worker, from before its prefill starts.

        Older epochs of the same hand-off end. The hold lives until the deadline at most and, once sealed, while its
        lease is renewed.

        Args:
            decode_incarnation: who may fetch and commit; empty until `rebind` names one.
            on_end: called exactly once, in the loop's thread, maybe before this returns: the hold has ended and
                nothing of it is in flight, so its blocks are reusable.

        Raises:
            ConflictError: this epoch or a newer one was offered before.
        """
        newest = self._newest_epoch(key.handoff_id)
        if newest is not None and newest >= key.epoch:
            raise ConflictError(f"{key} is offered after epoch {newest}", hop="transfer")
        self._end_up_to(HandoffKey(key.handoff_id, key.epoch - 1), EndReason.SUPERSEDED)
        handoff = HandoffSource(
            key,
            decode_incarnation=decode_incarnation,
            adapter=adapter,
            source=source,
            frame_bytes=self._config.frame_bytes,
            clock=self._clock,
            on_hold_ended=self._hold_ended,
            on_end=partial(self._source_ended, on_end),
        )
        self._sources[key] = handoff
        self._epochs[key.handoff_id] = key.epoch
        self._leases.hold(key, deadline)
        self._unpark(key)
        return Offer(self, handoff)

    def seal(self, handoff: HandoffSource, seal: Seal) -> None:
        """See `Offer.seal`."""
        if not handoff.is_sealed:
            self._leases.grant(handoff.key)
            handoff.seal(seal)

    def release(self, key: HandoffKey) -> bool:
        """End the hold of that hand-off, at any epoch up to the key's. False if there is none; never waits.

        It may overtake the call that makes the hold: an offer of such an epoch that comes later is refused.
        """
        if self._end_up_to(key, EndReason.RELEASED):
            return True
        newest = self._newest_epoch(key.handoff_id)
        if newest is None or newest < key.epoch:
            self._ended.add(key, EndReason.RELEASED)
        return False

    def rebind(self, key: HandoffKey, decode_incarnation: str) -> None:
        """Bind the hold to another decode worker and restart its lease.

        Raises:
            HandoffLostError: it is not held any more.
        """
        handoff = self._sources.get(key)
        if handoff is None or not self._leases.renew(key):
            raise self._lost(key)
        handoff.rebind(decode_incarnation)
        self._unpark(key)

    def renew(self, key: HandoffKey) -> bool:
        """Restart the lease of a hold. False if it is lost."""
        return self._leases.renew(key)

    def sweep(self) -> None:
        """On a timer: end the holds whose lease is over, refuse fetches that waited too long, forget old ends."""
        for key in self._leases.expired():
            self.stats.leases_expired_total += 1
            logger.warning("the hold of %s has expired", key)
            notice = handoff_lost_frame(key, HandoffLostError(f"{key} is over: its lease has expired", hop="transfer"))
            self._sources[key].end(EndReason.EXPIRED, notice)
        for parked in self._parked.take_expired():
            self._refuse(parked.connection, parked.key, self._lost(parked.key))
        self._ended.sweep()

    # ConnectionHandler

    def connection_ready(self, connection: Connection) -> None:
        """See ConnectionHandler."""
        if connection.peer.shares_memory:
            connection.send(Frame(memory=Memory(handle=self._make_handle())))

    def _make_handle(self) -> bytes:
        """A handle of the memory, or an empty one, which maps nothing."""
        assert self._export_memory is not None, "a memory domain without memory"
        try:
            return self._export_memory()
        except UnavailableError as error:
            logger.warning("the KV memory cannot be exported, frames carry its blocks: %s", error.message)
            return b""

    def payload_target(self, connection: Connection, frame: Frame, size_bytes: int) -> memoryview | None:
        """A decode worker sends no payload that this version knows."""
        return None

    def frame_received(self, connection: Connection, frame: Frame, payload: memoryview | None) -> None:
        """See ConnectionHandler."""
        body = frame.WhichOneof("body")
        if body == "renew":
            for message in frame.renew.keys:
                self._renewed(connection, key_from_proto(message))
            return
        key = frame_key(frame)
        if key is None:
            return  # a body of a later version
        if body == "fetch":
            self._fetch(None, connection, key, frame.fetch)
            return
        if body == "abort":
            self._abort(connection, key)
            return
        source = self._sources.get(key)
        is_current = False
        if source is not None:
            match body:
                case "credit":
                    is_current = source.credit(connection, frame.credit.size_bytes)
                case "nack":
                    self.stats.nacked_pieces_total += len(frame.nack.pieces)
                    is_current = source.nack(connection, frame.nack.pieces)
                case "commit":
                    is_current = source.commit(connection)
                case "abort_ack":
                    is_current = True
                case _:
                    raise TransferProtocolError(f"{body} from a decode worker", hop="transfer")
        if not is_current and body != "abort_ack":
            self.stats.stale_frames_total += 1
            if body in ("nack", "commit"):
                self._refuse(connection, key, self._lost(key))

    def connection_lost(self, connection: Connection, failure: HopFailedError) -> None:
        """See ConnectionHandler."""
        self._connections.discard(connection)
        self.stats.connections_lost_total += 1
        self._parked.drop_connection(connection)
        for source in tuple(self._sources.values()):
            source.link_lost(connection)
        self._note_if_ended()

    def _accept(self, address: str) -> Connection:
        handshake = SourceHandshake(
            self._identity,
            wants_checksums=self._config.wants_checksums,
            lease_s=self._config.lease_s,
            is_busy=len(self._connections) >= self._config.max_connections,
        )
        connection = Connection(
            self,
            handshake,
            name=f"a decode worker on {address}",
            transport_name=scheme_of(address),
            timing=self._config.timing,
            stats=self.stats,
            clock=self._clock,
        )
        self._connections.add(connection)
        return connection

    async def _close(self) -> None:
        self._sweeper.stop()
        self._announcer.stop()
        for source in tuple(self._sources.values()):
            source.end(EndReason.CLOSED)
        self._has_ended.clear()
        for connection in tuple(self._connections):
            connection.close(WorkerLostError("this worker closes", hop="transfer"))
        if self._connections or self._sources:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._has_ended.wait()
            except TimeoutError:
                logger.error("blocks of %d hand-offs are still being read", len(self._sources))

    def _announce_computing(self) -> None:
        """Tell every decode worker for which of its fetches nothing is owed now."""
        waiting: dict[SourceLink, list[HandoffKeyMessage]] = {}
        for key, source in self._sources.items():
            if source.link is not None and source.awaits_computation:
                waiting.setdefault(source.link, []).append(key_to_proto(key))
        for link, keys in waiting.items():
            link.send(Frame(computing=Computing(keys=keys)))

    # Frames

    def _fetch(self, parked: ParkedFetch | None, connection: Connection, key: HandoffKey, fetch: Fetch) -> None:
        """Serve, park or refuse a FETCH, a new one or one that was parked."""
        source = self._sources.get(key)
        newest = self._newest_epoch(key.handoff_id)
        if fetch.incarnation != self._identity.incarnation:
            text = f"{key}: incarnation {fetch.incarnation} is meant, this is {self._identity.incarnation}"
            self._refuse(connection, key, WrongIncarnationError(text, hop="transfer"))
        elif source is not None and source.is_held and source.decode_incarnation == connection.peer.incarnation:
            if source.adapter != fetch.adapter:
                text = f"{key}: adapter {fetch.adapter!r} is asked for, {source.adapter!r} was computed"
                self._refuse(connection, key, HandoffError(text, param="adapter", hop="transfer"))
            else:
                source.attach(connection, fetch)
        elif newest is not None and (newest > key.epoch or (newest == key.epoch and key not in self._leases)):
            self.stats.stale_frames_total += 1
            self._refuse(connection, key, self._lost(key))
        elif parked is not None:
            self._parked.put_back(parked)
        elif not self._parked.park(key, connection, fetch):
            self._refuse(connection, key, HandoffLostError(f"{key} is unknown, and too many fetches wait already"))

    def _unpark(self, key: HandoffKey) -> None:
        for parked in self._parked.take(key):
            try:
                self._fetch(parked, parked.connection, key, parked.fetch)
            except TransferProtocolError as error:  # the peer's fault, not that of whoever offers
                parked.connection.close(error)

    def _abort(self, connection: Connection, key: HandoffKey) -> None:
        self._parked.drop(key, connection)
        if (source := self._sources.get(key)) is not None:
            source.abort(connection)
        else:
            connection.send(abort_ack_frame(key, drained=True))

    def _renewed(self, connection: Connection, key: HandoffKey) -> None:
        source = self._sources.get(key)
        is_bound = source is not None and source.decode_incarnation == connection.peer.incarnation
        if not (is_bound and self._leases.renew(key)) and not self._parked.has(key, connection):
            self._refuse(connection, key, self._lost(key))

    # Ends

    def _end_up_to(self, key: HandoffKey, reason: EndReason) -> bool:
        epoch = self._epochs.get(key.handoff_id)
        if epoch is None or epoch > key.epoch:
            return False
        held = HandoffKey(key.handoff_id, epoch)
        self._sources[held].end(reason, abort_frame(held, HandoffLostError(f"{held} is over: {reason.value}")))
        return True

    def _hold_ended(self, key: HandoffKey, reason: EndReason) -> None:
        self._leases.drop(key)
        del self._epochs[key.handoff_id]
        self._ended.add(key, reason)
        if reason is EndReason.COMMITTED:
            self.stats.handoffs_total += 1
        else:
            self.stats.failures_by_reason[reason.value] += 1

    def _source_ended(
        self, on_end: Callable[[HandoffKey, EndReason], None], key: HandoffKey, reason: EndReason
    ) -> None:
        del self._sources[key]
        on_end(key, reason)
        self._note_if_ended()

    def _note_if_ended(self) -> None:
        if not self._connections and not self._sources:
            self._has_ended.set()

    def _newest_epoch(self, handoff_id: HandoffId) -> int | None:
        """Of what is held or was, as far as it is remembered."""
        if (held := self._epochs.get(handoff_id)) is not None:
            return held
        ended = self._ended.get(handoff_id)
        return None if ended is None else ended.epoch

    def _lost(self, key: HandoffKey) -> HandoffLostError:
        ended = self._ended.get(key.handoff_id)
        held = self._epochs.get(key.handoff_id)
        if held is not None and held > key.epoch:
            why = f"epoch {held} has taken its place"
        elif held == key.epoch:
            why = "it is bound to another decode worker"
        elif ended is not None and ended.epoch >= key.epoch:
            why = f"its hold is over: {ended.reason.value}"
        else:
            why = "unknown here"
        return HandoffLostError(f"{key}: {why}", hop="transfer")

    def _refuse(self, connection: Connection, key: HandoffKey, error: WeirError) -> None:
        self.stats.refused_total += 1
        connection.send(handoff_lost_frame(key, error))

"""The decode worker's end: fetches hand-offs from prefill workers over one pooled connection per address.

Owns the pool and the attempts of each fetch. Knows no engine: the blocks go to the `BlockSink` that the caller gives.
One `TransferClient` per process, used from its loop's thread only.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from kv_transfer.blocks import BlockSink
from kv_transfer.connection import Connection
from kv_transfer.fetch_link import FetchLink, MapMemory
from kv_transfer.handoff_sink import HandoffSink
from kv_transfer.handshake import TransferIdentity
from kv_transfer.settings import ReceiverConfig
from kv_transfer.stats import TransferStats
from kv_transfer.tcp import SocketTransport
from kv_transfer.transfer_state import Received, SinkState
from kv_transfer.transport import Transport
from weir.core.deadline import Clock, Deadline
from weir.core.errors import (
    DeadlineExceededError,
    HopFailedError,
    RequestCancelledError,
    TransferProtocolError,
    WeirError,
    WorkerLostError,
    WrongIncarnationError,
)
from weir.core.request import HandoffKey

SinkReady = Callable[[], Awaitable[BlockSink]]


class _PooledLink:
    """The link to one address: made when it is needed and none is open. Callers share attempts and their failures."""

    def __init__(
        self, address: str, make_link: Callable[[str], FetchLink], transport: Transport, timeout_s: float
    ) -> None:
        self.num_users = 0
        self._address = address
        self._make_link = make_link
        self._transport = transport
        self._timeout_s = timeout_s
        self._link: FetchLink | None = None
        self._lock = asyncio.Lock()
        self._num_failures = 0
        self._failure: HopFailedError | None = None

    @property
    def is_open(self) -> bool:
        return self._link is not None and self._link.connection.is_open

    async def get(self) -> FetchLink:
        """The open link. A caller that is cancelled while it connects leaves the attempt to the next one.

        Raises:
            HopFailedError: nobody answers there, or the handshake was refused.
        """
        num_failures = self._num_failures
        async with self._lock:
            if self._failure is not None and self._num_failures != num_failures:
                raise self._failure
            if self._link is None or not self._link.connection.is_open:
                try:
                    self._link = await self._connect()
                except HopFailedError as failure:
                    self._num_failures += 1
                    self._failure = failure
                    raise
            return self._link

    def close(self) -> None:
        if self._link is not None:
            self._link.connection.close(WorkerLostError("this worker closes", hop="transfer"))

    async def _connect(self) -> FetchLink:
        link = self._make_link(self._address)
        is_ready = False
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._transport.connect(self._address, lambda: link.connection)
                await link.open()
            is_ready = True
            return link
        except (OSError, TimeoutError) as exc:
            why = str(exc) or f"no answer for {self._timeout_s:.1f} s"
            raise WorkerLostError(f"cannot connect to {self._address}: {why}", hop="transfer") from exc
        finally:
            if not is_ready:
                link.connection.close(WorkerLostError("not needed any more", hop="transfer"))


class TransferClient:
    """Fetches hand-offs for one decode worker; an async context manager, to be left when no fetch runs.

    Args:
        map_memory: maps the KV memory of prefill workers of the same memory domain.
    """

    def __init__(
        self,
        identity: TransferIdentity,
        config: ReceiverConfig | None = None,
        *,
        map_memory: MapMemory | None = None,
        transport: Transport | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.stats = TransferStats()
        self._identity = identity
        self._config = config or ReceiverConfig()
        self._map_memory = map_memory
        self._transport = transport or SocketTransport()
        self._clock = clock
        self._pool: dict[str, _PooledLink] = {}
        self._fetching: set[HandoffSink] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for pooled in self._pool.values():
            pooled.close()
        self._pool.clear()

    @property
    def num_in_flight(self) -> int:
        """Fetches that run now."""
        return len(self._fetching)

    @property
    def oldest_progress_age_s(self) -> float:
        """Longest time for which blocks have waited for their sink, or to be placed in it; 0 when none do.

        Waiting for a peer is not ours.
        """
        now_s = self._clock()
        waiting = (each for each in self._fetching if each.wants_sink or each.is_placing)
        return max((now_s - each.last_progress_s for each in waiting), default=0.0)

    async def fetch(
        self,
        *,
        address: str,
        incarnation: str,
        key: HandoffKey,
        adapter: str,
        skip_tokens: int,
        sink_ready: SinkReady,
        deadline: Deadline,
    ) -> Received:
        """Bring one hand-off into a sink, verify and commit it.

        A lost connection is made anew and the fetch goes on behind what is verified. When this has returned, raised or
        been cancelled, nobody writes to the sink any more; unless it returned, the source has been told to let go.

        Args:
            incarnation: of the prefill worker that is meant.
            skip_tokens: tokens whose KV the sink has. They are not sent, but for those in one block with the next one.
            sink_ready: awaited once, when the first blocks (or the seal, if there are no blocks to send) have come.

        Raises:
            HandoffLostError: the source no longer has it.
            WrongIncarnationError: the worker there is another start of it.
            FingerprintMismatchError: its KV means something else.
            TransferProtocolError: it sends what no correct peer sends, or does not know the secret.
            HandoffError: it is refused for another named reason.
            WorkerLostError: it cannot be reached, or made no progress.
            DeadlineExceededError: the deadline passed.
            ConflictError: the same hand-off is being fetched.
        """
        news = asyncio.Event()
        handoff = HandoffSink(
            key,
            adapter=adapter,
            token_bytes=self._identity.layout.token_bytes,
            skip_tokens=skip_tokens,
            initial_credit_bytes=self._config.initial_credit_bytes,
            window_bytes=self._config.window_bytes,
            clock=self._clock,
            on_news=news.set,
        )
        fetch = _Fetch(handoff, news, self._config, incarnation, sink_ready, deadline, self._clock)
        pooled = self._use(address)
        self._fetching.add(handoff)
        outcome = "cancelled"
        try:
            remaining_s = deadline.remaining_s(self._clock)
            async with asyncio.timeout(None if math.isinf(remaining_s) else remaining_s) as time_left:
                received = await fetch.run(pooled)
            outcome = ""
            self.stats.handoffs_total += 1
            return received
        except TimeoutError as exc:
            if not time_left.expired():
                raise
            outcome = DeadlineExceededError.code
            raise DeadlineExceededError(f"{key} has not arrived by its deadline", hop="transfer") from exc
        except WeirError as error:
            outcome = error.code
            raise
        finally:
            await _until_placed(handoff, news)
            self._fetching.remove(handoff)
            self._unuse(address, pooled)
            self.stats.nacked_pieces_total += handoff.num_nacks
            if outcome:
                self.stats.failures_by_reason[outcome] += 1

    def _use(self, address: str) -> _PooledLink:
        pooled = self._pool.get(address)
        if pooled is None:
            pooled = _PooledLink(address, self._make_link, self._transport, self._config.connect_timeout_s)
            self._pool[address] = pooled
        pooled.num_users += 1
        return pooled

    def _unuse(self, address: str, pooled: _PooledLink) -> None:
        """Forget an address that nobody uses and that is not connected: workers come and go."""
        pooled.num_users -= 1
        if not pooled.num_users and not pooled.is_open:
            self._pool.pop(address, None)

    def _make_link(self, address: str) -> FetchLink:
        return FetchLink(address, self._identity, self._config, self.stats, self._clock, map_memory=self._map_memory)


async def _until_placed(handoff: HandoffSink, news: asyncio.Event) -> None:
    """Wait for what the sink still writes, which no time-out and no cancellation makes safe to leave behind."""
    is_cancelled = False
    while handoff.is_placing:
        news.clear()
        try:
            await news.wait()
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError


class _Fetch:
    """The attempts of one fetch, one connection after the other."""

    def __init__(
        self,
        handoff: HandoffSink,
        news: asyncio.Event,
        config: ReceiverConfig,
        incarnation: str,
        sink_ready: SinkReady,
        deadline: Deadline,
        clock: Clock,
    ) -> None:
        self._handoff = handoff
        self._news = news
        self._config = config
        self._incarnation = incarnation
        self._sink_ready = sink_ready
        self._deadline = deadline
        self._clock = clock

    async def run(self, pooled: _PooledLink) -> Received:
        num_failures = 0
        num_verified_blocks = self._handoff.num_verified_blocks
        while True:
            failure: HopFailedError
            try:
                link = await pooled.get()
            except (WorkerLostError, TransferProtocolError) as error:
                failure = error  # what else a handshake ends with will not change
            else:
                self._check_incarnation(link.connection)
                await self._carry(link)
                if self._handoff.state is SinkState.COMMITTED:
                    return self._handoff.get_received()
                failure = link.failure or WorkerLostError("the connection is lost", hop="transfer")
            if self._handoff.num_verified_blocks > num_verified_blocks:
                num_verified_blocks = self._handoff.num_verified_blocks
                num_failures = 0
            num_failures += 1
            if num_failures >= self._config.max_attempts:
                raise failure
            await asyncio.sleep(self._config.backoff_s * 2 ** (num_failures - 1))

    def _check_incarnation(self, connection: Connection) -> None:
        if connection.peer.incarnation != self._incarnation:
            raise WrongIncarnationError(
                f"{self._handoff.key}: incarnation {self._incarnation} is meant, {connection.peer.worker_id} is "
                f"{connection.peer.incarnation}",
                hop="transfer",
            )

    async def _carry(self, link: FetchLink) -> None:
        """Until it is committed or the connection is lost; raises what else ends it."""
        handoff = self._handoff
        reason: WeirError | None = RequestCancelledError(f"{handoff.key} is not wanted any more", hop="transfer")
        link.start(handoff, self._incarnation, self._deadline)
        try:
            while True:
                self._news.clear()
                match handoff.state:
                    case SinkState.COMMITTED | SinkState.IDLE:
                        reason = None
                        return
                    case SinkState.FAILED:
                        reason = None
                        assert handoff.failure is not None
                        raise handoff.failure
                    case SinkState.STAGING:
                        handoff.attach_sink(await self._sink_ready())
                    case _:
                        await self._wait_for_news()
        finally:
            link.stop(handoff, reason)

    async def _wait_for_news(self) -> None:
        """Raises WorkerLostError when something is owed of a hand-off that has begun, and does not come."""
        if not self._handoff.has_begun:
            await self._news.wait()
            return
        timeout_s = self._config.progress_timeout_s
        try:
            async with asyncio.timeout(self._handoff.last_progress_s + timeout_s - self._clock()):
                await self._news.wait()
        except TimeoutError as exc:
            if self._clock() - self._handoff.last_progress_s >= timeout_s:
                raise WorkerLostError(f"{self._handoff.key}: nothing came for {timeout_s} s", hop="transfer") from exc

"""Who holds which blocks of which request: a mirror in Redis of what the workers know, for routers and for people.

Each worker's own memory is the truth about its blocks. A worker records what it holds and, whenever its link to Redis
comes back, makes Redis agree with its memory again, which also removes what an earlier incarnation of it has left.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Self

from weir.cluster import keys
from weir.cluster.connection import RedisConnection, ScriptCall
from weir.cluster.owned_tasks import OwnedTasks
from weir.cluster.scripts import ADD_HELD, CLEAR_HOLDINGS, LIST_HELD, LIST_HOLDINGS, RECORD_HOLDING, REMOVE_HELD
from weir.cluster.write_queue import WriteQueue, WriteQueueStats
from weir.core.deadline import Clock, Deadline
from weir.core.errors import UnavailableError
from weir.core.request import HandoffId, HandoffKey, RequestId
from weir.core.worker import Incarnation, WorkerId

logger = logging.getLogger(__name__)

MAX_LIFETIME_MS = 86_400_000
READ_BATCH = 256
MAX_REQUESTS_READ = 1_000
MAX_HOLDINGS = 20_000


class HoldingKind(Enum):
    SOURCE = "source"
    """The prefill side keeps the blocks under a lease."""
    DESTINATION = "destination"
    """The decode side has allocated the blocks: being received, or in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGroup:
    """A run of a sequence's blocks, by index in its block table."""

    first_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Blocks of one hand-off in one worker. `until` is the end of the lease, or of the request."""

    request_id: RequestId
    key: HandoffKey
    kind: HoldingKind
    worker_id: WorkerId
    incarnation: Incarnation
    groups: tuple[BlockGroup, ...]
    until: Deadline

    @property
    def name(self) -> str:
        """Unique among the holdings of a request: its field in Redis."""
        return json.dumps(
            [self.worker_id, self.incarnation, self.key.handoff_id, self.key.epoch, self.kind.value],
            separators=(",", ":"),
        )


class BlockOwnership:
    """What anybody can ask."""

    def __init__(self, connection: RedisConnection, *, clock: Clock = time.monotonic) -> None:
        self._connection = connection
        self._clock = clock

    async def by_request(self, request_id: RequestId) -> tuple[Holding, ...]:
        """All holdings of a request whose time has not come. Raises UnavailableError if Redis is away."""
        return (await self._read([request_id]))[0]

    async def by_worker(self, worker_id: WorkerId, *, max_requests: int = MAX_REQUESTS_READ) -> tuple[Holding, ...]:
        """All holdings of a worker, of the requests that stay longest. Raises UnavailableError if Redis is away."""
        request_ids = await self._connection.run_script(LIST_HELD, [keys.held(worker_id)], [max_requests])
        found: list[Holding] = []
        for first in range(0, len(request_ids), READ_BATCH):
            batch = [RequestId(raw.decode()) for raw in request_ids[first : first + READ_BATCH]]
            for holdings in await self._read(batch):
                found.extend(holding for holding in holdings if holding.worker_id == worker_id)
        return tuple(found)

    async def _read(self, request_ids: list[RequestId]) -> list[tuple[Holding, ...]]:
        calls = [ScriptCall(script=LIST_HOLDINGS, keys=(keys.ownership(request_id),)) for request_id in request_ids]
        replies = await self._connection.run_scripts(calls)
        results = []
        for request_id, reply in zip(request_ids, replies, strict=True):
            if isinstance(reply, UnavailableError):
                raise reply
            results.append(
                tuple(
                    self._decode(request_id, name, int(remaining_ms), groups)
                    for name, remaining_ms, groups in zip(reply[::3], reply[1::3], reply[2::3], strict=True)
                )
            )
        return results

    def _decode(self, request_id: RequestId, name: bytes, remaining_ms: int, groups: bytes) -> Holding:
        worker_id, incarnation, handoff_id, epoch, kind, *_ = json.loads(name)
        return Holding(
            request_id=request_id,
            key=HandoffKey(HandoffId(handoff_id), epoch),
            kind=HoldingKind(kind),
            worker_id=WorkerId(worker_id),
            incarnation=Incarnation(incarnation),
            groups=tuple(BlockGroup(first_block=first, num_blocks=num) for first, num, *_ in json.loads(groups)),
            until=Deadline.after(remaining_ms / 1000, self._clock),
        )


class OwnershipRecorder:
    """One worker's writer; an async context manager. Recording never waits.

    Keeps the holdings in memory, at most `max_holdings`: beyond it the oldest is no longer mirrored.
    """

    def __init__(
        self,
        connection: RedisConnection,
        worker_id: WorkerId,
        incarnation: Incarnation,
        *,
        clock: Clock = time.monotonic,
        max_holdings: int = MAX_HOLDINGS,
    ) -> None:
        self._connection = connection
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._clock = clock
        self._max_holdings = max_holdings
        self._holdings: dict[tuple[RequestId, str], Holding] = {}
        self._num_by_request: Counter[RequestId] = Counter()
        self._queue: WriteQueue[Holding] = WriteQueue(connection, self._encode, max_pending=max_holdings)
        self._ownership = BlockOwnership(connection, clock=clock)
        self._tasks = OwnedTasks()

    @property
    def stats(self) -> WriteQueueStats:
        return self._queue.stats

    async def __aenter__(self) -> Self:
        await self._queue.__aenter__()
        await self._tasks.__aenter__()
        self._tasks.start(self._keep_reconciled())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._tasks.__aexit__(kind, error, traceback)
        finally:
            await self._queue.__aexit__(kind, error, traceback)

    def record_source(
        self, request_id: RequestId, key: HandoffKey, groups: tuple[BlockGroup, ...], until: Deadline
    ) -> None:
        """This worker keeps these blocks under a lease; again with a later `until` when the lease is renewed."""
        self._record(self._holding(request_id, key, HoldingKind.SOURCE, groups, until))

    def record_destination(
        self, request_id: RequestId, key: HandoffKey, groups: tuple[BlockGroup, ...], until: Deadline
    ) -> None:
        """This worker has allocated these blocks for the sequence."""
        self._record(self._holding(request_id, key, HoldingKind.DESTINATION, groups, until))

    def clear(self, request_id: RequestId, key: HandoffKey, kind: HoldingKind) -> None:
        """This worker no longer holds the blocks; unknown holdings are ignored."""
        holding = self._holdings.get((request_id, self._holding(request_id, key, kind, (), Deadline.never()).name))
        if holding is not None:
            self._forget(holding)
            self._queue.put((request_id, holding.name), holding)

    async def wait_until_sent(self) -> None:
        """Until Redis has every holding, however long it is away; give it a time-out."""
        await self._queue.wait_until_sent()

    async def reconcile(self) -> None:
        """Make Redis agree with this worker's memory. Raises UnavailableError if Redis is away."""
        for holding in [kept for kept in self._holdings.values() if kept.until.is_past(self._clock)]:
            self._forget(holding)
        stored = await self._ownership.by_worker(self._worker_id, max_requests=self._max_holdings)
        calls = [
            ScriptCall(script=CLEAR_HOLDINGS, keys=(keys.ownership(holding.request_id),), args=(holding.name,))
            for holding in stored
            if (holding.request_id, holding.name) not in self._holdings
        ]
        calls += [
            ScriptCall(script=REMOVE_HELD, keys=(keys.held(self._worker_id),), args=(request_id,))
            for request_id in {holding.request_id for holding in stored}
            if not self._num_by_request[request_id]
        ]
        for first in range(0, len(calls), READ_BATCH):
            await self._connection.run_scripts(calls[first : first + READ_BATCH])
        for holding in self._holdings.values():
            self._queue.put((holding.request_id, holding.name), holding)

    def _holding(
        self,
        request_id: RequestId,
        key: HandoffKey,
        kind: HoldingKind,
        groups: tuple[BlockGroup, ...],
        until: Deadline,
    ) -> Holding:
        return Holding(
            request_id=request_id,
            key=key,
            kind=kind,
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            groups=groups,
            until=until,
        )

    def _record(self, holding: Holding) -> None:
        name = (holding.request_id, holding.name)
        if name not in self._holdings:
            if len(self._holdings) >= self._max_holdings:
                self._forget(next(iter(self._holdings.values())))
            self._num_by_request[holding.request_id] += 1
        self._holdings[name] = holding
        self._queue.put(name, holding)

    def _forget(self, holding: Holding) -> None:
        del self._holdings[holding.request_id, holding.name]
        self._num_by_request[holding.request_id] -= 1
        if not self._num_by_request[holding.request_id]:
            del self._num_by_request[holding.request_id]

    def _encode(self, holding: Holding) -> tuple[ScriptCall, ...]:
        """Write the holding if this worker still has it, else clear it."""
        ownership, held = (keys.ownership(holding.request_id),), (keys.held(self._worker_id),)
        if (holding.request_id, holding.name) in self._holdings and not holding.until.is_past(self._clock):
            groups = json.dumps([[group.first_block, group.num_blocks] for group in holding.groups])
            ttl_ms = min(holding.until.remaining_ms(self._clock) or MAX_LIFETIME_MS, MAX_LIFETIME_MS)
            return (
                ScriptCall(script=RECORD_HOLDING, keys=ownership, args=(holding.name, groups, ttl_ms)),
                ScriptCall(script=ADD_HELD, keys=held, args=(holding.request_id, ttl_ms)),
            )
        clear = ScriptCall(script=CLEAR_HOLDINGS, keys=ownership, args=(holding.name,))
        if self._num_by_request[holding.request_id]:
            return (clear,)
        return (clear, ScriptCall(script=REMOVE_HELD, keys=held, args=(holding.request_id,)))

    async def _keep_reconciled(self) -> None:
        link = self._connection.link
        while True:
            await link.wait_until_up()
            num_interruptions = link.num_interruptions
            try:
                await self.reconcile()
            except UnavailableError as exc:
                logger.warning("block ownership not reconciled: %s", exc.message)
            await link.wait_for_interruption(num_interruptions)

"""A worker's side of the prefix index: tells Redis which blocks its prefix cache has, as it changes.

Redis gets a set of all hashes and a numbered stream of its changes, both written by one script, so the set is always
the sum of the stream. Where numbers are missing (Redis came back empty, too many changes while it was away) the worker
starts a new generation from a snapshot of its cache.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Protocol, Self

from weir.cluster import keys
from weir.cluster.connection import RedisConnection
from weir.cluster.owned_tasks import OwnedTasks
from weir.cluster.scripts import KV_PUBLISH, KV_RESET
from weir.cluster.wakeup import Wakeup
from weir.core.block_hash import BlockHash
from weir.core.errors import UnavailableError
from weir.core.worker import Incarnation, WorkerId

logger = logging.getLogger(__name__)

MAX_ENTRY_HASHES = 512
RENEWALS_PER_TTL = 3
RETRY_PAUSE_S = 0.1


class KvEvents(Protocol):
    """What has changed in a prefix cache: cleared, then `removed`, then `stored`."""

    @property
    def stored(self) -> Sequence[BlockHash]: ...
    @property
    def removed(self) -> Sequence[BlockHash]: ...
    @property
    def cleared(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    is_cleared: bool = False
    removed: tuple[BlockHash, ...] = ()
    stored: tuple[BlockHash, ...] = ()


class PendingChanges:
    """Changes that Redis does not have yet: the last word on each hash, at most `max_hashes` of them."""

    def __init__(self, max_hashes: int) -> None:
        self._max_hashes = max_hashes
        self._is_stored: dict[BlockHash, bool] = {}
        self._is_cleared = False
        self.has_overflowed = False

    def __bool__(self) -> bool:
        return self._is_cleared or bool(self._is_stored)

    def add(self, events: KvEvents) -> None:
        if events.cleared:
            self._is_cleared = True
            self._is_stored.clear()
        for is_stored, hashes in ((False, events.removed), (True, events.stored)):
            for block_hash in hashes:
                self._is_stored[block_hash] = is_stored
        if len(self._is_stored) > self._max_hashes:
            self.discard()
            self.has_overflowed = True

    def discard(self) -> None:
        self._is_stored.clear()
        self._is_cleared = self.has_overflowed = False

    def take(self, max_hashes: int) -> _Entry:
        """The oldest changes, as one entry."""
        taken = list(islice(self._is_stored.items(), max_hashes))
        entry = _Entry(
            is_cleared=self._is_cleared,
            removed=tuple(block_hash for block_hash, is_stored in taken if not is_stored),
            stored=tuple(block_hash for block_hash, is_stored in taken if is_stored),
        )
        for block_hash, _ in taken:
            del self._is_stored[block_hash]
        self._is_cleared = False
        return entry


class KvIndexPublisher:
    """An async context manager.

    Args:
        events: waits for changes and returns them; each change exactly once.
        snapshot: all hashes in the cache; what it shows may also still come as events.
        ttl_s: how long Redis keeps the index of a worker that says nothing.
        max_entries: of the stream; a reader that falls further behind reads the set again.
    """

    def __init__(
        self,
        connection: RedisConnection,
        worker_id: WorkerId,
        incarnation: Incarnation,
        *,
        events: Callable[[], Awaitable[KvEvents]],
        snapshot: Callable[[], Awaitable[Sequence[BlockHash]]],
        ttl_s: float = 60.0,
        max_entries: int = 2_000,
        max_pending_hashes: int = 100_000,
    ) -> None:
        self._connection = connection
        self._incarnation = incarnation
        self._keys = (keys.kv_blocks(worker_id), keys.kv_stream(worker_id))
        self._events = events
        self._snapshot = snapshot
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._pending = PendingChanges(max_pending_hashes)
        self._born = b""
        self._generation = 0
        self._number = 0
        self._is_current = False
        self._wakeup = Wakeup()
        self._tasks = OwnedTasks()
        self.num_resets = 0

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._tasks.start(self._collect())
        self._tasks.start(self._keep_published())
        self._tasks.start(self._watch_link())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._tasks.__aexit__(kind, error, traceback)

    async def _collect(self) -> None:
        while True:
            self._pending.add(await self._events())
            self._wakeup.set()

    async def _watch_link(self) -> None:
        """Look at once whether Redis still has the index when it comes back."""
        while True:
            await self._connection.link.wait_for_return()
            self._wakeup.set()

    async def _keep_published(self) -> None:
        self._wakeup.set()
        while True:
            await self._wakeup.wait(self._ttl_s / RENEWALS_PER_TTL)
            await self._connection.link.wait_until_up()
            try:
                await self._publish()
            except UnavailableError as exc:
                logger.debug("prefix index not published: %s", exc.message)
                await self._wakeup.wait(RETRY_PAUSE_S)
                self._wakeup.set()

    async def _publish(self) -> None:
        """Send what is pending, or renew the TTL; start over if Redis lacks something. Raises UnavailableError."""
        if self._pending.has_overflowed:
            self._is_current = False
        if self._is_current:
            await self._send_pending()
        if not self._is_current and await self._reset():
            await self._send_pending()

    async def _send_pending(self) -> None:
        if not self._pending:
            self._is_current = await self._send(_Entry())
        while self._is_current and self._pending:
            self._is_current = await self._send(self._pending.take(MAX_ENTRY_HASHES))

    async def _reset(self) -> bool:
        """Start a generation with a snapshot of the cache; False if a later incarnation publishes under this name."""
        self._pending.discard()
        hashes = await self._snapshot()
        args = (self._incarnation, self._born, self._generation + 1, self._max_entries, self._ttl_ms)
        is_accepted, *answer = await self._connection.run_script(KV_RESET, self._keys, args)
        if not is_accepted:
            logger.error("the prefix index of this worker is published by a later incarnation %s", answer[0].decode())
            return False
        self._generation, self._born, self._number = int(answer[0]), answer[1], 0
        self._is_current = True
        self.num_resets += 1
        for first in range(0, len(hashes), MAX_ENTRY_HASHES):
            self._is_current = await self._send(_Entry(stored=tuple(hashes[first : first + MAX_ENTRY_HASHES])))
            if not self._is_current:
                return False
        return True

    async def _send(self, entry: _Entry) -> bool:
        """Append one entry; an empty one only renews the TTL. False if Redis lacks the entries before it.

        Raises UnavailableError; then the entry may have been appended, so the index counts as unknown.
        """
        args = (
            self._incarnation,
            self._born,
            self._generation,
            self._number,
            self._max_entries,
            self._ttl_ms,
            "1" if entry.is_cleared else "",
            _join(entry.removed),
            _join(entry.stored),
        )
        try:
            is_accepted = await self._connection.run_script(KV_PUBLISH, self._keys, args)
        except UnavailableError:
            self._is_current = False
            raise
        if is_accepted and entry != _Entry():
            self._number += 1
        return bool(is_accepted)

    @property
    def _ttl_ms(self) -> int:
        return int(self._ttl_s * 1000)


def _join(hashes: Iterable[BlockHash]) -> bytes:
    return b"".join(hashes)

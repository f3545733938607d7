"""Which workers there are: each registers itself in Redis, each gateway keeps a snapshot.

A worker is dropped from the snapshot when it says that it leaves, when a later incarnation takes its name, or by rule
13: its registration lapsed while this process's own link to Redis was up for the whole TTL, and it does not answer a
direct call either. While Redis is away the snapshot stays as it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from weir.cluster import keys
from weir.cluster.connection import RedisConnection
from weir.cluster.owned_tasks import OwnedTasks
from weir.cluster.scripts import DEREGISTER, LIST_WORKERS, REGISTER
from weir.cluster.wakeup import Wakeup
from weir.core.errors import UnavailableError, WeirError
from weir.core.worker import Incarnation, WorkerId, WorkerInfo, WorkerLoad

logger = logging.getLogger(__name__)

HEARTBEATS_PER_TTL = 3
MAX_CHANGES = 1_000
LIST_PAUSE_S = 0.02
MAX_PROBES = 16
PARSE_BATCH = 64


class Registration:
    """A worker's own entry, kept alive by heartbeats; an async context manager that deregisters on exit.

    Args:
        info: called for each heartbeat; the worker id and incarnation never change.
        ttl_s: how long others believe in the worker without a heartbeat.
    """

    def __init__(self, connection: RedisConnection, info: Callable[[], WorkerInfo], *, ttl_s: float) -> None:
        self._connection = connection
        self._info = info
        self._ttl_s = ttl_s
        self._started = b""
        self._superseded_by: Incarnation | None = None
        self._wakeup = Wakeup()
        self._tasks = OwnedTasks()

    @property
    def superseded_by(self) -> Incarnation | None:
        """The later incarnation that holds this worker's name, or None: then this one does."""
        return self._superseded_by

    async def __aenter__(self) -> Self:
        """Does not wait for Redis if it is away."""
        await self._tasks.__aenter__()
        await self._heartbeat()
        self._tasks.start(self._keep_alive())
        self._tasks.start(self._watch_link())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._tasks.__aexit__(kind, error, traceback)
        finally:
            await self._deregister()

    def announce(self) -> None:
        """Send a heartbeat now: the worker drains, or its address has changed."""
        self._wakeup.set()

    async def _keep_alive(self) -> None:
        while True:
            await self._wakeup.wait(self._ttl_s / HEARTBEATS_PER_TTL)
            await self._heartbeat()

    async def _watch_link(self) -> None:
        """Register again as soon as Redis is back: it may have lost everything."""
        while True:
            await self._connection.link.wait_for_return()
            self._wakeup.set()

    async def _heartbeat(self) -> None:
        info = self._info()
        args = (
            info.worker_id,
            info.incarnation,
            self._started,
            info.to_json(),
            replace(info, load=WorkerLoad()).to_json(),
            int(self._ttl_s * 1000),
            MAX_CHANGES,
        )
        registration = [keys.worker(info.worker_id), keys.WORKER_INDEX, keys.WORKER_CHANGES]
        try:
            is_accepted, answer = await self._connection.run_script(REGISTER, registration, args)
        except UnavailableError as exc:
            logger.debug("heartbeat not sent: %s", exc.message)
            return
        if is_accepted:
            self._started = answer
            self._superseded_by = None
        elif self._superseded_by is None:
            self._superseded_by = Incarnation(answer.decode())
            logger.error("worker %s is registered by a later incarnation %s", info.worker_id, self._superseded_by)

    async def _deregister(self) -> None:
        info = self._info()
        registration = [keys.worker(info.worker_id), keys.WORKER_INDEX, keys.WORKER_CHANGES]
        args = (info.worker_id, info.incarnation, int(self._ttl_s * 1000), MAX_CHANGES)
        with suppress(UnavailableError):  # then the registration lapses
            await self._connection.run_script(DEREGISTER, registration, args)


@dataclass(frozen=True, slots=True)
class _Listed:
    """A worker as Redis has it. `text` is empty for one that left."""

    worker_id: WorkerId
    incarnation: Incarnation
    text: bytes


class WorkerDirectory:
    """A gateway's snapshot of all workers; an async context manager.

    Args:
        probe: a direct health call: True if the worker, in this incarnation, answers. Bounded here by
            `probe_timeout_s`; a WeirError or OSError is a failed probe.
        ttl_s: the workers' TTL: rule 13 asks that the link was up for so long.
    """

    def __init__(
        self,
        connection: RedisConnection,
        *,
        probe: Callable[[WorkerInfo], Awaitable[bool]],
        ttl_s: float,
        probe_timeout_s: float = 1.0,
    ) -> None:
        self._connection = connection
        self._probe = probe
        self._ttl_s = ttl_s
        self._probe_timeout_s = probe_timeout_s
        self._workers: dict[WorkerId, WorkerInfo] = {}
        self._texts: dict[WorkerId, bytes] = {}
        self._snapshot: tuple[WorkerInfo, ...] = ()
        self._absent: set[WorkerId] = set()
        self._probing: set[WorkerId] = set()
        self._probe_permits = asyncio.Semaphore(MAX_PROBES)
        self._last_change_id = b"0-0"
        self._revision = 0
        self._changed = asyncio.Event()
        self._tasks = OwnedTasks()

    async def __aenter__(self) -> Self:
        """Returns with the first snapshot, or without any if Redis is away."""
        await self._tasks.__aenter__()
        with suppress(UnavailableError):
            await self._refresh()
        self._tasks.start(self._follow())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._tasks.__aexit__(kind, error, traceback)

    def workers(self) -> tuple[WorkerInfo, ...]:
        """The newest snapshot, by worker id; draining workers are in it."""
        return self._snapshot

    def find_worker(self, worker_id: WorkerId) -> WorkerInfo | None:
        return self._workers.get(worker_id)

    @property
    def revision(self) -> int:
        """Grows with every change that `wait_for_change` reports."""
        return self._revision

    async def wait_for_change(self, seen_revision: int | None = None) -> int:
        """Until a worker joins, leaves or changes in anything but its load; returns the new revision.

        With `seen_revision` a change since then counts, too.
        """
        seen = self._revision if seen_revision is None else seen_revision
        while self._revision == seen:
            await self._changed.wait()
        return self._revision

    async def _follow(self) -> None:
        """Refresh after every change that is announced, and otherwise as often as heartbeats come."""
        block_s = self._ttl_s / HEARTBEATS_PER_TTL
        while True:
            await self._connection.link.wait_until_up()
            try:
                await self._refresh()
                await asyncio.sleep(LIST_PAUSE_S)  # so that many changes in a row cost one refresh
                await self._connection.read_blocking(
                    *("XREAD", "BLOCK", max(1, int(block_s * 1000)), "STREAMS"),
                    *(keys.WORKER_CHANGES, self._last_change_id),
                    block_s=block_s,
                )
            except UnavailableError as exc:
                logger.debug("workers not refreshed: %s", exc.message)
                await asyncio.sleep(LIST_PAUSE_S)

    async def _refresh(self) -> None:
        """Raises UnavailableError if Redis is away; then nothing has changed."""
        listing = [keys.WORKER_INDEX, keys.WORKER_CHANGES]
        reply = await self._connection.run_script(LIST_WORKERS, listing, [keys.WORKER_PREFIX])
        self._last_change_id = reply[0]
        listed = list(_listed(reply))
        is_changed = False
        for index, entry in enumerate(listed):
            is_changed |= self._take(entry)
            if index % PARSE_BATCH == PARSE_BATCH - 1:
                await asyncio.sleep(0)
        listed_ids = {entry.worker_id for entry in listed}
        self._absent = self._workers.keys() - listed_ids
        for worker_id in self._texts.keys() - self._workers.keys() - listed_ids:
            del self._texts[worker_id]
        self._publish(is_changed)
        if self._connection.link.has_been_up_for(self._ttl_s):
            for worker_id in self._absent - self._probing:
                self._probing.add(worker_id)
                self._tasks.start(self._examine(self._workers[worker_id]))

    def _take(self, entry: _Listed) -> bool:
        """Bring one worker up to date; True if more than its load has changed."""
        known = self._workers.get(entry.worker_id)
        if not entry.text:
            if known is None or known.incarnation != entry.incarnation:
                return False
            self._remove(known, "left")
            return True
        if self._texts.get(entry.worker_id) == entry.text:
            return False
        try:
            info = WorkerInfo.from_json(entry.text)
        except ValueError as exc:
            logger.warning("worker %s registers in a form that this version does not know: %s", entry.worker_id, exc)
            self._texts[entry.worker_id] = entry.text
            return False
        self._workers[entry.worker_id] = info
        self._texts[entry.worker_id] = entry.text
        if known is None or known.incarnation != info.incarnation:
            logger.info("worker %s (%s) joined as %s", info.worker_id, info.incarnation, info.role.value)
        return known is None or replace(known, load=info.load) != info

    async def _examine(self, info: WorkerInfo) -> None:
        """The second half of rule 13, for a worker whose registration has lapsed."""
        try:
            async with self._probe_permits:
                is_alive = False
                with suppress(WeirError, OSError, TimeoutError):
                    async with asyncio.timeout(self._probe_timeout_s):
                        is_alive = await self._probe(info)
            known = self._workers.get(info.worker_id)
            is_same = known is not None and known.incarnation == info.incarnation
            is_lapsed = info.worker_id in self._absent and self._connection.link.has_been_up_for(self._ttl_s)
            if is_same and is_lapsed and not is_alive:
                self._remove(info, "is lost: no heartbeat, and no answer to a direct call")
                self._publish(True)
        finally:
            self._probing.discard(info.worker_id)

    def _remove(self, info: WorkerInfo, reason: str) -> None:
        logger.info("worker %s (%s) %s", info.worker_id, info.incarnation, reason)
        del self._workers[info.worker_id]
        self._texts.pop(info.worker_id, None)
        self._absent.discard(info.worker_id)

    def _publish(self, is_changed: bool) -> None:
        self._snapshot = tuple(self._workers[worker_id] for worker_id in sorted(self._workers))
        if is_changed:
            self._revision += 1
            self._changed.set()
            self._changed = asyncio.Event()


def _listed(reply: list[bytes]) -> Iterator[_Listed]:
    for worker_id, incarnation, text in zip(reply[1::3], reply[2::3], reply[3::3], strict=True):
        yield _Listed(WorkerId(worker_id.decode()), Incarnation(incarnation.decode()), text)

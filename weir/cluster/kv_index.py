"""A gateway's side of the prefix index: follows what all workers publish, and says who has a prompt's first blocks.

Reads each worker's set once and its stream from there on, all streams with one blocking read. An entry whose number is
not the next one means that some were missed: the set is read again. While Redis is away the index stays as it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from weir.cluster import keys
from weir.cluster.connection import RedisConnection, ScriptCall
from weir.cluster.owned_tasks import OwnedTasks
from weir.cluster.prefix_map import PrefixMap
from weir.cluster.scripts import KV_HEAD
from weir.core.block_hash import HASH_BYTES, BlockHash
from weir.core.errors import UnavailableError
from weir.core.worker import Incarnation, WorkerId, WorkerInfo

logger = logging.getLogger(__name__)

READ_BLOCK_S = 0.25
READ_PAUSE_S = 0.01
LOAD_PAUSE_S = 0.5
ENTRIES_PER_READ = 16
HASHES_PER_SCAN = 1_000
BLOCKS_PER_PURGE = 5_000


@dataclass(frozen=True, slots=True, order=True)
class _Position:
    """Id of a stream entry."""

    generation: int
    number: int

    @classmethod
    def parse(cls, raw: bytes) -> _Position:
        generation, _, number = raw.partition(b"-")
        return cls(int(generation), int(number))

    def __str__(self) -> str:
        return f"{self.generation}-{self.number}"


@dataclass(slots=True)
class _Followed:
    """One worker's stream. `position` is the last entry in the map; None until its set was read."""

    incarnation: Incarnation
    position: _Position | None = None


class WorkerSource(Protocol):
    """The part of `worker_registry.WorkerDirectory` that the index follows."""

    def workers(self) -> tuple[WorkerInfo, ...]: ...


class KvIndex:
    """An async context manager.

    Args:
        directory: says which workers there are, in which incarnation; others are not followed.
        max_entries: most pairs of worker and block in memory (some 200 bytes each).
    """

    def __init__(self, connection: RedisConnection, directory: WorkerSource, *, max_entries: int = 2_000_000) -> None:
        self._connection = connection
        self._directory = directory
        self._map = PrefixMap(max_entries)
        self._followed: dict[WorkerId, _Followed] = {}
        self._next_load_s = 0.0
        self._tasks = OwnedTasks()
        self.num_loads = 0
        """How often a worker's set was read: once for each start of a worker, and once for each gap."""

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._tasks.start(self._follow())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._tasks.__aexit__(kind, error, traceback)

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """How many leading blocks of a prompt each worker has; workers that have none are left out."""
        return self._map.match(hashes)

    def num_blocks(self, worker_id: WorkerId) -> int:
        """How many blocks of a worker the index knows."""
        return self._map.num_blocks(worker_id)

    @property
    def num_untracked(self) -> int:
        """Blocks that were not taken in because the index was full."""
        return self._map.num_untracked

    async def _follow(self) -> None:
        while True:
            self._keep_to_directory()
            self._map.purge(BLOCKS_PER_PURGE)
            try:
                await self._load_new()
                await self._read()
            except UnavailableError as exc:
                logger.debug("prefix index not followed: %s", exc.message)
                self._next_load_s = 0.0
                await self._connection.link.wait_until_up()
            await asyncio.sleep(READ_PAUSE_S)  # so that many small entries cost one read

    def _keep_to_directory(self) -> None:
        """Forget workers that left and earlier incarnations; begin with new ones."""
        incarnations = {info.worker_id: info.incarnation for info in self._directory.workers()}
        for worker_id, followed in list(self._followed.items()):
            if incarnations.get(worker_id) != followed.incarnation:
                self._map.drop(worker_id)
                del self._followed[worker_id]
        for worker_id, incarnation in incarnations.items():
            if worker_id not in self._followed:
                self._followed[worker_id] = _Followed(incarnation)
                self._next_load_s = 0.0

    async def _load_new(self) -> None:
        """Read the sets of workers that publish and are not followed yet. Raises UnavailableError."""
        waiting = [worker_id for worker_id, followed in self._followed.items() if followed.position is None]
        now_s = asyncio.get_running_loop().time()
        if not waiting or now_s < self._next_load_s:
            return
        self._next_load_s = now_s + LOAD_PAUSE_S
        heads = await self._connection.run_scripts(
            [ScriptCall(script=KV_HEAD, keys=_keys(worker_id)) for worker_id in waiting]
        )
        for worker_id, head in zip(waiting, heads, strict=True):
            if isinstance(head, UnavailableError):
                raise head
            followed = self._followed[worker_id]
            if head is not None and head[1].decode() == followed.incarnation:
                await self._load(worker_id, followed, _Position.parse(head[0]))

    async def _load(self, worker_id: WorkerId, followed: _Followed, position: _Position) -> None:
        """Read a set in pieces, then follow from `position`, which is older: entries may be applied twice."""
        self._map.drop(worker_id)
        blocks, _ = _keys(worker_id)
        cursor = 0
        while True:
            cursor, found = await self._connection.execute("SSCAN", blocks, cursor, "COUNT", HASHES_PER_SCAN)
            self._map.add(worker_id, found)
            if not cursor:
                break
        followed.position = position
        self.num_loads += 1

    async def _read(self) -> None:
        """Wait for entries of any stream and apply them. Raises UnavailableError."""
        ready = [(worker_id, followed) for worker_id, followed in self._followed.items() if followed.position]
        if not ready:
            await asyncio.sleep(READ_BLOCK_S)
            return
        by_stream = {_keys(worker_id)[1].encode(): (worker_id, followed) for worker_id, followed in ready}
        reply = await self._connection.read_blocking(
            *("XREAD", "COUNT", ENTRIES_PER_READ, "BLOCK", int(READ_BLOCK_S * 1000), "STREAMS"),
            *by_stream,
            *(str(followed.position) for _, followed in ready),
            block_s=READ_BLOCK_S,
        )
        for stream, entries in reply or ():
            worker_id, followed = by_stream[stream]
            for raw_position, fields in entries:
                if not self._apply(worker_id, followed, _Position.parse(raw_position), fields):
                    followed.position = None
                    self._next_load_s = 0.0
                    break
            await asyncio.sleep(0)

    def _apply(self, worker_id: WorkerId, followed: _Followed, position: _Position, fields: dict[bytes, Any]) -> bool:
        """Bring the map up to one entry; False if it does not follow the one before."""
        last = followed.position
        assert last is not None
        is_next = position == _Position(last.generation, last.number + 1)
        is_start = position.number == 0
        if not (is_next or is_start) or fields[b"i"].decode() != followed.incarnation:
            return False
        if fields.get(b"c"):
            self._map.drop(worker_id)
        self._map.remove(worker_id, _split(fields.get(b"r", b"")))
        self._map.add(worker_id, _split(fields.get(b"s", b"")))
        followed.position = position
        return True


def _keys(worker_id: WorkerId) -> tuple[str, str]:
    return keys.kv_blocks(worker_id), keys.kv_stream(worker_id)


def _split(hashes: bytes) -> list[BlockHash]:
    return [BlockHash(hashes[at : at + HASH_BYTES]) for at in range(0, len(hashes), HASH_BYTES)]

"""Values and small tools that the tests of the cluster floor share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weir.cluster.connection import RedisConnection
from weir.cluster.kv_publisher import KvIndexPublisher
from weir.core.block_hash import BlockHash
from weir.core.kv_layout import KvLayout
from weir.core.worker import Incarnation, Role, WorkerId, WorkerInfo, WorkerLoad, WorkerState

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4, kv_dtype="float32")


class ManualClock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def worker_info(worker_id: str = "d1", incarnation: str = "a", **changes: Any) -> WorkerInfo:
    fields: dict[str, Any] = {
        "worker_id": WorkerId(worker_id),
        "incarnation": Incarnation(incarnation),
        "role": Role.DECODE,
        "state": WorkerState.READY,
        "model": "tiny",
        "control_address": "127.0.0.1:9",
        "transfer_address": "",
        "layout": LAYOUT,
        "fingerprint": LAYOUT.fingerprint("weights"),
        "max_model_len": 128,
        "load": WorkerLoad(),
    }
    return WorkerInfo(**{**fields, **changes})


def block_hashes(first: int, count: int) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(index.to_bytes(16, "big")) for index in range(first, first + count))


def connect(url: str, **bounds: Any) -> RedisConnection:
    """A connection with bounds scaled down."""
    fast: dict[str, Any] = {"connect_timeout_s": 0.3, "call_timeout_s": 0.5, "check_interval_s": 0.05}
    return RedisConnection.from_url(url, **{**fast, **bounds})


async def until(is_true: Callable[[], Any], timeout_s: float = 10.0) -> None:
    """Until something that another process brings about, and that raises no event here, is so."""
    async with asyncio.timeout(timeout_s):
        while not is_true():  # noqa: ASYNC110 - another process has no event here
            await asyncio.sleep(0.002)


@dataclass(frozen=True, kw_only=True)
class Events:
    stored: Sequence[BlockHash] = ()
    removed: Sequence[BlockHash] = ()
    cleared: bool = False


class Cache:
    """Stands for an engine's prefix cache: its blocks, and the news of them."""

    def __init__(self, blocks: Sequence[BlockHash] = ()) -> None:
        self.blocks = set(blocks)
        self._news: asyncio.Queue[Events] = asyncio.Queue()

    def change(self, events: Events) -> None:
        if events.cleared:
            self.blocks.clear()
        self.blocks.difference_update(events.removed)
        self.blocks.update(events.stored)
        self._news.put_nowait(events)

    async def events(self) -> Events:
        return await self._news.get()

    async def snapshot(self) -> tuple[BlockHash, ...]:
        return tuple(self.blocks)


def publish(
    connection: RedisConnection,
    cache: Cache,
    worker_id: str = "d1",
    incarnation: str = "a",
    ttl_s: float = 60.0,
    **bounds: int,
) -> KvIndexPublisher:
    return KvIndexPublisher(
        connection,
        WorkerId(worker_id),
        Incarnation(incarnation),
        events=cache.events,
        snapshot=cache.snapshot,
        ttl_s=ttl_s,
        **bounds,
    )


async def says_yes(info: WorkerInfo) -> bool:
    return True

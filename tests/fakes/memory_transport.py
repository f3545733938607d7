"""A byte transport inside one process, which delivers in pieces and breaks on purpose.

It behaves as uvloop's does: written memory is only referenced until it is flushed to the "kernel", the protocol is
paused while anything is not flushed, bytes arrive in pieces of any size. It notices memory that changed between write
and flush. Faults come from a schedule that a seed makes.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from xxhash import xxh3_64_intdigest

from kv_transfer.connection import Connection


@dataclass
class Faults:
    """Chances of one write or one delivery, each from 0 to 1; all 0 is a perfect link."""

    seed: int = 0
    lose_write: float = 0.0
    repeat_write: float = 0.0
    flip_bit: float = 0.0
    break_link: float = 0.0
    stall_s: float = 0.0  # longest pause, of which one comes in 50 deliveries
    max_delay_s: float = 0.0
    max_piece_bytes: int = 1 << 20
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def happens(self, chance: float) -> bool:
        return chance > 0 and self.rng.random() < chance


class MemoryEndpoint(asyncio.Transport):
    """One side's transport."""

    def __init__(self, network: MemoryNetwork, connection: Connection) -> None:
        super().__init__()
        self.network = network
        self.connection = connection
        self.peer: MemoryEndpoint | None = None
        self.is_lost = False
        self.is_stopped = False  # reads nothing
        self.is_mute = False  # writes nothing
        self._unflushed: deque[tuple[memoryview, int]] = deque()
        self._wire: deque[bytes] = deque()  # flushed by this side, not read by the other
        self._is_paused = False
        self._is_flushing = self._is_delivering = self._is_ending = False

    # asyncio.Transport

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return self.is_lost

    def write(self, data: Any) -> None:
        self.writelines([data])

    def writelines(self, list_of_data: Any) -> None:
        faults = self.network.faults
        if self.is_lost or self.is_mute or faults.happens(faults.lose_write):
            return
        views = [memoryview(each) for each in list_of_data]
        for _ in range(2 if faults.happens(faults.repeat_write) else 1):
            self._unflushed.extend((view, xxh3_64_intdigest(view)) for view in views)
        if not self._is_paused:
            self._is_paused = True
            self.connection.pause_writing()
        self._schedule_flush()

    def close(self) -> None:
        self._is_ending = True
        self._end_if_delivered()

    def abort(self) -> None:
        self._lose(None)
        if self.peer is not None:
            self.peer._lose(ConnectionResetError("reset by peer"))

    # The network

    def _lose(self, exc: Exception | None) -> None:
        if not self.is_lost:
            self.is_lost = True
            asyncio.get_running_loop().call_soon(self._report_lost, exc)

    def _report_lost(self, exc: Exception | None) -> None:
        self._check_unchanged()
        self._unflushed.clear()
        self.connection.connection_lost(exc)

    def _end_if_delivered(self) -> None:
        if self._is_ending and not self._unflushed and not self._wire:
            self.abort()

    def _check_unchanged(self) -> None:
        for view, digest in self._unflushed:
            if xxh3_64_intdigest(view) != digest:
                self.network.violations.append("memory changed while it was in flight")

    def _schedule_flush(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            self.network.later(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        if self.is_lost:
            return
        if self.peer is not None and sum(map(len, self._wire)) > self.network.kernel_bytes:
            return  # until the other side has read something
        self._check_unchanged()
        self._wire.extend(bytes(view) for view, _ in self._unflushed)
        self._unflushed.clear()
        self._schedule_delivery()
        if self._is_paused:
            self._is_paused = False
            self.connection.resume_writing()

    def _schedule_delivery(self) -> None:
        if not self._is_delivering and self._wire:
            self._is_delivering = True
            self.network.later(self._deliver)

    def _deliver(self) -> None:
        self._is_delivering = False
        peer = self.peer
        if peer is None or peer.is_lost or self.is_lost:
            return
        if peer.is_stopped:
            self._is_delivering = True
            asyncio.get_running_loop().call_later(0.01, self._deliver)
            return
        faults = self.network.faults
        if faults.happens(faults.break_link):
            self.abort()
            return
        data = bytearray(self._wire.popleft())
        num_bytes = faults.rng.randint(1, min(len(data), faults.max_piece_bytes))
        if num_bytes < len(data):
            self._wire.appendleft(bytes(data[num_bytes:]))
        data = data[:num_bytes]
        if faults.happens(faults.flip_bit):
            data[faults.rng.randrange(num_bytes)] ^= 1 << faults.rng.randrange(8)
        while data and not peer.is_lost:
            buffer = peer.connection.get_buffer(-1)
            size = min(len(buffer), len(data))
            buffer[:size] = data[:size]
            del data[:size]
            peer.connection.buffer_updated(size)
        if self._unflushed:
            self._schedule_flush()
        self._schedule_delivery()
        self._end_if_delivered()


@dataclass
class MemoryListener:
    """See `kv_transfer.transport.Listener`."""

    network: MemoryNetwork
    address: str

    async def close(self) -> None:
        del self.network.listeners[self.address]


class MemoryNetwork:
    """See `kv_transfer.transport.Transport`; addresses are any text. Holds every connection ever made."""

    def __init__(self, faults: Faults | None = None, kernel_bytes: int = 1 << 18) -> None:
        self.faults = faults or Faults()
        self.kernel_bytes = kernel_bytes
        self.listeners: dict[str, Callable[[], Connection]] = {}
        self.endpoints: list[MemoryEndpoint] = []
        self.violations: list[str] = []

    def later(self, callback: Callable[[], None]) -> None:
        faults = self.faults
        delay_s = faults.rng.random() * faults.max_delay_s
        if faults.stall_s and faults.happens(0.02):
            delay_s = faults.rng.random() * faults.stall_s
        asyncio.get_running_loop().call_later(delay_s, callback)

    async def connect(self, address: str, make_connection: Callable[[], Connection]) -> Connection:
        if address not in self.listeners:
            raise ConnectionRefusedError(f"nobody listens on {address}")
        near = MemoryEndpoint(self, make_connection())
        far = MemoryEndpoint(self, self.listeners[address]())
        near.peer, far.peer = far, near
        self.endpoints += [near, far]
        for endpoint in (far, near):
            endpoint.connection.connection_made(endpoint)
        return near.connection

    async def listen(self, address: str, make_connection: Callable[[], Connection]) -> MemoryListener:
        self.listeners[address] = make_connection
        return MemoryListener(self, address)

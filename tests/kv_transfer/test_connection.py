"""One multiplexed connection: turns, flushes, signs of life, and what it does with a peer that breaks the rules."""

from __future__ import annotations

import asyncio
import random

import pytest

from kv_transfer.connection import MAX_QUEUED_FRAMES, YIELD_BYTES, Connection
from kv_transfer.framing import encode_frame
from kv_transfer.handshake import SinkHandshake, SourceHandshake
from kv_transfer.producer import OutgoingFrame
from kv_transfer.settings import ConnectionTiming
from kv_transfer.stats import TransferStats
from protos.common_pb2 import HandoffKey
from protos.kv_transfer_pb2 import Blocks, Credit, Frame
from tests.fakes.memory_transport import MemoryEndpoint, MemoryNetwork
from tests.fakes.virtual_loop import run_virtual, virtual_clock
from tests.kv_transfer.identities import make_identity
from weir.core.errors import HopFailedError, TransferProtocolError, WorkerLostError
from weir.engine.block_access import HostPiece

TIMING = ConnectionTiming(heartbeat_s=1.0, idle_timeout_s=5.0, handshake_timeout_s=3.0)


class Recorder:
    """A handler that keeps what it hears; payload of hand-off `x` goes to `slab`."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.payloads: list[bytes | None] = []
        self.lost: list[HopFailedError] = []
        self.num_ready = 0
        self.slab = bytearray(1 << 20)

    def connection_ready(self, connection: Connection) -> None:
        self.num_ready += 1

    def payload_target(self, connection: Connection, frame: Frame, size_bytes: int) -> memoryview | None:
        if frame.blocks.key.handoff_id == "refused":
            raise TransferProtocolError("refused")
        return memoryview(self.slab)[:size_bytes] if frame.blocks.key.handoff_id == "x" else None

    def frame_received(self, connection: Connection, frame: Frame, payload: memoryview | None) -> None:
        self.frames.append(frame)
        self.payloads.append(None if payload is None else bytes(payload))

    def connection_lost(self, connection: Connection, failure: HopFailedError) -> None:
        self.lost.append(failure)


class Bulk:
    """A producer of `num_frames` frames."""

    def __init__(self, name: str, num_frames: int, payload: bytes = b"p" * 1000) -> None:
        self.name = name
        self.num_left = num_frames
        self.num_flushed = 0
        self.payload = payload

    def next_frame(self) -> OutgoingFrame | None:
        if not self.num_left:
            return None
        self.num_left -= 1
        frame = Frame(blocks=Blocks(key=HandoffKey(handoff_id=self.name)))
        return OutgoingFrame(frame, HostPiece(memoryview(self.payload)))

    def frame_flushed(self, outgoing: OutgoingFrame) -> None:
        self.num_flushed += 1


class Pair:
    """A sink and a source connection over a memory link."""

    def __init__(self, *, sink_secret: bytes | None = None, kernel_bytes: int = 1 << 30) -> None:
        self.network = MemoryNetwork(kernel_bytes=kernel_bytes)
        self.near, self.far = Recorder(), Recorder()
        self.stats = TransferStats()
        identity = make_identity("d") if sink_secret is None else make_identity("d", secret=sink_secret)
        self.sink = self._make(self.near, SinkHandshake(identity, wants_checksums=True))
        self.source = self._make(self.far, SourceHandshake(make_identity("p"), wants_checksums=True, lease_s=30.0))

    def _make(self, recorder: Recorder, handshake: SinkHandshake | SourceHandshake) -> Connection:
        return Connection(
            recorder,
            handshake,
            name="peer",
            transport_name="memory",
            timing=TIMING,
            stats=self.stats,
            clock=virtual_clock,
        )

    async def open(self) -> None:
        await self.network.listen("p", lambda: self.source)
        await self.network.connect("p", lambda: self.sink)
        await self.sink.wait_ready()
        await asyncio.sleep(0.01)
        assert self.near.num_ready == self.far.num_ready == 1

    def endpoint(self, connection: Connection) -> MemoryEndpoint:
        return next(each for each in self.network.endpoints if each.connection is connection)


def credit(size_bytes: int) -> Frame:
    return Frame(credit=Credit(key=HandoffKey(handoff_id="x"), size_bytes=size_bytes))


def test_frames_arrive_in_order_and_payload_where_the_handler_says() -> None:
    async def main() -> None:
        pair = Pair()
        await pair.open()
        payload = random.Random(0).randbytes(5000)
        pair.source.wake(Bulk("x", 1, payload))
        pair.source.wake(Bulk("y", 1, payload))
        for size in range(3):
            pair.sink.send(credit(size))
        await asyncio.sleep(0.1)
        assert pair.near.payloads == [payload, None]
        assert bytes(pair.near.slab[:5000]) == payload
        assert [frame.credit.size_bytes for frame in pair.far.frames] == [0, 1, 2]
        assert pair.stats.bytes_by_transport == {"memory": 4 * 5000}, "both ends count into one here"

    run_virtual(main())


def test_producers_take_turns_frame_by_frame() -> None:
    async def main() -> None:
        pair = Pair()
        await pair.open()
        for name, num_frames in (("a", 5), ("b", 2), ("c", 3)):
            pair.source.wake(Bulk(name, num_frames))
        await asyncio.sleep(0.1)
        assert "".join(frame.blocks.key.handoff_id for frame in pair.near.frames) == "abcabcacaa"

    run_virtual(main())


def test_a_producer_without_credit_holds_up_nobody_and_comes_back_when_woken() -> None:
    async def main() -> None:
        pair = Pair()
        await pair.open()
        blocked, busy = Bulk("a", 0), Bulk("b", 3)
        pair.source.wake(blocked)
        pair.source.wake(busy)
        await asyncio.sleep(0.1)
        blocked.num_left = 1
        pair.source.wake(blocked)
        pair.source.wake(blocked)
        await asyncio.sleep(0.1)
        assert "".join(frame.blocks.key.handoff_id for frame in pair.near.frames) == "bbba"

    run_virtual(main())


def test_control_frames_go_before_bulk() -> None:
    async def main() -> None:
        pair = Pair()
        await pair.open()
        pair.source.wake(Bulk("a", 50))
        pair.source.send(credit(1))
        await asyncio.sleep(0.1)
        assert pair.near.frames[0].WhichOneof("body") == "credit"

    run_virtual(main())


def test_a_frame_is_flushed_when_the_kernel_has_it_and_not_before() -> None:
    async def main() -> None:
        pair = Pair(kernel_bytes=1500)
        await pair.open()
        pair.endpoint(pair.sink).is_stopped = True
        bulk = Bulk("x", 10)
        pair.source.wake(bulk)
        await asyncio.sleep(0.5)
        assert bulk.num_left == 7, "one frame at a time waits in this process"
        assert bulk.num_flushed == 2
        pair.endpoint(pair.sink).is_stopped = False
        await asyncio.sleep(0.5)
        assert bulk.num_flushed == 10

    run_virtual(main())


def test_what_was_not_flushed_is_over_with_the_connection() -> None:
    async def main() -> None:
        pair = Pair(kernel_bytes=1500)
        await pair.open()
        pair.endpoint(pair.sink).is_stopped = True
        bulk = Bulk("x", 10)
        pair.source.wake(bulk)
        await asyncio.sleep(0.5)
        pair.source.close(WorkerLostError("enough"))
        assert bulk.num_flushed == 2, "the transport may still look at it"
        await asyncio.sleep(0.1)
        assert bulk.num_flushed == 3
        assert [str(error) for error in pair.far.lost] == ["enough"]
        assert not pair.source.is_open

    run_virtual(main())


def test_a_writable_socket_does_not_starve_the_loop() -> None:
    class Eager(asyncio.Transport):
        """Takes everything at once, as a socket does while its buffer has room."""

        def __init__(self) -> None:
            super().__init__()
            self.num_bytes = 0

        def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
            pass

        def write(self, data: object) -> None:
            self.num_bytes += memoryview(data).nbytes  # type: ignore[arg-type]

        def writelines(self, list_of_data: object) -> None:
            for data in list_of_data:  # type: ignore[attr-defined]
                self.write(data)

        def abort(self) -> None:
            pass

    async def main() -> None:
        pair = Pair()
        eager = Eager()
        pair.source.connection_made(eager)
        pair.source.wake(Bulk("x", 100, b"p" * (100 << 10)))
        most = 0
        while eager.num_bytes < 100 * (100 << 10):
            before = eager.num_bytes
            await asyncio.sleep(0)
            most = max(most, eager.num_bytes - before)
        assert most < YIELD_BYTES + (101 << 10)
        pair.source.connection_lost(None)

    run_virtual(main())


def test_after_discard_no_byte_of_that_hand_off_lands_anywhere() -> None:
    async def main() -> None:
        pair = Pair()
        await pair.open()
        pair.network.faults.max_piece_bytes = 1000
        pair.network.faults.max_delay_s = 0.01
        pair.source.wake(Bulk("x", 1, b"p" * 50_000))
        await asyncio.sleep(0.2)
        pair.sink.discard_payload(lambda frame: frame.blocks.key.handoff_id == "y")
        await asyncio.sleep(0.02)
        num_written = pair.near.slab.count(b"p")
        assert 1000 < num_written < 40_000
        await asyncio.sleep(0.02)
        assert pair.near.slab.count(b"p") > num_written, "another hand-off's discard changes nothing"
        num_written = pair.near.slab.count(b"p")
        pair.sink.discard_payload(lambda frame: frame.blocks.key.handoff_id == "x")
        await asyncio.sleep(5.0)
        assert pair.near.slab.count(b"p") == num_written
        assert pair.near.payloads == [None]
        assert pair.sink.is_open

    run_virtual(main())


def test_an_idle_pair_stays_open_by_its_heartbeats() -> None:
    async def main() -> None:
        pair = Pair()
        await pair.open()
        await asyncio.sleep(120.0)
        assert pair.sink.is_open
        assert pair.source.is_open
        assert pair.near.frames == pair.far.frames == []

    run_virtual(main())


def test_a_stopped_peer_is_noticed_within_the_idle_time_out() -> None:
    async def main() -> None:
        pair = Pair()
        await pair.open()
        pair.endpoint(pair.source).is_stopped = True
        pair.endpoint(pair.source).is_mute = True
        await asyncio.sleep(TIMING.idle_timeout_s + 2 * TIMING.heartbeat_s)
        [failure] = pair.near.lost
        assert isinstance(failure, WorkerLostError)
        assert "silent" in failure.message

    run_virtual(main())


def test_a_handshake_that_does_not_end_is_ended() -> None:
    async def main() -> None:
        pair = Pair()
        await pair.network.listen("p", lambda: pair.source)
        connection = await pair.network.connect("p", lambda: pair.sink)
        for endpoint in pair.network.endpoints:
            endpoint.is_stopped = True
        with pytest.raises(WorkerLostError, match="handshake"):
            await connection.wait_ready()
        assert len(pair.near.lost) == 1

    run_virtual(main())


def test_a_wrong_secret_is_refused_on_both_sides() -> None:
    async def main() -> None:
        pair = Pair(sink_secret=b"wrong")
        with pytest.raises(TransferProtocolError, match="secret"):
            await pair.open()
        await asyncio.sleep(0.1)
        assert "secret" in pair.far.lost[0].message
        assert pair.far.num_ready == pair.near.num_ready == 0

    run_virtual(main())


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(100), random.Random(0).randbytes(5000)]
)
def test_garbage_closes_the_connection_only(garbage: bytes) -> None:
    async def main() -> None:
        pair = Pair()
        await pair.open()
        pair.endpoint(pair.sink).write(garbage)
        await asyncio.sleep(0.1)
        assert isinstance(pair.far.lost[0], TransferProtocolError)
        assert isinstance(pair.near.lost[0], WorkerLostError)

    run_virtual(main())


def test_payload_before_the_handshake_is_refused() -> None:
    async def main() -> None:
        pair = Pair()
        pair.source.connection_made(MemoryEndpoint(pair.network, pair.source))
        data = encode_frame(credit(1), 10) + bytes(10)
        pair.source.get_buffer(-1)[: len(data)] = data
        pair.source.buffer_updated(len(data))
        await asyncio.sleep(0.1)
        assert "before the handshake" in pair.far.lost[0].message

    run_virtual(main())


def test_what_the_handler_refuses_closes_the_connection() -> None:
    async def main() -> None:
        pair = Pair()
        await pair.open()
        pair.source.wake(Bulk("refused", 1))
        await asyncio.sleep(0.1)
        assert [str(error) for error in pair.near.lost] == ["refused"]
        assert not pair.sink.is_open

    run_virtual(main())


def test_a_peer_that_never_reads_control_frames_is_given_up() -> None:
    async def main() -> None:
        pair = Pair(kernel_bytes=100)
        await pair.open()
        pair.endpoint(pair.source).is_stopped = True
        for _ in range(MAX_QUEUED_FRAMES + 100):
            pair.sink.send(credit(1))
        await asyncio.sleep(0.1)
        assert "does not read" in pair.near.lost[0].message

    run_virtual(main())


def test_a_closed_connection_takes_anything_and_does_nothing() -> None:
    async def main() -> None:
        pair = Pair()
        await pair.open()
        pair.sink.close(WorkerLostError("first"))
        pair.sink.close(WorkerLostError("second"))
        pair.sink.send(credit(1))
        pair.sink.wake(Bulk("x", 1))
        pair.sink.discard_payload(lambda _: True)
        await asyncio.sleep(0.1)
        assert [str(error) for error in pair.near.lost] == ["first"]
        assert pair.far.frames == []

    run_virtual(main())


def test_a_connection_closed_before_it_is_made_never_opens() -> None:
    async def main() -> None:
        pair = Pair()
        pair.sink.close(WorkerLostError("not needed"))
        await pair.network.listen("p", lambda: pair.source)
        await pair.network.connect("p", lambda: pair.sink)
        with pytest.raises(WorkerLostError, match="not needed"):
            await pair.sink.wait_ready()

    run_virtual(main())

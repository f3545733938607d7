"""Whole hand-offs over real sockets, TCP and Unix, on uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from kv_transfer.handshake import TransferIdentity
from kv_transfer.offer import Offer
from kv_transfer.receiver import TransferClient
from kv_transfer.sender import TransferServer
from kv_transfer.settings import ConnectionTiming, ReceiverConfig, SenderConfig
from kv_transfer.tcp import SocketTransport
from kv_transfer.transfer_state import EndReason, Received, Seal
from tests.fakes.kv_blocks import FakeSink, FakeSource, tokens_of
from tests.kv_transfer.identities import FIRST_TOKEN, LAYOUT, make_identity, make_key, with_block_size
from weir.core.deadline import Deadline
from weir.core.errors import (
    ConfigError,
    DeadlineExceededError,
    FingerprintMismatchError,
    HandoffError,
    HandoffLostError,
    TransferProtocolError,
    WorkerLostError,
    WrongIncarnationError,
)
from weir.core.kv_layout import KvLayout
from weir.core.request import HandoffKey
from weir.engine.block_access import HostPiece

FAST = ConnectionTiming(heartbeat_s=0.1, idle_timeout_s=0.6, handshake_timeout_s=0.5)
BIG = KvLayout(num_layers=8, num_kv_heads=4, head_dim=64, block_size=16, kv_dtype="float32")  # 256 KiB a block


@pytest.fixture(params=["tcp", "unix"])
def listen(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "tcp://127.0.0.1:0" if request.param == "tcp" else f"unix://{tmp_path}/kv.sock"


class NoticingSink(FakeSink):
    """Says when block 20 is asked for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.is_touched = asyncio.Event()

    def target(self, block_index: int, slab_offset: int, size_bytes: int) -> HostPiece | None:
        if block_index == 20:
            self.is_touched.set()
        return super().target(block_index, slab_offset, size_bytes)


class Workers:
    """One prefill and one decode worker, connected by sockets."""

    def __init__(self, server: TransferServer, client: TransferClient) -> None:
        self.server = server
        self.client = client
        self.ended: dict[HandoffKey, EndReason] = {}
        self.all_ended = asyncio.Event()

    @property
    def address(self) -> str:
        return self.server.addresses[0]

    def offer(self, source: FakeSource, key: HandoffKey | None = None, adapter: str = "") -> Offer:
        def on_end(key: HandoffKey, reason: EndReason) -> None:
            assert key not in self.ended
            self.ended[key] = reason
            source.close()
            if self.server.num_unreleased == 0:
                self.all_ended.set()

        self.all_ended.clear()
        return self.server.offer(
            key or make_key(),
            decode_incarnation="d-1",
            adapter=adapter,
            source=source,
            deadline=Deadline.never(),
            on_end=on_end,
        )

    async def fetch(
        self,
        sink: FakeSink,
        key: HandoffKey | None = None,
        *,
        incarnation: str = "p-1",
        adapter: str = "",
        sink_ready: Callable[[], Awaitable[FakeSink]] | None = None,
        timeout_s: float = 20.0,
    ) -> Received:
        async def ready() -> FakeSink:
            return sink

        return await self.client.fetch(
            address=self.address,
            incarnation=incarnation,
            key=key or make_key(),
            adapter=adapter,
            skip_tokens=sink.skip_tokens,
            sink_ready=sink_ready or ready,
            deadline=Deadline.after(timeout_s),
        )


@asynccontextmanager
async def workers(
    listen: str,
    *,
    prefill: TransferIdentity | None = None,
    decode: TransferIdentity | None = None,
    sender: SenderConfig | None = None,
    receiver: ReceiverConfig | None = None,
) -> AsyncIterator[Workers]:
    server = TransferServer(prefill or make_identity("p"), [listen], sender)
    client = TransferClient(decode or make_identity("d"), receiver)
    async with server, client:
        yield Workers(server, client)


def seal_of(num_tokens: int) -> Seal:
    return Seal(num_tokens=num_tokens, first_token=FIRST_TOKEN)


async def test_blocks_arrive_while_they_are_made(listen: str) -> None:
    async with workers(listen) as both:
        source, sink = FakeSource(LAYOUT, 200), FakeSink(LAYOUT, 200)
        offer = both.offer(source)
        has_begun = asyncio.Event()

        async def sink_ready() -> FakeSink:
            has_begun.set()
            return sink

        async with asyncio.TaskGroup() as tasks:
            fetch = tasks.create_task(both.fetch(sink, sink_ready=sink_ready))
            offer.extend(4)
            await has_begun.wait()
            offer.extend(12)
            offer.seal(seal_of(200))
        assert fetch.result().seal == seal_of(200)
        assert np.array_equal(sink.tokens(), tokens_of(LAYOUT, 200, 0))
        await both.all_ended.wait()
        assert both.ended == {make_key(): EndReason.COMMITTED}
        assert both.server.stats.bytes_by_transport == both.client.stats.bytes_by_transport
        assert set(both.server.stats.bytes_by_transport) == {both.address.partition(":")[0]}


@pytest.mark.parametrize("wants_checksums", [True, False])
async def test_a_big_hand_off_is_whole_and_quick(listen: str, wants_checksums: bool) -> None:
    sender = SenderConfig(wants_checksums=wants_checksums)
    receiver = ReceiverConfig(wants_checksums=wants_checksums)
    async with workers(
        listen,
        prefill=make_identity("p", layout=BIG),
        decode=make_identity("d", layout=BIG),
        sender=sender,
        receiver=receiver,
    ) as both:
        num_tokens = 16 * 200  # 50 MiB
        source = FakeSource(BIG, 16)
        source.slabs = np.random.default_rng(0).random((200, *source.slabs.shape[1:]), dtype=np.float32)
        expected = source.slabs.copy()
        sink = FakeSink(BIG, num_tokens)
        both.offer(source).seal(seal_of(num_tokens))
        started_s = time.monotonic()
        received = await both.fetch(sink)
        assert np.array_equal(sink.slabs, expected)
        assert received.size_bytes == expected.nbytes
        assert expected.nbytes / (time.monotonic() - started_s) > 20e6, "far below what a loopback socket carries"


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(16, 1), (1, 16), (16, 24), (64, 16), (8, 256)])
async def test_unequal_block_sizes(listen: str, prefill_size: int, decode_size: int) -> None:
    ours, theirs = with_block_size(prefill_size), with_block_size(decode_size)
    async with workers(
        listen, prefill=make_identity("p", layout=ours), decode=make_identity("d", layout=theirs)
    ) as both:
        skip_tokens = min(70 // decode_size, 99 // decode_size) * decode_size
        sink = FakeSink(theirs, 100, skip_tokens=skip_tokens)
        both.offer(FakeSource(ours, 100)).seal(seal_of(100))
        await both.fetch(sink)
        assert np.array_equal(sink.tokens()[skip_tokens:], tokens_of(LAYOUT, 100, 0)[skip_tokens:])
        assert (sink.tokens()[:skip_tokens] == -1).all()


async def test_many_transfers_share_one_connection_and_all_arrive(listen: str) -> None:
    async with workers(listen) as both:
        keys = [make_key(f"h{index}") for index in range(24)]
        sinks = [FakeSink(LAYOUT, 60 + index) for index in range(24)]
        async with asyncio.TaskGroup() as tasks:
            for index, key in enumerate(keys):
                tasks.create_task(both.fetch(sinks[index], key))
                both.offer(FakeSource(LAYOUT, 60 + index, seed=index), key).seal(seal_of(60 + index))
        for index, sink in enumerate(sinks):
            assert np.array_equal(sink.tokens(), tokens_of(LAYOUT, 60 + index, index))
        await both.all_ended.wait()
        assert set(both.ended.values()) == {EndReason.COMMITTED}
        assert len(both.server._connections) == 1


async def test_a_slow_sink_holds_up_nobody_else(listen: str) -> None:
    async with workers(listen, prefill=make_identity("p", layout=BIG), decode=make_identity("d", layout=BIG)) as both:
        slow, quick = make_key("slow"), make_key("quick")
        may_go_on = asyncio.Event()
        slow_sink, quick_sink = FakeSink(BIG, 320), FakeSink(BIG, 320)

        async def sink_ready() -> FakeSink:
            await may_go_on.wait()
            return slow_sink

        for key in (slow, quick):
            source = FakeSource(BIG, 16)
            source.slabs = np.full((20, *source.slabs.shape[1:]), 2.5, dtype=np.float32)
            both.offer(source, key).seal(seal_of(320))
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(both.fetch(slow_sink, slow, sink_ready=sink_ready))
            await both.fetch(quick_sink, quick)
            assert not waiting.done()
            may_go_on.set()
        assert (slow_sink.slabs == 2.5).all()
        assert (quick_sink.slabs == 2.5).all()


async def test_a_cancelled_fetch_ends_the_hold_and_writes_nothing_more(listen: str) -> None:
    async with workers(listen, prefill=make_identity("p", layout=BIG), decode=make_identity("d", layout=BIG)) as both:
        source = FakeSource(BIG, 16)
        source.slabs = np.full((300, *source.slabs.shape[1:]), 2.5, dtype=np.float32)
        sink = NoticingSink(BIG, 4800)
        both.offer(source).seal(seal_of(4800))
        async with asyncio.TaskGroup() as tasks:
            fetch = tasks.create_task(both.fetch(sink))
            await sink.is_touched.wait()
            fetch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetch
            sink.freeze()
        await both.all_ended.wait()
        assert both.ended == {make_key(): EndReason.ABORTED}
        # The connection is as good as new, and what was under way went nowhere.
        again = make_key("again")
        small, rest = FakeSource(BIG, 40), FakeSink(BIG, 40)
        both.offer(small, again).seal(seal_of(40))
        await both.fetch(rest, again)
        assert sink.is_untouched()
        assert not (sink.slabs == 2.5).all(), "it was cancelled in the middle"
        assert both.server.stats.connections_lost_total == 0


async def test_a_deadline_ends_a_fetch_for_which_nothing_comes(listen: str) -> None:
    async with workers(listen) as both:
        both.offer(FakeSource(LAYOUT, 40))
        with pytest.raises(DeadlineExceededError):
            await both.fetch(FakeSink(LAYOUT, 40), timeout_s=0.2)
        await both.all_ended.wait()
        assert both.ended == {make_key(): EndReason.ABORTED}


async def test_a_wrong_secret_is_refused(listen: str) -> None:
    async with workers(listen, decode=make_identity("d", secret=b"another")) as both:
        both.offer(FakeSource(LAYOUT, 40)).seal(seal_of(40))
        with pytest.raises(TransferProtocolError, match="secret"):
            await both.fetch(FakeSink(LAYOUT, 40))
        assert both.server.num_held == 1, "a stranger ends no hold"


async def test_a_wrong_fingerprint_is_refused_by_field(listen: str) -> None:
    async with workers(listen, decode=make_identity("d", weights_hash="other")) as both:
        with pytest.raises(FingerprintMismatchError, match="weights_hash is w there and other here"):
            await both.fetch(FakeSink(LAYOUT, 40))


async def test_a_tensor_parallel_worker_is_refused_by_name(listen: str) -> None:
    async with workers(listen, decode=make_identity("d", tp_size=2)) as both:
        with pytest.raises(HandoffError, match="tp_size is 1 there and 2 here"):
            await both.fetch(FakeSink(LAYOUT, 40))


async def test_a_wrong_incarnation_is_refused(listen: str) -> None:
    async with workers(listen) as both:
        with pytest.raises(WrongIncarnationError, match="p-0 is meant"):
            await both.fetch(FakeSink(LAYOUT, 40), incarnation="p-0")


async def test_a_wrong_adapter_is_refused_and_costs_no_hold(listen: str) -> None:
    async with workers(listen) as both:
        both.offer(FakeSource(LAYOUT, 40), adapter="a").seal(seal_of(40))
        with pytest.raises(HandoffError, match="adapter 'b' is asked for, 'a' was computed"):
            await both.fetch(FakeSink(LAYOUT, 40), adapter="b")
        await both.fetch(FakeSink(LAYOUT, 40), adapter="a")


async def test_nobody_there_is_a_lost_worker_soon(listen: str) -> None:
    async with workers(listen) as both:
        address = both.address
        async with TransferClient(make_identity("d")) as client:
            await both.server.__aexit__(None, None, None)
            started_s = time.monotonic()
            with pytest.raises(WorkerLostError, match="cannot connect"):
                await client.fetch(
                    address=address,
                    incarnation="p-1",
                    key=make_key(),
                    adapter="",
                    skip_tokens=0,
                    sink_ready=asyncio.Event().wait,  # type: ignore[arg-type]
                    deadline=Deadline.after(20.0),
                )
            assert time.monotonic() - started_s < 3.0


async def test_a_server_that_closes_ends_every_hold_and_fetch(listen: str) -> None:
    async with workers(listen, receiver=ReceiverConfig(backoff_s=0.01)) as both:
        both.offer(FakeSource(LAYOUT, 40)).extend(1)
        is_sink_asked = asyncio.Event()

        async def sink_ready() -> FakeSink:
            is_sink_asked.set()
            return FakeSink(LAYOUT, 40)

        async def fetch() -> None:
            with pytest.raises((WorkerLostError, HandoffLostError)):
                await both.fetch(FakeSink(LAYOUT, 40), sink_ready=sink_ready)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fetch())
            await is_sink_asked.wait()
            await both.server.__aexit__(None, None, None)
            assert both.ended == {make_key(): EndReason.CLOSED}


@asynccontextmanager
async def prefill_process(listen: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.kv_transfer.prefill_process", listen, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(20.0):
            address = (await process.stdout.readline()).decode().strip()
        yield process, address
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        await process.wait()


@pytest.mark.parametrize(("number", "within_s"), [(signal.SIGKILL, 5.0), (signal.SIGSTOP, 6.0)])
async def test_a_killed_or_stopped_prefill_worker_is_noticed_soon(
    listen: str, number: signal.Signals, within_s: float
) -> None:
    sink = FakeSink(LAYOUT, 160)
    has_begun = asyncio.Event()

    async def sink_ready() -> FakeSink:
        has_begun.set()
        return sink

    receiver = ReceiverConfig(timing=FAST, connect_timeout_s=0.4, max_attempts=2)
    async with prefill_process(listen) as (process, address), TransferClient(make_identity("d"), receiver) as client:

        async def fetch() -> None:
            with pytest.raises(WorkerLostError):
                await client.fetch(
                    address=address,
                    incarnation="p-1",
                    key=make_key(),
                    adapter="",
                    skip_tokens=0,
                    sink_ready=sink_ready,
                    deadline=Deadline.after(20.0),
                )

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fetch())
            await has_begun.wait()
            process.send_signal(number)
            stopped_s = time.monotonic()
        assert time.monotonic() - stopped_s < within_s


# Addresses


async def test_a_stale_socket_file_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with workers(f"unix://{path}"):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with pytest.raises(ConfigError, match=f"transfer_listen: cannot listen on unix://{path}: .*in use"):
            async with TransferServer(make_identity("q"), [f"unix://{path}"]):
                pass
    assert not path.exists()


async def test_a_server_listens_on_several_addresses(tmp_path: Path) -> None:
    listen = ("tcp://127.0.0.1:0", f"unix://{tmp_path}/kv.sock")
    async with TransferServer(make_identity("p"), listen) as server:
        assert server.addresses[1] == listen[1]
        assert server.addresses[0].startswith("tcp://127.0.0.1:")
        assert not server.addresses[0].endswith(":0")


@pytest.mark.parametrize(
    "address",
    ["", "127.0.0.1:80", "tcp://host", "tcp://host:x", "tcp://h:1/path", "unix://", "unix://host/p", "udp://h:1"],
)
async def test_an_address_that_cannot_be_read_is_a_setting_at_fault(address: str) -> None:
    with pytest.raises(ConfigError, match="transfer address"):
        await SocketTransport().listen(address, lambda: pytest.fail("no connection"))

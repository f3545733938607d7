"""The address under which the rest of the cluster reaches this worker."""

from __future__ import annotations

import ipaddress
import socket

from weir.core.redis_url import RedisUrl

LOOPBACK = "127.0.0.1"


def reachable_host(listen_host: str, redis_url: str) -> str:
    """Where others find a worker that listens on `listen_host`: that host itself or, if it stands for every interface,
    the address of the interface that reaches Redis. Never an address that means "any".
    """
    if not _is_any(listen_host):
        return listen_host
    for redis in RedisUrl.parse(redis_url).addresses:
        found = _interface_towards(redis.host, redis.port)
        if found is not None:
            return found
    return LOOPBACK


def with_host(listen_address: str, host: str) -> str:
    """A listener's address, `[tcp://]x:port`, with the host under which others reach it; a Unix socket's as it is."""
    if listen_address.startswith("unix:"):
        return listen_address
    scheme, separator, rest = listen_address.rpartition("://")
    bracketed = f"[{host}]" if ":" in host else host
    return f"{scheme}{separator}{bracketed}:{rest.rpartition(':')[2]}"


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == ""


def _interface_towards(host: str, port: int) -> str | None:
    """The local address from which packets to `host` would leave; sends none."""
    try:
        families = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in families:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None

"""Where Redis is: parses the five forms of its URL. Opens nothing.

    redis://[user:pass@]host[:port][/db]            rediss:// the same over TLS
    unix://[user:pass@]/path/to/socket[?db=0]
    redis+sentinel://[user:pass@]h1[:p1],h2[:p2]/service[/db]
    redis+cluster://[user:pass@]h1[:p1],h2[:p2]

`?ca=PATH` names the certificate authority of a TLS server; `?sentinel_username=` and `?sentinel_password=` log in to
the sentinels themselves. User, password and path are percent-decoded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from weir.core.errors import ConfigError

REDIS_PORT = 6379
SENTINEL_PORT = 26379

_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[0-9a-fA-F:.]+)\]|(?P<host>[^:\[\]]+))(?::(?P<port>\d{1,5}))?")


class RedisKind(Enum):
    STANDALONE = "standalone"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


_KIND_BY_SCHEME = {
    "redis": RedisKind.STANDALONE,
    "rediss": RedisKind.STANDALONE,
    "unix": RedisKind.STANDALONE,
    "redis+sentinel": RedisKind.SENTINEL,
    "redis+cluster": RedisKind.CLUSTER,
}


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisUrl:
    """A parsed URL.

    Attributes:
        masked: the URL for logs and errors, without passwords.
        addresses: servers, sentinels or cluster nodes; empty for a Unix socket.
        service: the name under which sentinels know the primary.
    """

    kind: RedisKind
    masked: str
    addresses: tuple[Address, ...] = ()
    socket_path: str = ""
    service: str = ""
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    is_tls: bool = False
    ca_file: Path | None = None

    @classmethod
    def parse(cls, text: str) -> RedisUrl:
        """Raises ConfigError naming the URL and what is wrong with it; of a malformed one it quotes no other part,
        since any part may be that of a password.
        """
        masked = mask_passwords(text)
        try:
            return cls._parse(text, masked)
        except ValueError as exc:
            raise ConfigError(f"redis_url {masked!r}: {exc}", param="redis_url") from None

    @classmethod
    def _parse(cls, text: str, masked: str) -> RedisUrl:
        scheme, separator, _ = text.partition("://")
        kind = _KIND_BY_SCHEME.get(scheme)
        if not separator or kind is None:
            raise ValueError(f"starts with none of {', '.join(f'{known}://' for known in _KIND_BY_SCHEME)}")
        parts = urlsplit(text)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        login, _, hosts = parts.netloc.rpartition("@")
        username, _, password = login.partition(":")
        path = unquote(parts.path)
        is_tls = scheme == "rediss"
        addresses: tuple[Address, ...] = ()
        service = socket_path = ""
        db = "0"
        if scheme == "unix":
            socket_path = path
            db = options.pop("db", "0")
            if hosts or not path:
                raise ValueError("needs three slashes and the path of a socket")
        elif kind is RedisKind.SENTINEL:
            addresses = _parse_addresses(hosts, SENTINEL_PORT)
            service, _, rest = path.removeprefix("/").partition("/")
            db = rest or "0"
            if not service:
                raise ValueError("names no service after the sentinels, as in redis+sentinel://host:26379/service")
        else:
            addresses = _parse_addresses(hosts, REDIS_PORT)
            db = path.removeprefix("/") or "0"
            if kind is RedisKind.STANDALONE and len(addresses) != 1:
                raise ValueError("names more than one server; use redis+cluster:// or redis+sentinel://")
        if not db.isdecimal():
            raise ValueError("the database must be a number")
        if kind is RedisKind.CLUSTER and int(db):
            raise ValueError("a Redis Cluster has only database 0")
        ca_file = options.pop("ca", None) if is_tls else None
        if ca_file is not None and not Path(ca_file).is_file():
            raise ValueError(f"the certificate authority {ca_file!r} is not a file")
        sentinel_username = options.pop("sentinel_username", None) if kind is RedisKind.SENTINEL else None
        sentinel_password = options.pop("sentinel_password", None) if kind is RedisKind.SENTINEL else None
        if options:
            raise ValueError(f"option {next(iter(options))!r} is not known for {scheme}://")
        return cls(
            kind=kind,
            masked=masked,
            addresses=addresses,
            socket_path=socket_path,
            service=service,
            db=int(db),
            username=unquote(username) or None,
            password=unquote(password) or None,
            sentinel_username=sentinel_username,
            sentinel_password=sentinel_password,
            is_tls=is_tls,
            ca_file=Path(ca_file) if ca_file else None,
        )


def mask_passwords(text: str) -> str:
    """The URL with `***` for everything that may be a password, also where it is malformed."""
    text = re.sub(r"(?<=://)([^:@]*):.*@", r"\1:***@", text)
    return re.sub(r"(password=)[^&]*", r"\1***", text)


def _parse_addresses(hosts: str, default_port: int) -> tuple[Address, ...]:
    addresses = []
    for item in hosts.split(","):
        match = _ADDRESS.fullmatch(item)
        if match is None:
            raise ValueError("has an address that is not host:port" if item else "names no host")
        port = int(match["port"] or default_port)
        if not 1 <= port <= 65535:
            raise ValueError(f"port {port} is not in 1..65535")
        addresses.append(Address(match["ipv6"] or match["host"], port))
    return tuple(addresses)

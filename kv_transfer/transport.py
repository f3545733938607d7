"""The seam between connections and what carries their bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kv_transfer.connection import Connection


class Listener(Protocol):
    """One address that takes connections until it is closed."""

    @property
    def address(self) -> str:
        """Where it really listens; a port that was 0 is filled in."""
        ...

    async def close(self) -> None:
        """Take no more connections; those that are open stay."""
        ...


class Transport(Protocol):
    """Connects and listens. Addresses are URLs whose scheme names the transport."""

    async def connect(self, address: str, make_connection: Callable[[], Connection]) -> Connection:
        """Raises OSError if nobody listens there, ConfigError for an address it cannot read."""
        ...

    async def listen(self, address: str, make_connection: Callable[[], Connection]) -> Listener:
        """Raises OSError if the address is taken, ConfigError for an address it cannot read."""
        ...


def scheme_of(address: str) -> str:
    """The transport's name in an address: `tcp`, `unix`."""
    return address.partition("://")[0]

"""FETCH frames that came before what they ask for: before the offer, or before the gateway bound it to their sender."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.connection import Connection
from protos.kv_transfer_pb2 import Fetch
from weir.core.deadline import Clock
from weir.core.request import HandoffKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedFetch:
    key: HandoffKey
    connection: Connection
    fetch: Fetch
    until_s: float


class ParkedFetches:
    """At most `max_parked` of them, each for at most `timeout_s` from its first parking."""

    def __init__(self, max_parked: int, timeout_s: float, clock: Clock) -> None:
        self._max_parked = max_parked
        self._timeout_s = timeout_s
        self._clock = clock
        self._parked: dict[tuple[HandoffKey, Connection], ParkedFetch] = {}

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, key: HandoffKey, connection: Connection, fetch: Fetch) -> bool:
        """False if there is no room. A second FETCH of the same connection takes the place of its first."""
        if len(self._parked) >= self._max_parked and (key, connection) not in self._parked:
            return False
        timeout_s = min(self._timeout_s, fetch.remaining_ms / 1000) if fetch.remaining_ms else self._timeout_s
        self.put_back(ParkedFetch(key=key, connection=connection, fetch=fetch, until_s=self._clock() + timeout_s))
        return True

    def put_back(self, parked: ParkedFetch) -> None:
        """Park again what `take` gave, for the rest of its time."""
        self._parked[parked.key, parked.connection] = parked

    def has(self, key: HandoffKey, connection: Connection) -> bool:
        return (key, connection) in self._parked

    def take(self, key: HandoffKey) -> tuple[ParkedFetch, ...]:
        """Remove and return those for that hand-off, oldest first."""
        return self._remove([each for each in self._parked.values() if each.key == key])

    def take_expired(self) -> tuple[ParkedFetch, ...]:
        """Remove and return those whose time is up."""
        now_s = self._clock()
        return self._remove([each for each in self._parked.values() if each.until_s <= now_s])

    def drop(self, key: HandoffKey, connection: Connection) -> None:
        """Its sender does not want it any more; idempotent."""
        self._parked.pop((key, connection), None)

    def drop_connection(self, connection: Connection) -> None:
        self._remove([each for each in self._parked.values() if each.connection is connection])

    def _remove(self, parked: list[ParkedFetch]) -> tuple[ParkedFetch, ...]:
        for each in parked:
            del self._parked[each.key, each.connection]
        return tuple(parked)

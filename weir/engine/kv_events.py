"""What changed in the prefix cache since a reader last asked, as one net difference of bounded size.

It must not know who reads: the engine hands it to a prefix index outside.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weir.core.block_hash import BlockHash


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEvents:
    """Changes to apply in this order: forget everything if `cleared`, then drop `removed`, then add `stored`.

    The two tuples share no hash, so that nothing depends on the order inside a tuple.
    """

    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    cleared: bool = False


class KvEventLog:
    """Net changes since the last `take`.

    A reader that has never asked, or that fell more than `capacity` changes behind, gets `cleared` and the whole
    content instead of a difference: so the log stays bounded without a reader, and no reader has to ask twice.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._is_stored: dict[BlockHash, bool] = {}
        self._must_restart = True

    @property
    def has_news(self) -> bool:
        return self._must_restart or bool(self._is_stored)

    def record_stored(self, block_hash: BlockHash) -> None:
        self._record(block_hash, True)

    def record_removed(self, block_hash: BlockHash) -> None:
        self._record(block_hash, False)

    def restart(self) -> None:
        """Everything was dropped, or the reader lost what it took: the next `take` gives the whole content."""
        self._is_stored.clear()
        self._must_restart = True

    def take(self, content: Iterable[BlockHash]) -> KvEvents:
        """The changes so far, which are then forgotten. `content` is every hash now stored."""
        if self._must_restart:
            events = KvEvents(stored=tuple(content), cleared=True)
        else:
            events = KvEvents(
                stored=tuple(name for name, is_stored in self._is_stored.items() if is_stored),
                removed=tuple(name for name, is_stored in self._is_stored.items() if not is_stored),
            )
        self._is_stored.clear()
        self._must_restart = False
        return events

    def _record(self, block_hash: BlockHash, is_stored: bool) -> None:
        if self._must_restart:
            return
        self._is_stored[block_hash] = is_stored
        if len(self._is_stored) > self._capacity:
            self.restart()

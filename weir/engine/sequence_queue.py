"""Sequences in some order of urgency, of which any may leave at any time. It knows neither blocks nor budgets."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from weir.engine.sequence import Sequence

SortKey = tuple[float, int]


class _Entry:
    """A place in the queue; emptied in place when its sequence leaves out of turn."""

    __slots__ = ("sequence", "sort_key")

    def __init__(self, sequence: Sequence, sort_key: SortKey) -> None:
        self.sort_key = sort_key
        self.sequence: Sequence | None = sequence

    def __lt__(self, other: _Entry) -> bool:
        return self.sort_key < other.sort_key


class SequenceQueue:
    """A heap. Every operation is at most logarithmic, amortized; what has left takes no room for long.

    Args:
        sort_key: smallest first; no two sequences in the queue have the same.
    """

    def __init__(self, sort_key: Callable[[Sequence], SortKey]) -> None:
        self._sort_key = sort_key
        self._heap: list[_Entry] = []
        self._entry_of: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entry_of)

    def push(self, sequence: Sequence) -> None:
        entry = _Entry(sequence, self._sort_key(sequence))
        self._entry_of[sequence.sequence_id] = entry
        heappush(self._heap, entry)

    def find_first(self) -> Sequence | None:
        """The first sequence; it stays."""
        while self._heap:
            first = self._heap[0].sequence
            if first is not None:
                return first
            heappop(self._heap)
        return None

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence out wherever it stands; nothing happens if it is not there."""
        entry = self._entry_of.pop(sequence.sequence_id, None)
        if entry is None:
            return
        entry.sequence = None
        if len(self._heap) > 2 * len(self._entry_of) + 16:
            self._heap = [entry for entry in self._heap if entry.sequence is not None]
            heapify(self._heap)

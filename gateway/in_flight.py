"""What this gateway has given each worker and has not seen end: the part of the load that heartbeats do not show yet.

A burst would otherwise land on one worker, since all of it is routed on the same snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass

from weir.core.worker import Incarnation


@dataclass(slots=True)
class InFlight:
    """Work of this gateway on one worker.

    Attributes:
        num_prompt_tokens: uncached prompt tokens that it has not computed yet.
        num_sequences: sequences opened there.
        num_blocks: KV blocks that these sequences need for what is known of them.
    """

    num_prompt_tokens: int = 0
    num_sequences: int = 0
    num_blocks: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.num_prompt_tokens or self.num_sequences or self.num_blocks)


_NOTHING = InFlight()


class InFlightLedger:
    """Counts by incarnation; an entry exists only while there is something to count."""

    def __init__(self) -> None:
        self._entries: dict[Incarnation, InFlight] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, incarnation: Incarnation) -> InFlight:
        """The counts of one worker; not to be changed by the caller."""
        return self._entries.get(incarnation, _NOTHING)

    def add(
        self, incarnation: Incarnation, *, num_prompt_tokens: int = 0, num_sequences: int = 0, num_blocks: int = 0
    ) -> None:
        """Add to the counts of one worker; what ends is added with the opposite sign."""
        entry = self._entries.setdefault(incarnation, InFlight())
        entry.num_prompt_tokens += num_prompt_tokens
        entry.num_sequences += num_sequences
        entry.num_blocks += num_blocks
        assert min(entry.num_prompt_tokens, entry.num_sequences, entry.num_blocks) >= 0
        if entry.is_empty:
            del self._entries[incarnation]

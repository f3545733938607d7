"""What the prefill service holds of one hand-off that it has offered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_transfer.handoff_source import HandoffSource
from kv_transfer.transfer_state import Seal
from weir.core.errors import WeirError
from weir.core.request import HandoffKey

if TYPE_CHECKING:
    from kv_transfer.sender import TransferServer


class Offer:
    """The prefill service's handle of one hand-off. Every method may be called at any time, also after the end."""

    def __init__(self, server: TransferServer, source: HandoffSource) -> None:
        self._server = server
        self._source = source

    @property
    def key(self) -> HandoffKey:
        return self._source.key

    @property
    def is_held(self) -> bool:
        """Somebody may still fetch or commit it."""
        return self._source.is_held

    def extend(self, num_ready_blocks: int) -> None:
        """So many full blocks, from the sequence's first, are computed and will not change any more."""
        self._source.extend(num_ready_blocks)

    def seal(self, seal: Seal) -> None:
        """Everything is computed, the last block too. The lease clock starts now."""
        self._server.seal(self._source, seal)

    def fail(self, error: WeirError) -> None:
        """It will never be complete; ends the hold, and the decode worker's fetch with a HopFailedError."""
        self._source.fail(error)

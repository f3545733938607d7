"""How far one sequence's cold blocks have come back into the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weir.core.block_hash import BlockHash

if TYPE_CHECKING:  # a sequence is also known where torch is not loaded
    from weir.engine.block_copies import BlockCopy


@dataclass(slots=True, eq=False, kw_only=True)
class PrefixLoad:
    """Only `ColdBlocks` changes it.

    Attributes:
        block_hashes: what is wanted, in order; cut where something is lost or does not come in time.
        block_ids: where in the pool each goes.
        gives_up_at_s: on the clock of the cold blocks; from then on computing would have been faster.
        num_started: leading blocks whose copies are done or under way.
        copy: the last of these.
        read_hashes: what had to be read from the disk for this load.
    """

    block_hashes: Sequence[BlockHash]
    block_ids: Sequence[int]
    gives_up_at_s: float
    num_started: int = 0
    copy: BlockCopy | None = None
    read_hashes: set[BlockHash] = field(default_factory=set)

    @property
    def is_done(self) -> bool:
        """Every block that will come is in place. Never blocks."""
        return self.num_started == len(self.block_hashes) and (self.copy is None or self.copy.is_done)

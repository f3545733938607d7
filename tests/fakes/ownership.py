"""What a worker says to Redis about its blocks, kept in a list."""

from __future__ import annotations

from dataclasses import dataclass, field

from weir.cluster.block_ownership import BlockGroup, HoldingKind
from weir.core.deadline import Deadline
from weir.core.request import HandoffKey, RequestId


@dataclass
class FakeOwnership:
    """The recording half of `weir.cluster.block_ownership.OwnershipRecorder`."""

    holdings: dict[tuple[RequestId, HandoffKey, HoldingKind], tuple[BlockGroup, ...]] = field(default_factory=dict)

    def record_source(
        self, request_id: RequestId, key: HandoffKey, groups: tuple[BlockGroup, ...], until: Deadline
    ) -> None:
        self.holdings[request_id, key, HoldingKind.SOURCE] = groups

    def record_destination(
        self, request_id: RequestId, key: HandoffKey, groups: tuple[BlockGroup, ...], until: Deadline
    ) -> None:
        self.holdings[request_id, key, HoldingKind.DESTINATION] = groups

    def clear(self, request_id: RequestId, key: HandoffKey, kind: HoldingKind) -> None:
        self.holdings.pop((request_id, key, kind), None)

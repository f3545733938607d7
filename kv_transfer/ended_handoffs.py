"""How hand-offs ended, remembered for a while, so that a late frame is answered with the reason."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kv_transfer.transfer_state import EndReason
from weir.core.deadline import Clock
from weir.core.request import HandoffId, HandoffKey

REMEMBERED_S = 60.0
MAX_REMEMBERED = 65536


@dataclass(frozen=True, slots=True)
class EndedHandoff:
    """The newest epoch that has ended, and why."""

    epoch: int
    reason: EndReason
    ended_s: float


class EndedHandoffs:
    """In the order of their ends; bounded in time and number."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ended: OrderedDict[HandoffId, EndedHandoff] = OrderedDict()

    def add(self, key: HandoffKey, reason: EndReason) -> None:
        self._ended[key.handoff_id] = EndedHandoff(key.epoch, reason, self._clock())
        self._ended.move_to_end(key.handoff_id)
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

    def get(self, handoff_id: HandoffId) -> EndedHandoff | None:
        return self._ended.get(handoff_id)

    def sweep(self) -> None:
        """Forget those that are old."""
        forget_before_s = self._clock() - REMEMBERED_S
        while self._ended and next(iter(self._ended.values())).ended_s < forget_before_s:
            self._ended.popitem(last=False)

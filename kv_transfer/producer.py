"""The seam between what has bulk to send and the connection that gives it turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from protos.kv_transfer_pb2 import Frame


@dataclass(frozen=True, slots=True)
class OutgoingFrame:
    """One frame of a producer; `payload` is source memory and must be gone before the producer hears of it."""

    frame: Frame
    payload: memoryview | None = None


class Producer(Protocol):
    """Who has bulk to send on a connection. Pulled frame by frame, so that producers take turns."""

    def next_frame(self) -> OutgoingFrame | None:
        """The next frame, or None until the next `wake`."""
        ...

    def frame_flushed(self) -> None:
        """One frame that `next_frame` gave is not in this process's memory any more (or never will be sent)."""
        ...

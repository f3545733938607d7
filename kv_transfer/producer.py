"""The seam between what has bulk to send and the connection that gives it turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kv_transfer.blocks import SourcePiece
from protos.kv_transfer_pb2 import Frame


@dataclass(frozen=True, slots=True)
class OutgoingFrame:
    """One frame of a producer; the payload of `piece`, if there is one, lies where it is until the frame is flushed."""

    frame: Frame
    piece: SourcePiece | None = None

    @property
    def payload(self) -> memoryview | None:
        return None if self.piece is None else self.piece.payload


class Producer(Protocol):
    """Who has bulk to send on a connection. Pulled frame by frame, so that producers take turns."""

    def next_frame(self) -> OutgoingFrame | None:
        """The next frame, or None until the next `wake`."""
        ...

    def frame_flushed(self, outgoing: OutgoingFrame) -> None:
        """A frame that `next_frame` gave is not in this process's memory any more (or never will be sent)."""
        ...

"""One hand-off on the prefill worker, sans-I/O: what may be sent next, and when its blocks are reusable.

Every input is defined in every state. A *hold* begins with the offer and ends for one reason; the blocks are reusable
(`on_end`) once it has ended and every frame that names their memory has left for the kernel or died with its
connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from xxhash import xxh3_64, xxh3_64_intdigest

from kv_transfer.blocks import BlockSource
from kv_transfer.flow_control import SendCredit
from kv_transfer.handshake import Peer
from kv_transfer.producer import OutgoingFrame, Producer
from kv_transfer.transfer_state import EndReason, Seal, SourceState
from kv_transfer.wire import abort_ack_frame, abort_frame, handoff_lost_frame, seal_frame
from protos.convert import key_to_proto
from protos.kv_transfer_pb2 import Blocks, Fetch, Frame, Piece
from weir.core.deadline import Clock
from weir.core.errors import HandoffLostError, TransferProtocolError, WeirError
from weir.core.request import HandoffKey

_MAX_RESENDS = 4096
"""Pieces that may wait to be sent again; a sink gives up long before."""


class SourceLink(Protocol):
    """The connection to the decode worker that fetches."""

    @property
    def peer(self) -> Peer: ...

    def send(self, frame: Frame) -> None:
        """Queue a frame before all bulk; does nothing when the connection is gone."""
        ...

    def wake(self, producer: Producer) -> None:
        """The producer may have a frame now."""
        ...


class HandoffSource:
    """State of one offered hand-off.

    Args:
        decode_incarnation: who may fetch and commit; empty until the gateway binds one.
        frame_bytes: most payload of a frame.
        on_hold_ended: called once, when nobody may fetch any more.
        on_end: called once, as the last thing that happens here: the blocks are reusable.
    """

    def __init__(
        self,
        key: HandoffKey,
        *,
        decode_incarnation: str,
        adapter: str,
        source: BlockSource,
        frame_bytes: int,
        clock: Clock,
        on_hold_ended: Callable[[HandoffKey, EndReason], None],
        on_end: Callable[[HandoffKey, EndReason], None],
    ) -> None:
        self.key = key
        self.adapter = adapter
        self.decode_incarnation = decode_incarnation
        self._source = source
        self._frame_bytes = frame_bytes
        self._clock = clock
        self._on_hold_ended = on_hold_ended
        self._on_end = on_end
        self._key_message = key_to_proto(key)
        self._state = SourceState.OFFERED
        self._num_ready_blocks = 0
        self._seal: Seal | None = None
        self._sealed_s = 0.0
        self._end_reason: EndReason | None = None
        self._num_in_flight = 0
        self._owes_since_s: float | None = None
        self._undrained_link: SourceLink | None = None  # is owed an ABORT_ACK that says drained
        # Of the fetch that runs:
        self._link: SourceLink | None = None
        self._credit = SendCredit(0)
        self._first_block = 0
        self._next_block = 0
        self._next_offset = 0
        self._resends: deque[tuple[int, int, int]] = deque()  # block index, slab offset, size in bytes
        self._sequence_number = 0
        self._digest = xxh3_64()
        self._is_seal_sent = False

    @property
    def state(self) -> SourceState:
        return self._state

    @property
    def is_held(self) -> bool:
        return self._end_reason is None

    @property
    def is_sealed(self) -> bool:
        return self._seal is not None

    @property
    def link(self) -> SourceLink | None:
        """The connection that fetches now."""
        return self._link

    @property
    def awaits_computation(self) -> bool:
        """It is fetched, and all that is computed was sent."""
        is_behind = self._resends or self._next_block < self._num_ready_blocks or self._num_in_flight
        return self._state is SourceState.STREAMING and not self.is_sealed and not is_behind

    def progress_age_s(self) -> float:
        """Seconds for which this side could have sent and has not; 0 while it waits for blocks, credit or COMMIT."""
        return 0.0 if self._owes_since_s is None else self._clock() - self._owes_since_s

    # What the prefill worker knows

    def extend(self, num_ready_blocks: int) -> None:
        """So many full blocks, from the first, are computed. Never fewer than before."""
        if self.is_held and not self.is_sealed and num_ready_blocks > self._num_ready_blocks:
            self._num_ready_blocks = num_ready_blocks
            self._wake()

    def seal(self, seal: Seal) -> None:
        """All is computed: the last block, full or not, may go too. Only the first seal counts."""
        if not self.is_held or self.is_sealed:
            return
        self._seal = seal
        self._sealed_s = self._clock()
        self._num_ready_blocks = -(-seal.num_tokens // self._source.block_size)
        if self._link is not None and self._next_block > self._num_ready_blocks:
            self._refuse_fetch(f"{self._next_block} blocks are skipped of {self._num_ready_blocks}")
        self._wake()

    # What the decode worker asks

    def attach(self, link: SourceLink, fetch: Fetch) -> None:
        """Serve a FETCH that was found right (incarnations, adapter). Takes over from an older connection.

        Raises:
            TransferProtocolError: the same connection fetches this already, or grants no credit.
        """
        if not self.is_held:
            link.send(handoff_lost_frame(self.key, self._lost()))
            return
        if self._link is link:
            raise TransferProtocolError(f"{self.key} is fetched twice on one connection", hop="transfer")
        self._credit = SendCredit(fetch.credit_bytes)
        self._link = link
        self._first_block = self._next_block = fetch.skip_tokens // self._source.block_size
        self._next_offset = 0
        self._resends.clear()
        self._sequence_number = 0
        self._digest = xxh3_64()
        self._is_seal_sent = False
        self._state = SourceState.STREAMING
        if self.is_sealed and self._next_block > self._num_ready_blocks:
            self._refuse_fetch(f"{self._next_block} blocks are skipped of {self._num_ready_blocks}")
        self._wake()

    def credit(self, link: SourceLink, size_bytes: int) -> bool:
        """CREDIT. False if it is stale; raises TransferProtocolError beyond any window."""
        if self._link is not link:
            return False
        self._credit.give(size_bytes)
        self._wake()
        return True

    def nack(self, link: SourceLink, pieces: Iterable[Piece]) -> bool:
        """NACK: send those pieces again, before anything else. False if it is stale.

        Raises:
            TransferProtocolError: a piece was never sent.
        """
        if self._link is not link:
            return False
        for piece in pieces:
            if len(self._resends) == _MAX_RESENDS:
                raise TransferProtocolError(f"{self.key}: more than {_MAX_RESENDS} pieces to resend", hop="transfer")
            end = piece.slab_offset + piece.size_bytes
            is_sent = (self._first_block, 0) <= (piece.block_index, piece.slab_offset) and (
                piece.block_index < self._next_block
                or (piece.block_index == self._next_block and end <= self._next_offset)
            )
            if not is_sent or not 0 < piece.size_bytes <= self._frame_bytes or end > self._source.block_bytes:
                raise TransferProtocolError(
                    f"{self.key}: {piece.size_bytes} bytes at {piece.slab_offset} of block {piece.block_index} "
                    "were never sent",
                    hop="transfer",
                )
            self._resends.append((piece.block_index, piece.slab_offset, piece.size_bytes))
        if self._state is SourceState.SENT:
            self._state = SourceState.STREAMING
        self._wake()
        return True

    def commit(self, link: SourceLink) -> bool:
        """COMMIT. False if it is stale; raises TransferProtocolError before everything was sent."""
        if self._link is not link:
            return False
        if not self._is_seal_sent or self._resends:
            raise TransferProtocolError(f"{self.key} is committed before its seal", hop="transfer")
        self.end(EndReason.COMMITTED)
        return True

    def abort(self, link: SourceLink) -> None:
        """ABORT: always answered. Ends the hold if it comes from the decode worker that the hold is bound to."""
        if self._num_in_flight and self._link is link:
            self._undrained_link = link
        link.send(self._abort_ack(is_drained=self._undrained_link is not link))
        if link.peer.incarnation == self.decode_incarnation:
            self.end(EndReason.ABORTED)

    # What ends or moves the hold from elsewhere

    def rebind(self, decode_incarnation: str) -> None:
        """Another decode worker may fetch now; the one that does is told to stop."""
        if not self.is_held or decode_incarnation == self.decode_incarnation:
            return
        self.decode_incarnation = decode_incarnation
        self._detach(abort_frame(self.key, HandoffLostError(f"{self.key} was bound to another decode worker")))

    def fail(self, error: WeirError) -> None:
        """The blocks will never be complete; whoever fetches hears why."""
        self.end(EndReason.FAILED, abort_frame(self.key, error))

    def end(self, reason: EndReason, notice: Frame | None = None) -> None:
        """The hold is over; only the first reason counts. `notice` goes to whoever still fetches."""
        if not self.is_held:
            return
        self._end_reason = reason
        self._detach(notice)
        self._state = SourceState.ENDING
        self._on_hold_ended(self.key, reason)
        self._finish_if_drained()

    def link_lost(self, link: SourceLink) -> None:
        """A connection is gone, after `frame_flushed` for all of its frames."""
        if self._undrained_link is link:
            self._undrained_link = None
        if self._link is link:
            self._detach(None)

    # What the connection does

    def next_frame(self) -> OutgoingFrame | None:
        """See Producer."""
        outgoing = self._next_frame() if self._state is SourceState.STREAMING else None
        if outgoing is not None:
            self._num_in_flight += 1
        self._note_progress()
        return outgoing

    def frame_flushed(self) -> None:
        """See Producer."""
        self._num_in_flight -= 1
        self._note_progress()
        if not self._num_in_flight and self._undrained_link is not None:
            self._undrained_link.send(self._abort_ack(is_drained=True))
            self._undrained_link = None
        self._finish_if_drained()

    def _next_frame(self) -> OutgoingFrame | None:
        if self._resends:
            block_index, offset, size_bytes = self._resends[0]
            if not self._credit.covers(size_bytes):
                return None
            self._resends.popleft()
            return self._piece(block_index, offset, size_bytes, is_first=False)
        if self._next_block < self._num_ready_blocks:
            block_index, offset = self._next_block, self._next_offset
            size_bytes = min(self._frame_bytes, self._source.block_bytes - offset)
            if not self._credit.covers(size_bytes):
                return None
            self._next_offset += size_bytes
            if self._next_offset == self._source.block_bytes:
                self._next_block, self._next_offset = block_index + 1, 0
            return self._piece(block_index, offset, size_bytes, is_first=True)
        if self._seal is None:
            return None
        self._state = SourceState.SENT
        if self._is_seal_sent:
            return None
        self._is_seal_sent = True
        return OutgoingFrame(
            seal_frame(
                self.key,
                self._seal,
                first_block=self._first_block,
                num_blocks=self._num_ready_blocks,
                digest=self._digest.intdigest(),
                age_s=self._clock() - self._sealed_s,
            )
        )

    def _piece(self, block_index: int, offset: int, size_bytes: int, *, is_first: bool) -> OutgoingFrame:
        assert self._link is not None
        self._credit.take(size_bytes)
        payload = self._source.view(block_index)[offset : offset + size_bytes]
        block_size = self._source.block_size
        num_tokens = block_size
        if self._seal is not None:
            num_tokens = min(block_size, self._seal.num_tokens - block_index * block_size)
        blocks = Blocks(
            key=self._key_message,
            sequence_number=self._sequence_number,
            block_index=block_index,
            slab_offset=offset,
            num_tokens=num_tokens,
        )
        self._sequence_number += 1
        if self._link.peer.uses_checksums:
            blocks.checksum = xxh3_64_intdigest(payload)
            if is_first:
                self._digest.update(blocks.checksum.to_bytes(8, "little"))
        return OutgoingFrame(Frame(blocks=blocks), payload)

    def _refuse_fetch(self, why: str) -> None:
        self._detach(handoff_lost_frame(self.key, HandoffLostError(f"{self.key}: {why}", hop="transfer")))

    def _detach(self, notice: Frame | None) -> None:
        """No connection fetches any more; frames already given to one stay in flight until they are flushed."""
        link, self._link = self._link, None
        if link is not None and notice is not None:
            link.send(notice)
        self._resends.clear()
        if self._end_reason is None:
            self._state = SourceState.OFFERED
        self._note_progress()

    def _finish_if_drained(self) -> None:
        if self._state is SourceState.ENDING and not self._num_in_flight:
            assert self._end_reason is not None
            self._state = SourceState.ENDED
            self._on_end(self.key, self._end_reason)

    def _wake(self) -> None:
        if self._link is not None:
            self._note_progress()
            self._link.wake(self)

    def _note_progress(self) -> None:
        is_owing = self._num_in_flight > 0 or (self._state is SourceState.STREAMING and self._can_send)
        self._owes_since_s = self._clock() if is_owing else None

    @property
    def _can_send(self) -> bool:
        if self._resends:
            return self._credit.covers(self._resends[0][2])
        if self._next_block < self._num_ready_blocks:
            return self._credit.covers(min(self._frame_bytes, self._source.block_bytes - self._next_offset))
        return self.is_sealed and not self._is_seal_sent

    def _abort_ack(self, *, is_drained: bool) -> Frame:
        return abort_ack_frame(self.key, drained=is_drained, last_sequence_number=self._sequence_number)

    def _lost(self) -> HandoffLostError:
        assert self._end_reason is not None
        return HandoffLostError(f"{self.key} is over: {self._end_reason.value}", hop="transfer")

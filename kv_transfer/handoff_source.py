"""One hand-off on the prefill worker, sans-I/O: what may be sent next, and when its blocks are reusable.

Every input is defined in every state. A *hold* begins with the offer and ends for one reason; the blocks are reusable
(`on_end`) once it has ended, every frame that names their memory has left for the kernel or died with its connection,
and every read of them that was begun is over. Reads go a little ahead of the frames, since they may take a while.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from xxhash import xxh3_64, xxh3_64_intdigest

from kv_transfer.blocks import BlockSource, SourcePiece
from kv_transfer.flow_control import SendCredit
from kv_transfer.handshake import Peer
from kv_transfer.producer import OutgoingFrame, Producer
from kv_transfer.transfer_state import EndReason, Seal, SourceState
from kv_transfer.wire import abort_ack_frame, abort_frame, handoff_lost_frame, seal_frame
from protos.convert import key_to_proto
from protos.kv_transfer_pb2 import Blocks, Committed, Fetch, Frame, Piece
from weir.core.deadline import Clock
from weir.core.errors import HandoffLostError, TransferProtocolError, WeirError
from weir.core.request import HandoffKey

_MAX_RESENDS = 4096
"""Pieces that may wait to be sent again; a sink gives up long before."""

_READ_AHEAD_BYTES = 2 << 20
"""Read, or being read, of one hand-off and not sent yet: what a link carries while a device answers."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """A piece that is sent next, or soon; its credit is taken."""

    block_index: int
    slab_offset: int
    size_bytes: int
    is_first: bool  # it was never sent before
    piece: SourcePiece | None  # None for one that is only named

    @property
    def can_be_sent(self) -> bool:
        return self.piece is None or self.piece.payload is not None


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
        self._frame_bytes = min(frame_bytes, source.piece_bytes)
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
        self._num_reads = 0  # that are not over
        self._owes_since_s: float | None = None
        self._undrained_link: SourceLink | None = None  # is owed an ABORT_ACK that says drained
        # Of the fetch that runs:
        self._link: SourceLink | None = None
        self._credit = SendCredit(0)
        self._first_block = 0
        self._next_block = 0  # to be read
        self._next_offset = 0
        self._sent_up_to = (0, 0)  # block index and offset behind the last piece that was sent for the first time
        self._resends: deque[tuple[int, int, int]] = deque()  # block index, slab offset, size in bytes
        self._readings: deque[_Reading] = deque()
        self._read_ahead_bytes = 0
        self._sequence_number = 0
        self._digest = xxh3_64()
        self._is_seal_sent = False
        self._is_pulled = False

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
        is_behind = self._resends or self._readings or self._num_in_flight or self._next_block < self._num_ready_blocks
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
        self._sent_up_to = (self._first_block, 0)
        self._drop_readings()
        self._sequence_number = 0
        self._digest = xxh3_64()
        self._is_seal_sent = False
        self._is_pulled = fetch.is_pulled
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
            is_sent = self._first_block <= piece.block_index and (piece.block_index, end) <= self._sent_up_to
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
        if not self._is_seal_sent or self._resends or self._readings:
            raise TransferProtocolError(f"{self.key} is committed before its seal", hop="transfer")
        if self._is_pulled:
            link.send(Frame(committed=Committed(key=self._key_message)))
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

    def frame_flushed(self, outgoing: OutgoingFrame) -> None:
        """See Producer."""
        self._num_in_flight -= 1
        if outgoing.piece is not None:
            outgoing.piece.release()
        self._note_progress()
        if not self._num_in_flight and self._undrained_link is not None:
            self._undrained_link.send(self._abort_ack(is_drained=True))
            self._undrained_link = None
        self._finish_if_drained()

    def _next_frame(self) -> OutgoingFrame | None:
        while self._read_next():
            pass
        if self._readings:
            return self._take_reading() if self._readings[0].can_be_sent else None
        if self._seal is None or self._resends or self._next_block < self._num_ready_blocks:
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

    def _read_next(self) -> bool:
        """Begin to read the next piece, if there is one, its credit is there, and it is not too far ahead."""
        is_first = not self._resends
        if not is_first:
            block_index, offset, size_bytes = self._resends[0]
        elif self._next_block < self._num_ready_blocks:
            block_index, offset = self._next_block, self._next_offset
            size_bytes = min(self._frame_bytes, self._source.block_bytes - offset)
        else:
            return False
        is_far = self._readings and self._read_ahead_bytes + size_bytes > _READ_AHEAD_BYTES
        if is_far or not self._credit.covers(size_bytes):
            return False
        self._credit.take(size_bytes)
        self._read_ahead_bytes += size_bytes
        if not is_first:
            self._resends.popleft()
        elif offset + size_bytes == self._source.block_bytes:
            self._next_block, self._next_offset = block_index + 1, 0
        else:
            self._next_offset += size_bytes
        piece = None if self._is_pulled else self._source.read(block_index, offset, size_bytes, self._read_ended)
        reading = _Reading(
            block_index=block_index, slab_offset=offset, size_bytes=size_bytes, is_first=is_first, piece=piece
        )
        if not reading.can_be_sent:
            self._num_reads += 1
        self._readings.append(reading)
        return True

    def _read_ended(self) -> None:
        self._num_reads -= 1
        self._wake()
        self._finish_if_drained()

    def _take_reading(self) -> OutgoingFrame:
        """The frame of the piece that was read first."""
        reading = self._readings.popleft()
        assert self._link is not None
        self._read_ahead_bytes -= reading.size_bytes
        num_tokens = self._source.block_size
        if self._seal is not None:
            num_tokens = min(num_tokens, self._seal.num_tokens - reading.block_index * num_tokens)
        blocks = Blocks(
            key=self._key_message,
            sequence_number=self._sequence_number,
            block_index=reading.block_index,
            slab_offset=reading.slab_offset,
            num_tokens=num_tokens,
        )
        self._sequence_number += 1
        if reading.piece is None:
            blocks.memory_offset = self._source.locate(reading.block_index, reading.slab_offset)
            blocks.size_bytes = reading.size_bytes
        elif self._link.peer.uses_checksums:
            assert reading.piece.payload is not None
            blocks.checksum = xxh3_64_intdigest(reading.piece.payload)
            if reading.is_first:
                self._digest.update(blocks.checksum.to_bytes(8, "little"))
        if reading.is_first:
            self._sent_up_to = (reading.block_index, reading.slab_offset + reading.size_bytes)
        return OutgoingFrame(Frame(blocks=blocks), reading.piece)

    def _drop_readings(self) -> None:
        """Send nothing of what is read, or asked for again, any more."""
        self._resends.clear()
        self._read_ahead_bytes = 0
        while self._readings:
            piece = self._readings.popleft().piece
            if piece is not None:
                piece.release()

    def _refuse_fetch(self, why: str) -> None:
        self._detach(handoff_lost_frame(self.key, HandoffLostError(f"{self.key}: {why}", hop="transfer")))

    def _detach(self, notice: Frame | None) -> None:
        """No connection fetches any more; frames already given to one stay in flight until they are flushed."""
        link, self._link = self._link, None
        if link is not None and notice is not None:
            link.send(notice)
        self._drop_readings()
        if self._end_reason is None:
            self._state = SourceState.OFFERED
        self._note_progress()

    def _finish_if_drained(self) -> None:
        if self._state is SourceState.ENDING and not self._num_in_flight and not self._num_reads:
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
        if self._readings:
            return True
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

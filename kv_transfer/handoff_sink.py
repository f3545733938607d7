"""One hand-off on the decode worker, sans-I/O: where a payload goes, whether it is right, what to answer.

What comes before the sink is there, or for a sink with another block size, is assembled slab by slab beside it, within
the credit. Verified bytes are the sink's to place, which may take a while: their credit goes back, and COMMIT goes out,
after that. A hand-off outlives its connection: the next one asks for what is not verified yet.

In a pulled fetch the pieces are only named, and the sink copies them out of the source's memory. Nothing verifies one
by one that its block was still the source's; the answer to COMMIT does for all, so none counts as verified before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from xxhash import xxh3_64_intdigest

from kv_transfer.blocks import BlockSink, PeerMemory, SinkPiece
from kv_transfer.flow_control import ReceiveWindow
from kv_transfer.handshake import Peer
from kv_transfer.piece_order import PieceOrder
from kv_transfer.transfer_state import Received, Seal, SinkState
from kv_transfer.wire import abort_frame, failure_from_proto, seal_from_proto
from protos.common_pb2 import ErrorDetail
from protos.convert import key_to_proto
from protos.kv_transfer_pb2 import Blocks, Commit, Credit, Fetch, Frame, Nack, Piece
from protos.kv_transfer_pb2 import Seal as SealFrame
from weir.core.deadline import Clock, Deadline
from weir.core.errors import HandoffError, HopFailedError, TransferProtocolError
from weir.core.request import HandoffKey

MAX_NACKS = 64
"""Wrong pieces of one hand-off after which its source or the way to it is given up."""


_LIVE_STATES = frozenset({SinkState.REQUESTED, SinkState.STAGING, SinkState.RECEIVING, SinkState.CONFIRMING})


class SinkLink(Protocol):
    """The connection to the prefill worker."""

    @property
    def peer(self) -> Peer: ...

    def send(self, frame: Frame) -> None: ...


class HandoffSink:
    """State of one hand-off that is fetched.

    Args:
        token_bytes: bytes of K and V of one token, equal on both sides by the fingerprint.
        skip_tokens: tokens that the sink has; nothing before them is written, but for a block that holds the next one.
        initial_credit_bytes: what may come before the sink is there.
        on_news: called when `wants_sink`, `state` or `failure` has changed, or `is_placing` while it is not live.
    """

    def __init__(
        self,
        key: HandoffKey,
        *,
        adapter: str,
        token_bytes: int,
        skip_tokens: int,
        initial_credit_bytes: int,
        window_bytes: int,
        clock: Clock,
        on_news: Callable[[], None],
    ) -> None:
        self.key = key
        self._adapter = adapter
        self._token_bytes = token_bytes
        self._skip_tokens = skip_tokens
        self._initial_credit_bytes = initial_credit_bytes
        self._window_bytes = window_bytes
        self._clock = clock
        self._on_news = on_news
        self._key_message = key_to_proto(key)
        self._state = SinkState.IDLE
        self._failure: HopFailedError | None = None
        self._sink: BlockSink | None = None
        self._started_s = self._last_progress_s = clock()
        self._size_bytes = 0
        self._num_nacks = 0
        self._num_placing = 0
        self._num_verified_blocks = 0  # on earlier connections
        self._received: Received | None = None
        # Of the connection that runs:
        self._link: SinkLink | None = None
        self._memory: PeerMemory | None = None  # of the source, in a pulled fetch
        self._block_size = 0
        self._window = ReceiveWindow(0)
        self._order = PieceOrder(key, first_block=0, block_size=1, token_bytes=token_bytes)
        self._landing: SinkPiece | None = None  # what the payload that is arriving goes to, if it is the sink's
        self._assembly: dict[int, bytearray] = {}  # slabs that are not (only) received into the sink, by block index
        self._num_tokens: dict[int, int] = {}  # valid tokens of blocks that are not delivered yet
        self._named: list[Blocks] = []  # pieces that are not pulled yet
        self._seal: Seal | None = None
        self._seal_came_s = 0.0
        self._sealed_for_s = 0.0

    @property
    def state(self) -> SinkState:
        return self._state

    @property
    def is_live(self) -> bool:
        """A connection carries it and more may come."""
        return self._state in _LIVE_STATES

    @property
    def failure(self) -> HopFailedError | None:
        """Why it failed; set together with `SinkState.FAILED`."""
        return self._failure

    @property
    def wants_sink(self) -> bool:
        """Blocks or the seal came and wait for `attach_sink`."""
        return self._state is SinkState.STAGING

    @property
    def has_begun(self) -> bool:
        """Something came, now or on an earlier connection."""
        return self._sink is not None or self._state is SinkState.STAGING

    @property
    def is_placing(self) -> bool:
        """The sink still writes what it was given."""
        return self._num_placing > 0

    @property
    def last_progress_s(self) -> float:
        """When something last came, or was known not to be owed yet, on the clock."""
        return self._last_progress_s

    @property
    def num_verified_blocks(self) -> int:
        """Leading blocks that are in the sink for good; a new connection goes on behind them."""
        is_counted = self.is_live and self._sink is not None and self._memory is None
        return self._order.num_right_blocks if is_counted else self._num_verified_blocks

    @property
    def num_nacks(self) -> int:
        return self._num_nacks

    def get_received(self) -> Received:
        """The result; only once committed."""
        assert self._received is not None
        return self._received

    # The connection comes and goes

    def start(self, link: SinkLink, *, incarnation: str, deadline: Deadline, memory: PeerMemory | None = None) -> None:
        """Send FETCH for everything that is not verified; `memory` of the source makes it a pulled one."""
        assert self._state is SinkState.IDLE
        self._block_size = link.peer.block_size
        first_block = max(self._num_verified_blocks, self._skip_tokens // self._block_size)
        self._order = PieceOrder(
            self.key, first_block=first_block, block_size=self._block_size, token_bytes=self._token_bytes
        )
        self._num_tokens.clear()
        self._named.clear()
        self._memory = memory
        self._seal = None
        credit_bytes = self._initial_credit_bytes if self._sink is None else self._window_bytes
        self._window = ReceiveWindow(credit_bytes)
        self._link = link
        self._state = SinkState.REQUESTED if self._sink is None else SinkState.RECEIVING
        self._last_progress_s = self._clock()
        fetch = Fetch(
            key=self._key_message,
            incarnation=incarnation,
            adapter=self._adapter,
            skip_tokens=max(self._skip_tokens, first_block * self._block_size),
            credit_bytes=credit_bytes,
            remaining_ms=deadline.remaining_ms(self._clock),
            is_pulled=memory is not None,
        )
        link.send(Frame(fetch=fetch))

    def stop(self) -> None:
        """Its connection carries it no longer; the caller has redirected a payload that is arriving. Idempotent."""
        self._link = None
        if self._landing is not None:
            self._landing.discard()
            self._landing = None
        if not self.is_live:
            return
        self._num_verified_blocks = self.num_verified_blocks
        self._state = SinkState.IDLE
        self._assembly.clear()
        self._on_news()

    def attach_sink(self, sink: BlockSink) -> None:
        """The sink is there: deliver what was staged and open the window. Once; in any state."""
        assert self._sink is None
        self._sink = sink
        if self._state not in (SinkState.REQUESTED, SinkState.STAGING):
            return
        self._state = SinkState.RECEIVING
        self._window.open(self._window_bytes)
        for block_index in sorted(self._num_tokens):
            self._deliver_if_complete(block_index, 0)
        self._pull_named()
        self._send_credit()
        self._commit_if_complete()

    # What the prefill worker sends

    def payload_target(self, blocks: Blocks, size_bytes: int) -> memoryview | None:
        """Where the payload of this header goes; None once it has ended.

        Raises:
            TransferProtocolError: not a piece that comes next.
        """
        if not self.is_live:
            return None
        if self._memory is not None:
            raise self._violation("a payload in a pulled fetch")
        self._begin_piece(blocks, size_bytes)
        if blocks.HasField("checksum") != (self._link is not None and self._link.peer.uses_checksums):
            raise self._violation("a checksum is missing, or there where none was agreed")
        return self._land(blocks.block_index, blocks.slab_offset, size_bytes)

    def piece_named(self, blocks: Blocks) -> None:
        """A piece that is to be pulled.

        Raises:
            TransferProtocolError: not one that comes next, or none of the memory that was mapped.
        """
        if not self.is_live:
            return
        end = blocks.memory_offset + blocks.size_bytes
        if self._memory is None or not blocks.size_bytes or end > self._memory.size_bytes:
            raise self._violation(f"{blocks.size_bytes} bytes at {blocks.memory_offset} of memory that is not mapped")
        self._begin_piece(blocks, blocks.size_bytes)
        self._order.end(blocks, blocks.size_bytes)
        self._named.append(blocks)
        if self._sink is not None:
            self._pull_named()
            self._send_credit()

    def _begin_piece(self, blocks: Blocks, size_bytes: int) -> None:
        self._last_progress_s = self._clock()
        self._window.receive(size_bytes)
        self._size_bytes += size_bytes
        self._order.begin(blocks, size_bytes)
        if self._state is SinkState.REQUESTED:
            self._state = SinkState.STAGING
            self._on_news()

    def payload_received(self, blocks: Blocks, payload: memoryview) -> None:
        """The payload lies where `payload_target` said.

        Raises:
            TransferProtocolError: too many pieces were wrong.
        """
        if not self.is_live:
            return
        self._last_progress_s = self._clock()
        is_right = not blocks.HasField("checksum") or xxh3_64_intdigest(payload) == blocks.checksum
        if self._order.end(blocks, payload.nbytes, is_right=is_right):
            self._num_tokens[blocks.block_index] = blocks.num_tokens
        landing, self._landing = self._landing, None
        is_given = False  # to the sink, which says when the credit is free
        if not is_right:
            if landing is not None:
                landing.discard()
            self._refuse_piece(blocks, payload.nbytes)
        elif landing is not None:
            is_given = True
            self._num_placing += 1
            landing.place(partial(self._placed, self._window, payload.nbytes))
        if self._sink is not None and self._deliver_if_complete(blocks.block_index, payload.nbytes):
            is_given = True
        if not is_given:
            self._window.free(payload.nbytes)
        if self._sink is not None:
            self._send_credit()
            self._commit_if_complete()

    def seal(self, message: SealFrame) -> None:
        """SEAL.

        Raises:
            TransferProtocolError: it does not fit what came before it.
        """
        if not self.is_live:
            return
        self._last_progress_s = self._seal_came_s = self._clock()
        if message.num_tokens < self._skip_tokens:
            raise self._violation(f"{message.num_tokens} tokens are sealed, {self._skip_tokens} are here")
        self._order.seal(message)
        self._seal = seal_from_proto(message)
        self._sealed_for_s = message.age_us / 1e6
        if self._state is SinkState.REQUESTED:
            self._state = SinkState.STAGING
            self._on_news()
        self._commit_if_complete()

    def committed(self) -> None:
        """COMMITTED: what was pulled was the source's until all of it was here."""
        if self._state is SinkState.CONFIRMING:
            self._state = SinkState.COMMITTED
            self._on_news()

    def still_computing(self) -> None:
        """COMPUTING: nothing is owed, so that nothing comes is no silence."""
        self._last_progress_s = self._clock()

    def lost(self, reason: ErrorDetail) -> None:
        """ABORT or HANDOFF_LOST: the prefill worker will send nothing more."""
        self.fail(failure_from_proto(reason))

    def fail(self, failure: HopFailedError) -> None:
        """It cannot succeed any more; only the first reason counts."""
        if self._state not in (SinkState.COMMITTED, SinkState.FAILED):
            self._state = SinkState.FAILED
            self._failure = failure
            self._on_news()

    def _land(self, block_index: int, offset: int, size_bytes: int) -> memoryview:
        """Memory for a piece: the sink's own, unless its block began elsewhere or the sink wants it otherwise."""
        if block_index not in self._assembly and self._sink is not None and self._sink.block_size == self._block_size:
            self._landing = self._sink.target(block_index, offset, size_bytes)
            if self._landing is not None:
                return self._landing.memory
        slab = self._assembly.get(block_index)
        if slab is None:
            slab = self._assembly[block_index] = bytearray(self._token_bytes * self._block_size)
        return memoryview(slab)[offset : offset + size_bytes]

    def _refuse_piece(self, blocks: Blocks, size_bytes: int) -> None:
        self._num_nacks += 1
        if self._num_nacks > MAX_NACKS:
            raise self._violation(f"{self._num_nacks} pieces were wrong")
        piece = Piece(block_index=blocks.block_index, slab_offset=blocks.slab_offset, size_bytes=size_bytes)
        self._send(Frame(nack=Nack(key=self._key_message, pieces=[piece])))

    def _deliver_if_complete(self, block_index: int, credit_bytes: int) -> bool:
        """Give an assembled block to the sink; False if it does not take it (now).

        Args:
            credit_bytes: what of it is not given back before the sink has absorbed it.
        """
        if not self._order.is_right(block_index):
            return False
        num_tokens = self._num_tokens.pop(block_index)
        slab = self._assembly.pop(block_index, None)
        first_token = max(block_index * self._block_size, self._skip_tokens)
        end_token = block_index * self._block_size + num_tokens
        if slab is None or first_token >= end_token:
            return False
        assert self._sink is not None
        self._num_placing += 1
        on_absorbed = partial(self._placed, self._window, credit_bytes)
        self._sink.absorb(first_token, end_token - first_token, memoryview(slab), self._block_size, on_absorbed)
        return True

    def _pull_named(self) -> None:
        assert self._sink is not None
        named, self._named = self._named, []
        for piece in named:
            assert self._memory is not None
            self._num_placing += 1
            on_pulled = partial(self._pulled, self._window, piece.size_bytes)
            self._sink.pull(
                piece.block_index, piece.slab_offset, piece.size_bytes, self._memory, piece.memory_offset, on_pulled
            )

    def _pulled(self, window: ReceiveWindow, credit_bytes: int, is_there: bool) -> None:
        if not is_there and self.is_live and window is self._window:
            failure = HandoffError(f"{self.key}: the source's memory cannot be read", hop="transfer")
            self._send(abort_frame(self.key, failure))
            self.fail(failure)
        self._placed(window, credit_bytes)

    def _placed(self, window: ReceiveWindow, credit_bytes: int) -> None:
        """The sink has done with a piece or a block, which maybe came on an earlier connection."""
        self._num_placing -= 1
        window.free(credit_bytes)
        if self.is_live:
            self._last_progress_s = self._clock()
            self._send_credit()
            self._commit_if_complete()
        elif not self._num_placing:
            self._on_news()

    def _send_credit(self) -> None:
        if size_bytes := self._window.give_back():
            self._send(Frame(credit=Credit(key=self._key_message, size_bytes=size_bytes)))

    def _commit_if_complete(self) -> None:
        is_complete = self._seal is not None and not self._num_tokens and not self._num_placing
        if not is_complete or self._state is not SinkState.RECEIVING:
            return
        assert self._seal is not None
        now_s = self._clock()
        self._received = Received(
            seal=self._seal,
            size_bytes=self._size_bytes,
            transfer_s=now_s - self._started_s,
            exposed_s=self._sealed_for_s + now_s - self._seal_came_s,
        )
        self._send(Frame(commit=Commit(key=self._key_message)))
        if self._memory is not None:
            self._state = SinkState.CONFIRMING
            return
        self._state = SinkState.COMMITTED
        self._on_news()

    def _send(self, frame: Frame) -> None:
        if self._link is not None:
            self._link.send(frame)

    def _violation(self, what: str) -> TransferProtocolError:
        return TransferProtocolError(f"{self.key}: {what}", hop="transfer")

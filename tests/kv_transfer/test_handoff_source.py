"""The source's side of a hand-off: every input in every state, what goes out, and when the blocks are reusable."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64, xxh3_64_intdigest

from kv_transfer.handoff_source import HandoffSource
from kv_transfer.handshake import Peer
from kv_transfer.producer import OutgoingFrame, Producer
from kv_transfer.transfer_state import EndReason, Seal, SourceState
from protos.kv_transfer_pb2 import Fetch, Frame, Piece
from tests.fakes.kv_blocks import FakeSource
from tests.kv_transfer.identities import FIRST_TOKEN, LAYOUT, make_key
from weir.core.errors import HandoffLostError, TransferProtocolError
from weir.core.kv_layout import KvLayout
from weir.core.request import HandoffKey
from weir.core.worker import Incarnation, WorkerId

FRAME_BYTES = LAYOUT.block_bytes // 2 - 100  # three frames a block, the last one short
BLOCK_FRAMES = 3
PLENTY = 1 << 30


class FakeLink:
    """Keeps what is sent; `pull` is the connection's pump."""

    def __init__(self, incarnation: str = "d-1", *, uses_checksums: bool = True) -> None:
        self.peer = Peer(
            worker_id=WorkerId("d"),
            incarnation=Incarnation(incarnation),
            block_size=16,
            protocol_version=1,
            uses_checksums=uses_checksums,
            lease_s=0.0,
        )
        self.sent: list[Frame] = []
        self.num_wakes = 0

    def send(self, frame: Frame) -> None:
        self.sent.append(frame)

    def wake(self, producer: Producer) -> None:
        self.num_wakes += 1

    def bodies(self) -> list[str | None]:
        return [frame.WhichOneof("body") for frame in self.sent]


class Bench:
    """A hand-off of 40 tokens (two full blocks and a half) with everything around it."""

    def __init__(self, num_tokens: int = 40, blocks: FakeSource | None = None) -> None:
        self.blocks = blocks or FakeSource(LAYOUT, num_tokens)
        self.ended: list[EndReason] = []
        self.hold_ended: list[EndReason] = []
        self.now_s = 0.0
        self.link = FakeLink()
        self.in_flight: deque[OutgoingFrame] = deque()
        self.source = HandoffSource(
            make_key(),
            decode_incarnation="d-1",
            adapter="",
            source=self.blocks,
            frame_bytes=FRAME_BYTES,
            clock=lambda: self.now_s,
            on_hold_ended=lambda _, reason: self.hold_ended.append(reason),
            on_end=self.on_end,
        )

    def on_end(self, key: HandoffKey, reason: EndReason) -> None:
        self.ended.append(reason)
        self.blocks.close()

    def attach(self, link: FakeLink | None = None, *, credit_bytes: int = PLENTY, skip_tokens: int = 0) -> None:
        fetch = Fetch(credit_bytes=credit_bytes, skip_tokens=skip_tokens)
        self.source.attach(link or self.link, fetch)

    def seal(self) -> None:
        self.source.seal(Seal(num_tokens=self.blocks.num_tokens, first_token=FIRST_TOKEN, num_cached_tokens=3))

    def pull(self, *, flush: bool = True) -> list[OutgoingFrame]:
        """Everything that may go now."""
        frames = []
        while (outgoing := self.next_frame()) is not None:
            frames.append(outgoing)
        if flush:
            self.flush(len(frames))
        return frames

    def flush(self, num_frames: int) -> None:
        for _ in range(num_frames):
            self.source.frame_flushed(self.in_flight.popleft())

    def next_frame(self) -> OutgoingFrame | None:
        outgoing = self.source.next_frame()
        if outgoing is not None:
            self.in_flight.append(outgoing)
        return outgoing


def pieces(frames: list[OutgoingFrame]) -> list[tuple[int, int, int]]:
    return [
        (each.frame.blocks.block_index, each.frame.blocks.slab_offset, each.payload.nbytes)
        for each in frames
        if each.payload is not None
    ]


# Every input in every state


def _offered(bench: Bench) -> None:
    bench.source.extend(1)


def _streaming(bench: Bench) -> None:
    bench.source.extend(2)
    bench.attach(credit_bytes=FRAME_BYTES)
    bench.pull(flush=False)


def _sent(bench: Bench) -> None:
    bench.seal()
    bench.attach()
    bench.pull()


def _ending(bench: Bench) -> None:
    _streaming(bench)
    bench.source.end(EndReason.RELEASED)


def _ended(bench: Bench) -> None:
    bench.source.end(EndReason.RELEASED)


STATES: dict[SourceState, Callable[[Bench], None]] = {
    SourceState.OFFERED: _offered,
    SourceState.STREAMING: _streaming,
    SourceState.SENT: _sent,
    SourceState.ENDING: _ending,
    SourceState.ENDED: _ended,
}

S = SourceState
REFUSED = "refused"  # TransferProtocolError: the connection is closed
INPUTS: dict[str, Callable[[Bench], object]] = {
    "extend": lambda b: b.source.extend(2),
    "extend back": lambda b: b.source.extend(0),
    "seal": lambda b: b.seal(),
    "fail": lambda b: b.source.fail(HandoffLostError("x")),
    "fetch again": lambda b: b.attach(),
    "fetch elsewhere": lambda b: b.attach(FakeLink()),
    "credit": lambda b: b.source.credit(b.link, 1),
    "credit elsewhere": lambda b: b.source.credit(FakeLink(), 1),
    "credit beyond": lambda b: b.source.credit(b.link, 1 << 50),
    "nack": lambda b: b.source.nack(b.link, [Piece(block_index=0, slab_offset=0, size_bytes=FRAME_BYTES)]),
    "nack unsent": lambda b: b.source.nack(b.link, [Piece(block_index=9, slab_offset=0, size_bytes=1)]),
    "nack elsewhere": lambda b: b.source.nack(FakeLink(), [Piece(block_index=9)]),
    "commit": lambda b: b.source.commit(b.link),
    "commit elsewhere": lambda b: b.source.commit(FakeLink()),
    "abort": lambda b: b.source.abort(b.link),
    "abort of a stranger": lambda b: b.source.abort(FakeLink("e-1")),
    "rebind": lambda b: b.source.rebind("e-1"),
    "rebind to the same": lambda b: b.source.rebind("d-1"),
    "end": lambda b: b.source.end(EndReason.EXPIRED),
    "link lost": lambda b: b.source.link_lost(b.link),
    "link lost elsewhere": lambda b: b.source.link_lost(FakeLink()),
    "next frame": lambda b: b.next_frame(),
}
# The state after the input, from OFFERED, STREAMING (one frame in flight, no credit), SENT, ENDING, ENDED.
EXPECTED: dict[str, tuple[SourceState | str, ...]] = {
    "extend": (S.OFFERED, S.STREAMING, S.SENT, S.ENDING, S.ENDED),
    "extend back": (S.OFFERED, S.STREAMING, S.SENT, S.ENDING, S.ENDED),
    "seal": (S.OFFERED, S.STREAMING, S.SENT, S.ENDING, S.ENDED),
    "fail": (S.ENDED, S.ENDING, S.ENDED, S.ENDING, S.ENDED),
    "fetch again": (S.STREAMING, REFUSED, REFUSED, S.ENDING, S.ENDED),
    "fetch elsewhere": (S.STREAMING, S.STREAMING, S.STREAMING, S.ENDING, S.ENDED),
    "credit": (S.OFFERED, S.STREAMING, S.SENT, S.ENDING, S.ENDED),
    "credit elsewhere": (S.OFFERED, S.STREAMING, S.SENT, S.ENDING, S.ENDED),
    "credit beyond": (S.OFFERED, REFUSED, REFUSED, S.ENDING, S.ENDED),
    "nack": (S.OFFERED, S.STREAMING, S.STREAMING, S.ENDING, S.ENDED),
    "nack unsent": (S.OFFERED, REFUSED, REFUSED, S.ENDING, S.ENDED),
    "nack elsewhere": (S.OFFERED, S.STREAMING, S.SENT, S.ENDING, S.ENDED),
    "commit": (S.OFFERED, REFUSED, S.ENDED, S.ENDING, S.ENDED),
    "commit elsewhere": (S.OFFERED, S.STREAMING, S.SENT, S.ENDING, S.ENDED),
    "abort": (S.ENDED, S.ENDING, S.ENDED, S.ENDING, S.ENDED),
    "abort of a stranger": (S.OFFERED, S.STREAMING, S.SENT, S.ENDING, S.ENDED),
    "rebind": (S.OFFERED, S.OFFERED, S.OFFERED, S.ENDING, S.ENDED),
    "rebind to the same": (S.OFFERED, S.STREAMING, S.SENT, S.ENDING, S.ENDED),
    "end": (S.ENDED, S.ENDING, S.ENDED, S.ENDING, S.ENDED),
    "link lost": (S.OFFERED, S.OFFERED, S.OFFERED, S.ENDING, S.ENDED),
    "link lost elsewhere": (S.OFFERED, S.STREAMING, S.SENT, S.ENDING, S.ENDED),
    "next frame": (S.OFFERED, S.STREAMING, S.SENT, S.ENDING, S.ENDED),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", INPUTS)
def test_any_input_in_any_state(name: str, state: SourceState) -> None:
    bench = Bench()
    STATES[state](bench)
    assert bench.source.state is state
    expected = EXPECTED[name][list(STATES).index(state)]
    if expected == REFUSED:
        with pytest.raises(TransferProtocolError):
            INPUTS[name](bench)
        assert bench.source.is_held, "a peer's fault costs its connection, not the hold"
    else:
        INPUTS[name](bench)
        assert bench.source.state is expected
    # Whatever happened, the hold can be ended once and the blocks come back once.
    bench.source.end(EndReason.CLOSED)
    while bench.source.state is SourceState.ENDING:
        bench.flush(1)
    bench.source.end(EndReason.CLOSED)
    assert len(bench.ended) == 1
    assert bench.hold_ended == bench.ended


@given(st.lists(st.sampled_from([*INPUTS, "flush"]), max_size=40))
def test_blocks_come_back_once_and_only_when_nothing_is_in_flight(names: list[str]) -> None:
    bench = Bench()
    num_in_flight = 0
    for name in names:
        if name == "flush":
            if num_in_flight:
                bench.flush(1)
                num_in_flight -= 1
        elif name == "next frame":
            num_in_flight += bench.next_frame() is not None
        else:
            try:
                INPUTS[name](bench)
            except TransferProtocolError:
                bench.source.link_lost(bench.link)
        assert not (bench.ended and num_in_flight)
        assert bench.source.is_held != bool(bench.hold_ended)
        assert len(bench.ended) <= 1
    bench.source.end(EndReason.CLOSED)
    bench.flush(num_in_flight)
    assert len(bench.ended) == 1


# What goes out


def test_only_full_blocks_go_before_the_seal_and_the_rest_with_it() -> None:
    bench = Bench()
    bench.attach()
    bench.source.extend(1)
    assert {block for block, _, _ in pieces(bench.pull())} == {0}
    bench.source.extend(2)
    assert {block for block, _, _ in pieces(bench.pull())} == {1}
    bench.seal()
    frames = bench.pull()
    assert {block for block, _, _ in pieces(frames)} == {2}
    assert frames[0].frame.blocks.num_tokens == 8
    seal = frames[-1].frame.seal
    assert (seal.first_block, seal.num_blocks, seal.num_tokens, seal.num_cached_tokens) == (0, 3, 40, 3)


def test_the_pieces_of_a_block_are_its_slab_in_order() -> None:
    bench = Bench()
    bench.seal()
    bench.attach()
    frames = [each for each in bench.pull() if each.payload is not None]
    assert [each.frame.blocks.sequence_number for each in frames] == list(range(3 * BLOCK_FRAMES))
    assert all(each.payload is not None and each.payload.nbytes <= FRAME_BYTES for each in frames)
    joined = b"".join(bytes(each.payload or b"") for each in frames)
    assert joined == bench.blocks.slabs.tobytes()


def test_payload_is_the_source_s_own_memory() -> None:
    bench = Bench()
    bench.seal()
    bench.attach()
    payload = bench.pull(flush=False)[0].payload
    assert payload is not None
    bench.blocks.slabs[...] = 5.0
    assert np.frombuffer(payload, dtype=np.float32)[0] == 5.0


def test_checksums_and_the_digest_over_them() -> None:
    bench = Bench()
    bench.seal()
    bench.attach()
    frames = bench.pull()
    digest = xxh3_64()
    for each in frames[:-1]:
        assert each.payload is not None
        assert each.frame.blocks.checksum == xxh3_64_intdigest(each.payload)
        digest.update(each.frame.blocks.checksum.to_bytes(8, "little"))
    assert frames[-1].frame.seal.digest == digest.intdigest()


def test_without_checksums_none_is_made() -> None:
    bench = Bench()
    bench.seal()
    bench.attach(FakeLink(uses_checksums=False))
    assert not any(each.frame.blocks.HasField("checksum") for each in bench.pull())


def test_never_more_than_the_credit() -> None:
    bench = Bench()
    bench.seal()
    bench.attach(credit_bytes=FRAME_BYTES * 2 - 1)
    assert pieces(bench.pull()) == [(0, 0, FRAME_BYTES)]
    assert bench.source.credit(bench.link, 1)
    assert pieces(bench.pull()) == [(0, FRAME_BYTES, FRAME_BYTES)]
    assert pieces(bench.pull()) == []


def test_a_fetch_starts_at_the_block_that_holds_the_next_token() -> None:
    for skip_tokens, first_block in ((0, 0), (15, 0), (16, 1), (31, 1), (39, 2), (48, 3)):
        bench = Bench()
        bench.seal()
        bench.attach(skip_tokens=skip_tokens)
        frames = bench.pull()
        assert {block for block, _, _ in pieces(frames)} == set(range(first_block, 3))
        assert frames[-1].frame.seal.first_block == first_block


@pytest.mark.parametrize("seal_first", [True, False])
def test_skipping_more_than_there_is_gets_refused_and_costs_no_hold(seal_first: bool) -> None:
    bench = Bench()
    for step in (bench.seal, lambda: bench.attach(skip_tokens=64))[:: 1 if seal_first else -1]:
        step()
    assert bench.link.bodies() == ["handoff_lost"]
    assert bench.source.state is SourceState.OFFERED
    bench.attach(FakeLink())
    assert pieces(bench.pull())


def test_a_nack_sends_exactly_that_piece_again_and_before_the_rest() -> None:
    bench = Bench()
    bench.source.extend(1)
    bench.attach()
    bench.pull()
    bench.source.extend(2)
    bench.source.nack(bench.link, [Piece(block_index=0, slab_offset=FRAME_BYTES, size_bytes=FRAME_BYTES)])
    assert pieces(bench.pull())[:2] == [(0, FRAME_BYTES, FRAME_BYTES), (1, 0, FRAME_BYTES)]


def test_a_resend_waits_for_credit_and_the_commit_for_the_resend() -> None:
    bench = Bench()
    bench.seal()
    bench.attach(credit_bytes=LAYOUT.block_bytes * 3)
    bench.pull()
    bench.source.nack(bench.link, [Piece(block_index=2, slab_offset=0, size_bytes=FRAME_BYTES)])
    assert bench.pull() == []
    with pytest.raises(TransferProtocolError, match="before its seal"):
        bench.source.commit(bench.link)
    bench.source.credit(bench.link, FRAME_BYTES)
    assert pieces(bench.pull()) == [(2, 0, FRAME_BYTES)]
    assert bench.source.commit(bench.link)


@pytest.mark.parametrize(
    "piece",
    [
        Piece(block_index=0, slab_offset=0, size_bytes=0),
        Piece(block_index=0, slab_offset=0, size_bytes=FRAME_BYTES + 1),
        Piece(block_index=0, slab_offset=LAYOUT.block_bytes - 1, size_bytes=2),
        Piece(block_index=2, slab_offset=0, size_bytes=1),
        Piece(block_index=1 << 31, slab_offset=0, size_bytes=1),
    ],
)
def test_a_nack_of_what_was_never_sent_is_refused(piece: Piece) -> None:
    bench = Bench()
    bench.source.extend(2)
    bench.attach()
    bench.pull()
    with pytest.raises(TransferProtocolError, match="never sent"):
        bench.source.nack(bench.link, [piece])


def test_a_new_connection_gets_everything_it_asks_for_from_sequence_number_zero() -> None:
    bench = Bench()
    bench.seal()
    bench.attach()
    bench.pull()
    other = FakeLink()
    bench.attach(other, skip_tokens=16)
    frames = bench.pull()
    assert [each.frame.blocks.sequence_number for each in frames[:-1]] == list(range(2 * BLOCK_FRAMES))
    assert bench.source.commit(bench.link) is False, "the old connection is not asked any more"
    assert bench.source.commit(other)


# Aborts


def test_an_abort_with_bytes_in_flight_is_answered_twice() -> None:
    bench = Bench()
    bench.seal()
    bench.attach()
    num_frames = len(bench.pull(flush=False))
    bench.source.abort(bench.link)
    bench.flush(num_frames - 1)
    assert [frame.abort_ack.drained for frame in bench.link.sent] == [False]
    assert bench.ended == []
    bench.flush(1)
    assert [frame.abort_ack.drained for frame in bench.link.sent] == [False, True]
    assert bench.link.sent[-1].abort_ack.last_sequence_number == 3 * BLOCK_FRAMES
    assert bench.ended == [EndReason.ABORTED]


def test_an_abort_with_nothing_in_flight_is_answered_once_and_again_when_repeated() -> None:
    bench = Bench()
    bench.attach()
    bench.source.abort(bench.link)
    bench.source.abort(bench.link)
    assert [frame.abort_ack.drained for frame in bench.link.sent] == [True, True]


def test_a_failure_and_a_rebinding_reach_whoever_fetches() -> None:
    bench = Bench()
    bench.attach()
    bench.source.rebind("e-1")
    assert bench.link.bodies() == ["abort"]
    other = FakeLink("e-1")
    bench.attach(other)
    bench.source.fail(HandoffLostError("the computation failed"))
    assert other.sent[0].abort.reason.message == "the computation failed"
    assert bench.link.bodies() == ["abort"]


# Progress


def test_progress_age_counts_only_what_this_side_owes() -> None:
    bench = Bench()
    bench.source.extend(1)
    bench.now_s = 5.0
    assert bench.source.progress_age_s() == 0.0, "nobody fetches"
    bench.attach(credit_bytes=FRAME_BYTES)
    bench.now_s = 7.0
    assert bench.source.progress_age_s() == 2.0, "it could be sent"
    bench.pull(flush=False)
    bench.now_s = 8.0
    assert bench.source.progress_age_s() == 1.0, "it is in flight"
    bench.flush(1)
    bench.now_s = 20.0
    assert bench.source.progress_age_s() == 0.0, "there is no credit"


def test_it_awaits_computation_only_while_it_is_fetched_and_owes_nothing() -> None:
    bench = Bench()
    assert not bench.source.awaits_computation, "nobody fetches"
    bench.attach(credit_bytes=FRAME_BYTES)
    assert bench.source.awaits_computation
    bench.source.extend(1)
    assert not bench.source.awaits_computation, "a block is owed"
    bench.pull(flush=False)
    bench.source.credit(bench.link, PLENTY)
    bench.pull(flush=False)
    assert not bench.source.awaits_computation, "it is in flight"
    bench.flush(BLOCK_FRAMES)
    assert bench.source.awaits_computation
    bench.source.nack(bench.link, [Piece(block_index=0, slab_offset=0, size_bytes=FRAME_BYTES)])
    assert not bench.source.awaits_computation, "a piece is owed again"
    bench.pull()
    assert bench.source.awaits_computation
    bench.seal()
    assert not bench.source.awaits_computation, "all is computed"


# Blocks that are read through host memory


class PendingRead:
    """A piece that is there when the test says so."""

    def __init__(self, slab: memoryview, on_read: Callable[[], None]) -> None:
        self.payload: memoryview | None = None
        self.is_released = False
        self._slab = slab
        self._on_read = on_read

    def end(self) -> None:
        if not self.is_released:
            self.payload = self._slab
        self._on_read()

    def release(self) -> None:
        assert not self.is_released
        self.is_released = True


class PendingSource(FakeSource):
    """Keeps every read that it is asked for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reads: list[PendingRead] = []

    def read(  # type: ignore[override]
        self, block_index: int, slab_offset: int, size_bytes: int, on_read: Callable[[], None]
    ) -> PendingRead:
        self.reads.append(PendingRead(super().read(block_index, slab_offset, size_bytes, on_read).memory, on_read))
        return self.reads[-1]


def pending_bench() -> tuple[Bench, list[PendingRead]]:
    blocks = PendingSource(LAYOUT, 40)
    return Bench(blocks=blocks), blocks.reads


def test_a_frame_waits_for_its_bytes_and_those_behind_are_read_meanwhile_and_go_in_order() -> None:
    bench, reads = pending_bench()
    bench.seal()
    bench.attach()
    assert bench.pull() == []
    assert len(reads) == 3 * BLOCK_FRAMES, "nothing is read ahead"
    reads[1].end()
    assert bench.pull() == []
    num_wakes = bench.link.num_wakes
    reads[0].end()
    assert bench.link.num_wakes > num_wakes
    assert pieces(bench.pull()) == [(0, 0, FRAME_BYTES), (0, FRAME_BYTES, FRAME_BYTES)]
    for read in reads[2:]:
        read.end()
    frames = bench.pull()
    assert frames[-1].frame.seal.num_blocks == 3
    assert all(read.is_released for read in reads)


def test_no_more_is_read_than_the_credit_and_the_read_ahead_cover() -> None:
    bench, reads = pending_bench()
    bench.seal()
    bench.attach(credit_bytes=2 * FRAME_BYTES)
    bench.pull()
    assert len(reads) == 2
    large = KvLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, kv_dtype="float16")
    blocks = PendingSource(large, 80)
    source = HandoffSource(
        make_key(),
        decode_incarnation="d-1",
        adapter="",
        source=blocks,
        frame_bytes=1 << 19,
        clock=lambda: 0.0,
        on_hold_ended=lambda *_: None,
        on_end=lambda *_: None,
    )
    source.seal(Seal(num_tokens=80, first_token=FIRST_TOKEN))
    source.attach(FakeLink(), Fetch(credit_bytes=PLENTY))
    assert source.next_frame() is None
    assert len(blocks.reads) == 4, "2 MiB of 10"


def test_a_piece_that_was_wrong_is_read_again() -> None:
    bench, reads = pending_bench()
    bench.source.extend(1)
    bench.attach()
    bench.pull()
    for read in list(reads):
        read.end()
    assert len(pieces(bench.pull())) == BLOCK_FRAMES
    bench.source.nack(bench.link, [Piece(block_index=0, slab_offset=FRAME_BYTES, size_bytes=FRAME_BYTES)])
    assert bench.pull() == []
    reads[-1].end()
    assert pieces(bench.pull()) == [(0, FRAME_BYTES, FRAME_BYTES)]


def test_a_piece_that_is_read_but_not_sent_cannot_be_wrong() -> None:
    bench, _ = pending_bench()
    bench.seal()
    bench.attach()
    bench.pull()
    with pytest.raises(TransferProtocolError, match="never sent"):
        bench.source.nack(bench.link, [Piece(block_index=0, slab_offset=0, size_bytes=FRAME_BYTES)])
    with pytest.raises(TransferProtocolError, match="before its seal"):
        bench.source.commit(bench.link)


@pytest.mark.parametrize("ends_by", ["end", "link lost", "fetch elsewhere", "rebind"])
def test_blocks_come_back_when_the_last_read_is_over(ends_by: str) -> None:
    bench, reads = pending_bench()
    bench.seal()
    bench.attach()
    bench.pull()
    reads[0].end()
    INPUTS[ends_by](bench)
    bench.source.end(EndReason.RELEASED)
    assert all(read.is_released for read in reads), "what is not sent any more is not kept"
    for read in reads[1:]:
        assert bench.ended == []
        read.end()
    assert len(bench.ended) == 1


def test_a_new_connection_reads_everything_anew() -> None:
    bench, reads = pending_bench()
    bench.seal()
    bench.attach()
    bench.pull()
    other = FakeLink()
    bench.attach(other)
    assert bench.pull() == []
    for read in list(reads):
        read.end()
    frames = bench.pull()
    assert [each.frame.blocks.sequence_number for each in frames[:-1]] == list(range(3 * BLOCK_FRAMES))
    assert bench.source.commit(other)


# Pulled fetches


def test_a_pulled_fetch_gets_names_without_payload_or_checksum_and_its_commit_is_answered() -> None:
    bench = Bench()
    bench.seal()
    bench.source.attach(bench.link, Fetch(credit_bytes=PLENTY, is_pulled=True))
    frames = bench.pull()
    named = [each.frame.blocks for each in frames[:-1]]
    assert all(each.payload is None for each in frames)
    assert not any(each.HasField("checksum") for each in named)
    joined = b"".join(bytes(bench.blocks.memory.view(each.memory_offset, each.size_bytes)) for each in named)
    assert joined == bench.blocks.slabs.tobytes()
    assert frames[-1].frame.seal.digest == xxh3_64().intdigest()
    assert bench.ended == []
    assert bench.source.commit(bench.link)
    assert bench.link.bodies() == ["committed"]
    assert bench.ended == [EndReason.COMMITTED]


def test_a_commit_after_the_hold_has_ended_is_not_confirmed() -> None:
    bench = Bench()
    bench.seal()
    bench.source.attach(bench.link, Fetch(credit_bytes=PLENTY, is_pulled=True))
    bench.pull()
    bench.source.end(EndReason.EXPIRED)
    assert not bench.source.commit(bench.link), "its server answers that with HANDOFF_LOST"
    assert "committed" not in bench.link.bodies()


def test_a_commit_of_what_frames_carried_is_not_answered() -> None:
    bench = Bench()
    bench.seal()
    bench.attach()
    bench.pull()
    assert bench.source.commit(bench.link)
    assert bench.link.bodies() == []

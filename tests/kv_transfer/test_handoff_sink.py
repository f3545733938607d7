"""The sink's side of a hand-off: every input in every state, where bytes go, what is answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.handoff_sink import MAX_NACKS, HandoffSink
from kv_transfer.handoff_source import HandoffSource
from kv_transfer.handshake import Peer
from kv_transfer.transfer_state import Seal, SinkState
from protos.common_pb2 import ErrorDetail
from protos.kv_transfer_pb2 import Blocks, Frame
from protos.kv_transfer_pb2 import Seal as SealFrame
from tests.fakes.kv_blocks import FakeSink, FakeSource, LateSink, tokens_of
from tests.kv_transfer.identities import FIRST_TOKEN, LAYOUT, make_key, with_block_size
from weir.core.deadline import Deadline
from weir.core.errors import HandoffError, HandoffLostError, TransferProtocolError, WrongIncarnationError
from weir.core.kv_layout import KvLayout
from weir.core.worker import Incarnation, WorkerId

FRAME_BYTES = LAYOUT.block_bytes // 2 - 100
INITIAL_CREDIT = 1 << 20


class FakeLink:
    """The connection as both sides see it."""

    def __init__(self, *, uses_checksums: bool = True, block_size: int = 16) -> None:
        self.peer = Peer(
            worker_id=WorkerId("p"),
            incarnation=Incarnation("p-1"),
            block_size=block_size,
            protocol_version=1,
            uses_checksums=uses_checksums,
            lease_s=30.0,
        )
        self.sent: list[Frame] = []

    def send(self, frame: Frame) -> None:
        self.sent.append(frame)

    def wake(self, producer: object) -> None:
        pass

    def bodies(self) -> list[str | None]:
        return [frame.WhichOneof("body") for frame in self.sent]


@dataclass
class PendingSink(LateSink):
    """Keeps everything that it should place."""

    writes: list[Callable[[], None]] = field(default_factory=list)

    def defer(self, write: Callable[[], None]) -> None:
        self.writes.append(write)


class Bench:
    """A real source of 40 tokens feeds the sink, frame by frame."""

    def __init__(
        self,
        *,
        skip_tokens: int = 0,
        layout: KvLayout = LAYOUT,
        uses_checksums: bool = True,
        is_direct: bool = True,
        is_pending: bool = False,
        credit_bytes: int = INITIAL_CREDIT,
        window_bytes: int = INITIAL_CREDIT * 4,
        is_pulled: bool = False,
    ) -> None:
        self.now_s = 0.0
        self.num_news = 0
        self.blocks = FakeSource(LAYOUT, 40)
        sink = PendingSink if is_pending else FakeSink
        self.memory = sink(layout, 40, skip_tokens=skip_tokens, is_direct=is_direct)
        self.shared = self.blocks.memory if is_pulled else None
        self.link = FakeLink(uses_checksums=uses_checksums)
        self.uses_checksums = uses_checksums
        self.handoff = HandoffSink(
            make_key(),
            adapter="a",
            token_bytes=LAYOUT.token_bytes,
            skip_tokens=skip_tokens,
            initial_credit_bytes=credit_bytes,
            window_bytes=window_bytes,
            clock=lambda: self.now_s,
            on_news=self.on_news,
        )
        self.source = HandoffSource(
            make_key(),
            decode_incarnation="p-1",
            adapter="a",
            source=self.blocks,
            frame_bytes=FRAME_BYTES,
            clock=lambda: self.now_s,
            on_hold_ended=lambda *_: None,
            on_end=lambda *_: None,
        )
        self.source.seal(Seal(num_tokens=40, first_token=FIRST_TOKEN))

    def on_news(self) -> None:
        self.num_news += 1

    def start(self) -> None:
        self.handoff.start(self.link, incarnation="p-1", deadline=Deadline(9.0), memory=self.shared)
        self.source.attach(FakeLink(uses_checksums=self.uses_checksums), self.link.sent[-1].fetch)

    def step(self, *, flip: bool = False) -> bool:
        """Bring one frame over, maybe with one payload bit changed. False if there is none."""
        outgoing = self.source.next_frame()
        if outgoing is None:
            return False
        self.source.frame_flushed(outgoing)
        if outgoing.frame.HasField("seal"):
            self.handoff.seal(outgoing.frame.seal)
            return True
        if outgoing.payload is None:
            self.handoff.piece_named(outgoing.frame.blocks)
            return True
        target = self.handoff.payload_target(outgoing.frame.blocks, outgoing.payload.nbytes)
        if target is not None:
            target[:] = outgoing.payload
            if flip:
                target[-1] ^= 1
            self.handoff.payload_received(outgoing.frame.blocks, target)
        return True

    def run(self, num_read: int | None = None) -> None:
        """Bring everything over, and what goes back too, but for the first `num_read` frames; None: those until now."""
        num_read = len(self.link.sent) if num_read is None else num_read
        while True:
            moved = self.step()
            for frame in self.link.sent[num_read:]:
                moved = True
                if frame.HasField("credit"):
                    self.source.credit(self.source.link, frame.credit.size_bytes)  # type: ignore[arg-type]
                elif frame.HasField("nack"):
                    self.source.nack(self.source.link, frame.nack.pieces)  # type: ignore[arg-type]
            num_read = len(self.link.sent)
            if not moved:
                return

    def assert_arrived(self) -> None:
        assert self.handoff.state is SinkState.COMMITTED
        assert self.link.bodies()[-1] == "commit"
        skip = self.memory.skip_tokens
        assert np.array_equal(self.memory.tokens()[skip:], tokens_of(LAYOUT, 40, 0)[skip:])


# Every input in every state


def _requested(bench: Bench) -> None:
    bench.start()


def _staging(bench: Bench) -> None:
    bench.start()
    bench.step()


def _receiving(bench: Bench) -> None:
    _staging(bench)
    bench.handoff.attach_sink(bench.memory)


def _confirming(bench: Bench) -> None:
    bench.shared = bench.blocks.memory
    _receiving(bench)
    bench.run()


def _committed(bench: Bench) -> None:
    _receiving(bench)
    bench.run()


def _failed(bench: Bench) -> None:
    _staging(bench)
    bench.handoff.fail(HandoffLostError("x"))


def _none(bench: Bench) -> None:
    pass


STATES: dict[SinkState, Callable[[Bench], None]] = {
    SinkState.IDLE: _none,
    SinkState.REQUESTED: _requested,
    SinkState.STAGING: _staging,
    SinkState.RECEIVING: _receiving,
    SinkState.CONFIRMING: _confirming,
    SinkState.COMMITTED: _committed,
    SinkState.FAILED: _failed,
}


def _payload_out_of_order(bench: Bench) -> None:
    bench.handoff.payload_target(Blocks(sequence_number=99), 1)


def _payload_next(bench: Bench) -> None:
    bench.step()


INPUTS: dict[str, Callable[[Bench], object]] = {
    "next frame": _payload_next,
    "frame out of order": _payload_out_of_order,
    "wrong seal": lambda b: b.handoff.seal(SealFrame(num_blocks=7, num_tokens=100)),
    "lost": lambda b: b.handoff.lost(ErrorDetail(error="HandoffLostError", message="gone")),
    "stop": lambda b: b.handoff.stop(),
    "fail": lambda b: b.handoff.fail(HandoffLostError("y")),
    "committed": lambda b: b.handoff.committed(),
    "piece of no memory": lambda b: b.handoff.piece_named(Blocks(memory_offset=1 << 40, size_bytes=1)),
}
S = SinkState
REFUSED = "refused"
# From IDLE, REQUESTED, STAGING, RECEIVING, CONFIRMING, COMMITTED, FAILED.
EXPECTED: dict[str, tuple[SinkState | str, ...]] = {
    "next frame": (S.IDLE, S.STAGING, S.STAGING, S.RECEIVING, S.CONFIRMING, S.COMMITTED, S.FAILED),
    "frame out of order": (S.IDLE, REFUSED, REFUSED, REFUSED, REFUSED, S.COMMITTED, S.FAILED),
    "wrong seal": (S.IDLE, REFUSED, REFUSED, REFUSED, REFUSED, S.COMMITTED, S.FAILED),
    "lost": (S.FAILED, S.FAILED, S.FAILED, S.FAILED, S.FAILED, S.COMMITTED, S.FAILED),
    "stop": (S.IDLE, S.IDLE, S.IDLE, S.IDLE, S.IDLE, S.COMMITTED, S.FAILED),
    "fail": (S.FAILED, S.FAILED, S.FAILED, S.FAILED, S.FAILED, S.COMMITTED, S.FAILED),
    "committed": (S.IDLE, S.REQUESTED, S.STAGING, S.RECEIVING, S.COMMITTED, S.COMMITTED, S.FAILED),
    "piece of no memory": (S.IDLE, REFUSED, REFUSED, REFUSED, REFUSED, S.COMMITTED, S.FAILED),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", INPUTS)
def test_any_input_in_any_state(name: str, state: SinkState) -> None:
    bench = Bench()
    STATES[state](bench)
    assert bench.handoff.state is state
    expected = EXPECTED[name][list(STATES).index(state)]
    if expected == REFUSED:
        with pytest.raises(TransferProtocolError):
            INPUTS[name](bench)
        assert bench.handoff.is_live, "the connection is at fault, the next one may do better"
    else:
        INPUTS[name](bench)
        assert bench.handoff.state is expected
    bench.handoff.stop()
    assert not bench.handoff.is_live


@pytest.mark.parametrize("state", [S.IDLE, S.REQUESTED, S.STAGING, S.FAILED])
def test_a_sink_may_come_in_any_state(state: SinkState) -> None:
    bench = Bench()
    STATES[state](bench)
    bench.handoff.attach_sink(bench.memory)
    assert bench.handoff.state is {S.REQUESTED: S.RECEIVING, S.STAGING: S.RECEIVING}.get(state, state)
    if bench.handoff.is_live:
        bench.run()
        bench.assert_arrived()


# Where bytes go


@pytest.mark.parametrize("num_staged", range(11))
@pytest.mark.parametrize("is_direct", [True, False])
def test_blocks_arrive_whenever_the_sink_comes(num_staged: int, is_direct: bool) -> None:
    bench = Bench(is_direct=is_direct)
    bench.start()
    for _ in range(num_staged):
        bench.step()
    assert bench.handoff.wants_sink == (num_staged > 0)
    bench.handoff.attach_sink(bench.memory)
    bench.run()
    bench.assert_arrived()
    assert bench.handoff.get_received().size_bytes == 3 * LAYOUT.block_bytes


def test_with_equal_block_sizes_payload_lands_in_the_sink_s_own_slab() -> None:
    bench = Bench()
    bench.start()
    bench.handoff.attach_sink(bench.memory)
    bench.step()
    assert bench.memory.slabs[0].tobytes()[:FRAME_BYTES] == bench.blocks.slabs[0].tobytes()[:FRAME_BYTES]
    bench.run()
    assert bench.memory.num_absorbed == 0


@pytest.mark.parametrize("block_size", [1, 8, 12, 64])
@pytest.mark.parametrize("skip_blocks", [0, 1])
def test_other_block_sizes_are_mapped_by_tokens(block_size: int, skip_blocks: int) -> None:
    skip_tokens = min(skip_blocks * block_size, 39 - 39 % block_size)
    bench = Bench(layout=with_block_size(block_size), skip_tokens=skip_tokens)
    bench.start()
    bench.handoff.attach_sink(bench.memory)
    bench.run()
    bench.assert_arrived()
    assert bench.memory.num_absorbed == 40 - skip_tokens, "tokens that are there already are not written"


def test_a_hand_off_with_nothing_to_send_asks_for_the_sink_at_the_seal() -> None:
    bench = Bench(skip_tokens=48)
    bench.blocks = FakeSource(LAYOUT, 48)
    bench.source = HandoffSource(
        make_key(),
        decode_incarnation="p-1",
        adapter="a",
        source=bench.blocks,
        frame_bytes=FRAME_BYTES,
        clock=lambda: 0.0,
        on_hold_ended=lambda *_: None,
        on_end=lambda *_: None,
    )
    bench.source.seal(Seal(num_tokens=48, first_token=FIRST_TOKEN))
    bench.start()
    bench.step()
    assert bench.handoff.wants_sink
    bench.handoff.attach_sink(bench.memory)
    assert bench.handoff.state is SinkState.COMMITTED
    assert bench.handoff.get_received().size_bytes == 0


def test_news_come_with_what_changes() -> None:
    bench = Bench()
    bench.start()
    assert bench.num_news == 0
    bench.step()
    assert bench.num_news == 1
    bench.step()
    assert bench.num_news == 1, "not with every frame"
    bench.handoff.attach_sink(bench.memory)
    bench.run()
    assert bench.num_news == 2


def test_exposed_time_runs_from_the_seal_at_the_source_to_the_commit() -> None:
    bench = Bench()
    bench.now_s = 1.5  # sealed at 0
    bench.start()
    while bench.step():
        pass
    bench.now_s = 1.75
    bench.handoff.attach_sink(bench.memory)
    received = bench.handoff.get_received()
    assert received.exposed_s == pytest.approx(1.75)
    assert received.transfer_s == pytest.approx(1.75)
    assert received.seal == Seal(num_tokens=40, first_token=FIRST_TOKEN)


# What is wrong comes again


@pytest.mark.parametrize("num_staged", [0, 4, 9])
@given(flips=st.sets(st.integers(0, 15)))
def test_wrong_pieces_come_again_and_nothing_wrong_is_accepted(num_staged: int, flips: set[int]) -> None:
    bench = Bench()
    bench.start()
    for index in range(num_staged):
        bench.step(flip=index in flips)
    bench.handoff.attach_sink(bench.memory)
    num_read = 0
    for index in range(num_staged, 100):
        moved = bench.step(flip=index in flips)
        for frame in bench.link.sent[num_read:]:
            if frame.HasField("nack"):
                bench.source.nack(bench.source.link, frame.nack.pieces)  # type: ignore[arg-type]
        moved = moved or num_read < len(bench.link.sent)
        num_read = len(bench.link.sent)
        if not moved:
            break
    bench.assert_arrived()
    bodies = bench.link.bodies()
    assert bodies.count("nack") == bench.handoff.num_nacks <= len(flips)
    assert bodies.count("commit") == 1


def test_a_nack_names_exactly_the_bad_piece() -> None:
    bench = Bench()
    _receiving(bench)
    bench.step(flip=True)
    [nack] = [frame.nack for frame in bench.link.sent if frame.HasField("nack")]
    [piece] = nack.pieces
    assert (piece.block_index, piece.slab_offset, piece.size_bytes) == (0, FRAME_BYTES, FRAME_BYTES)


def test_a_source_that_is_always_wrong_is_given_up() -> None:
    bench = Bench()
    bench.start()
    bench.handoff.attach_sink(bench.memory)
    for _ in range(MAX_NACKS):
        bench.step(flip=True)
        bench.source.nack(bench.source.link, bench.link.sent[-1].nack.pieces)  # type: ignore[arg-type]
    with pytest.raises(TransferProtocolError, match="pieces were wrong"):
        bench.step(flip=True)


def test_another_piece_in_place_of_a_bad_one_is_refused() -> None:
    bench = Bench()
    _receiving(bench)
    bench.step(flip=True)
    again = Blocks(block_index=0, slab_offset=FRAME_BYTES, sequence_number=2, num_tokens=16, checksum=1)
    with pytest.raises(TransferProtocolError, match="came again as another"):
        bench.handoff.payload_target(again, FRAME_BYTES)


@pytest.mark.parametrize(
    ("changes", "size_bytes"),
    [
        ({"sequence_number": 1}, 100),
        ({"block_index": 1}, 100),
        ({"slab_offset": 1}, 100),
        ({"num_tokens": 0}, 100),
        ({"num_tokens": 17}, 100),
        ({}, LAYOUT.block_bytes + 1),
        ({}, INITIAL_CREDIT + 1),
    ],
)
def test_a_piece_that_is_not_the_next_is_refused(changes: dict[str, int], size_bytes: int) -> None:
    bench = Bench()
    bench.start()
    blocks = Blocks(**({"num_tokens": 16, "checksum": 1} | changes))
    with pytest.raises(TransferProtocolError):
        bench.handoff.payload_target(blocks, size_bytes)


@pytest.mark.parametrize("uses_checksums", [True, False])
def test_checksums_are_there_if_and_only_if_they_were_agreed(uses_checksums: bool) -> None:
    bench = Bench(uses_checksums=uses_checksums)
    _receiving(bench)
    bench.run()
    bench.assert_arrived()
    other = Bench(uses_checksums=uses_checksums)
    other.start()
    blocks = Blocks(num_tokens=16)
    if not uses_checksums:
        blocks.checksum = 1
    with pytest.raises(TransferProtocolError, match="checksum"):
        other.handoff.payload_target(blocks, 100)


@pytest.mark.parametrize(
    "change", [{"digest": 1}, {"num_blocks": 4}, {"num_tokens": 49}, {"first_block": 1}, {"num_tokens": 0}]
)
def test_a_seal_that_does_not_fit_is_refused(change: dict[str, int]) -> None:
    bench = Bench()
    _receiving(bench)
    while (outgoing := bench.source.next_frame()) is not None and outgoing.payload is not None:
        target = bench.handoff.payload_target(outgoing.frame.blocks, outgoing.payload.nbytes)
        assert target is not None
        target[:] = outgoing.payload
        bench.handoff.payload_received(outgoing.frame.blocks, target)
    assert outgoing is not None
    seal = SealFrame()
    seal.CopyFrom(outgoing.frame.seal)
    for name, value in change.items():
        setattr(seal, name, value)
    with pytest.raises(TransferProtocolError, match="does not fit"):
        bench.handoff.seal(seal)
    assert bench.handoff.state is SinkState.RECEIVING


# Connections come and go


@given(st.lists(st.integers(0, 12), max_size=4), st.integers(0, 12), st.sampled_from([16, 12]))
def test_a_hand_off_goes_on_behind_what_is_verified(cuts: list[int], sink_after: int, block_size: int) -> None:
    bench = Bench(layout=with_block_size(block_size))
    num_steps = 0
    for cut in [*cuts, 100]:
        bench.start()
        verified = bench.handoff.num_verified_blocks
        fetch = bench.link.sent[-1].fetch
        assert fetch.skip_tokens == verified * 16
        for _ in range(cut):
            if num_steps == sink_after:
                bench.handoff.attach_sink(bench.memory)
            if not bench.step():
                break
            num_steps += 1
        if bench.handoff.state is SinkState.COMMITTED or cut == 100:
            break
        bench.handoff.stop()
        bench.source.link_lost(bench.source.link)  # type: ignore[arg-type]
    if bench.handoff.wants_sink:
        bench.handoff.attach_sink(bench.memory)
    bench.run()
    bench.assert_arrived()


def test_the_first_credit_bounds_what_is_staged_and_the_sink_opens_the_window() -> None:
    bench = Bench()
    bench.start()
    assert bench.link.sent[0].fetch.credit_bytes == INITIAL_CREDIT
    bench.step()
    bench.handoff.attach_sink(bench.memory)
    assert bench.link.sent[-1].credit.size_bytes == INITIAL_CREDIT * 3 + FRAME_BYTES


def test_the_reason_of_a_loss_keeps_its_class_if_it_speaks_of_a_hand_off() -> None:
    for name, cls in (
        ("WrongIncarnationError", WrongIncarnationError),
        ("RequestCancelledError", HandoffLostError),
        ("SomethingNew", HandoffLostError),
    ):
        bench = Bench()
        bench.start()
        bench.handoff.lost(ErrorDetail(error=name, message="why"))
        assert type(bench.handoff.failure) is cls
        assert bench.handoff.failure is not None
        assert (bench.handoff.failure.message, bench.handoff.failure.hop) == ("why", "transfer")


# Sinks that take a while


def pending_bench(**options: Any) -> tuple[Bench, PendingSink]:
    bench = Bench(is_pending=True, **options)
    assert isinstance(bench.memory, PendingSink)
    return bench, bench.memory


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("num_staged", [0, 2, 10])
def test_the_commit_waits_until_the_last_byte_is_placed(num_staged: int, is_direct: bool) -> None:
    bench, memory = pending_bench(is_direct=is_direct)
    bench.start()
    for _ in range(num_staged):
        bench.step()
    bench.handoff.attach_sink(memory)
    bench.run()
    while memory.writes:
        assert bench.handoff.state is SinkState.RECEIVING
        assert bench.handoff.is_placing
        memory.writes.pop()()  # in any order
    bench.assert_arrived()
    assert not bench.handoff.is_placing


def test_credit_comes_back_with_the_memory_that_a_piece_took() -> None:
    window_bytes = 2 * LAYOUT.block_bytes
    bench, memory = pending_bench(credit_bytes=window_bytes, window_bytes=window_bytes)
    bench.start()
    bench.handoff.attach_sink(memory)
    bench.run()
    assert "credit" not in bench.link.bodies()
    assert not bench.step(), "it sends without credit"
    while memory.writes:
        num_sent = len(bench.link.sent)
        memory.writes.pop(0)()
        bench.run(num_sent)
    bench.assert_arrived()
    credits = [frame.credit.size_bytes for frame in bench.link.sent if frame.HasField("credit")]
    assert window_bytes / 2 < sum(credits) <= 3 * LAYOUT.block_bytes


def test_what_is_placed_late_gives_no_credit_on_a_later_connection() -> None:
    window_bytes = 2 * LAYOUT.block_bytes
    bench, memory = pending_bench(credit_bytes=window_bytes, window_bytes=window_bytes)
    bench.start()
    bench.handoff.attach_sink(memory)
    bench.run()
    bench.handoff.stop()
    bench.source.link_lost(bench.source.link)  # type: ignore[arg-type]
    bench.start()
    num_news = bench.num_news
    while memory.writes:
        memory.writes.pop()()
    assert bench.link.bodies()[-1] == "fetch"
    assert bench.num_news == num_news
    bench.run()
    while memory.writes:
        num_sent = len(bench.link.sent)
        memory.writes.pop()()
        bench.run(num_sent)
    bench.assert_arrived()


def test_a_hand_off_that_ends_says_when_nothing_is_placed_any_more() -> None:
    bench, memory = pending_bench()
    bench.start()
    bench.handoff.attach_sink(memory)
    bench.step()
    bench.step()
    bench.handoff.fail(HandoffLostError("x"))
    bench.handoff.stop()
    num_news = bench.num_news
    memory.writes.pop()()
    assert bench.handoff.is_placing
    assert bench.num_news == num_news
    memory.writes.pop()()
    assert not bench.handoff.is_placing
    assert bench.num_news == num_news + 1


def test_memory_of_a_piece_that_is_wrong_or_never_comes_whole_is_given_back() -> None:
    bench, memory = pending_bench()
    bench.start()
    bench.handoff.attach_sink(memory)
    bench.step(flip=True)
    assert (memory.num_discarded, memory.writes) == (1, [])
    outgoing = bench.source.next_frame()
    assert outgoing is not None
    assert outgoing.payload is not None
    assert bench.handoff.payload_target(outgoing.frame.blocks, outgoing.payload.nbytes) is not None
    bench.handoff.stop()
    bench.handoff.stop()
    assert memory.num_discarded == 2


# Pulled fetches


@pytest.mark.parametrize("num_named", [0, 3, 10])
def test_pieces_are_copied_from_the_source_s_memory_and_committed_once_it_has_confirmed(num_named: int) -> None:
    bench, memory = pending_bench(is_pulled=True)
    bench.start()
    assert bench.link.sent[-1].fetch.is_pulled
    for _ in range(num_named):
        bench.step()
    assert bench.handoff.wants_sink == (num_named > 0)
    bench.handoff.attach_sink(memory)
    bench.run()
    while memory.writes:
        assert bench.handoff.state is SinkState.RECEIVING
        memory.writes.pop()()
    assert bench.handoff.state is SinkState.CONFIRMING
    bench.handoff.committed()
    bench.assert_arrived()
    received = bench.handoff.get_received()
    assert memory.num_pulled_bytes == received.size_bytes == 3 * LAYOUT.block_bytes


def test_what_was_pulled_counts_for_nothing_until_it_is_confirmed() -> None:
    bench, memory = pending_bench(is_pulled=True)
    _confirming(bench)
    for write in memory.writes:
        write()
    assert bench.handoff.num_verified_blocks == 0
    bench.handoff.stop()
    bench.source.link_lost(bench.source.link)  # type: ignore[arg-type]
    memory.writes.clear()
    bench.start()
    assert bench.link.sent[-1].fetch.skip_tokens == 0
    bench.run()
    assert len(memory.writes) == 3 * 3
    for write in memory.writes:
        write()
    bench.handoff.committed()
    bench.assert_arrived()


def test_what_came_before_in_frames_is_not_pulled_again() -> None:
    bench = Bench()
    bench.start()
    bench.handoff.attach_sink(bench.memory)
    for _ in range(4):
        bench.step()
    bench.handoff.stop()
    bench.source.link_lost(bench.source.link)  # type: ignore[arg-type]
    bench.shared = bench.blocks.memory
    bench.start()
    assert bench.link.sent[-1].fetch.skip_tokens == 16
    bench.run()
    bench.handoff.committed()
    bench.assert_arrived()
    assert bench.memory.num_pulled_bytes == 2 * LAYOUT.block_bytes


@pytest.mark.parametrize("num_right", [0, 4, 8])
def test_a_piece_that_cannot_be_read_fails_its_handoff_and_the_others_are_waited_for(num_right: int) -> None:
    bench, memory = pending_bench(is_pulled=True)
    bench.start()
    bench.handoff.attach_sink(memory)
    bench.run()
    for _ in range(num_right):
        memory.writes.pop(0)()
    bench.blocks.memory.is_lost = True
    memory.writes.pop(0)()
    assert bench.handoff.state is SinkState.FAILED
    assert isinstance(bench.handoff.failure, HandoffError)
    assert "cannot be read" in bench.handoff.failure.message
    assert bench.link.sent[-1].HasField("abort"), "the source is told to let go"
    while memory.writes:
        assert bench.handoff.is_placing
        memory.writes.pop(0)()
    assert not bench.handoff.is_placing
    assert not any(frame.HasField("commit") for frame in bench.link.sent)


def test_a_piece_that_an_earlier_connection_could_not_read_is_pulled_again() -> None:
    bench, memory = pending_bench(is_pulled=True)
    bench.start()
    bench.handoff.attach_sink(memory)
    bench.run()
    bench.handoff.stop()
    bench.source.link_lost(bench.source.link)  # type: ignore[arg-type]
    bench.start()
    bench.blocks.memory.is_lost = True
    for _ in range(3 * 3):
        memory.writes.pop(0)()
    assert bench.handoff.is_live
    bench.blocks.memory.is_lost = False
    bench.run()
    for write in memory.writes:
        write()
    bench.handoff.committed()
    bench.assert_arrived()


def test_credit_bounds_what_is_being_pulled() -> None:
    window_bytes = 2 * LAYOUT.block_bytes
    bench, memory = pending_bench(is_pulled=True, credit_bytes=window_bytes, window_bytes=window_bytes)
    bench.start()
    bench.handoff.attach_sink(memory)
    bench.run()
    assert len(memory.writes) == 2 * 3
    while memory.writes:
        num_sent = len(bench.link.sent)
        memory.writes.pop(0)()
        bench.run(num_sent)
    bench.handoff.committed()
    bench.assert_arrived()


@pytest.mark.parametrize("is_pulled", [True, False])
def test_payload_and_names_come_only_where_they_were_asked_for(is_pulled: bool) -> None:
    bench = Bench(is_pulled=is_pulled)
    bench.start()
    payload = partial(bench.handoff.payload_target, Blocks(num_tokens=16, checksum=1), 100)
    name = partial(bench.handoff.piece_named, Blocks(num_tokens=16, size_bytes=100))
    with pytest.raises(TransferProtocolError):
        (payload if is_pulled else name)()

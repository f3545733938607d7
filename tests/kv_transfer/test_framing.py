"""Frames survive any cut of the byte stream, no changed bit goes unnoticed, a size that is claimed costs nothing."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest, xxh32_intdigest

from kv_transfer.framing import (
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    PREFIX_BYTES,
    FrameParser,
    FrameReceived,
    PayloadBegins,
    encode_frame,
)
from protos.common_pb2 import HandoffKey
from protos.kv_transfer_pb2 import Blocks, Credit, Frame, Ping, Seal
from weir.core.errors import TransferProtocolError

KEY = HandoffKey(handoff_id="h", epoch=1)


def blocks_frame(payload: bytes, block_index: int = 0) -> Frame:
    return Frame(blocks=Blocks(key=KEY, block_index=block_index, checksum=xxh3_64_intdigest(payload)))


def feed(
    parser: FrameParser, data: bytes, *, cuts: list[int] | None = None, discard: bool = False
) -> list[FrameReceived]:
    """All frames of `data`, read in pieces that end at `cuts`; payload goes to fresh memory."""
    received = []
    for start, end in zip([0, *(cuts or [])], [*(cuts or []), len(data)], strict=True):
        piece = data[start:end]
        while piece:
            buffer = parser.get_buffer()
            size = min(len(buffer), len(piece))
            buffer[:size] = piece[:size]
            piece = piece[size:]
            for event in parser.buffer_updated(size):
                match event:
                    case PayloadBegins(_, size_bytes):
                        parser.direct_payload(None if discard else memoryview(bytearray(size_bytes)))
                    case FrameReceived():
                        received.append(event)
    return received


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[tuple[Frame, bytes]], bytes]:
    frames: list[tuple[Frame, bytes]] = []
    for index in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["ping", "credit", "blocks", "big header"]))
        payload = b""
        if kind == "ping":
            frame = Frame(ping=Ping())
        elif kind == "credit":
            frame = Frame(credit=Credit(key=KEY, size_bytes=draw(st.integers(0, 1 << 40))))
        elif kind == "blocks":
            payload = random.Random(draw(st.integers(0, 99))).randbytes(draw(st.sampled_from([1, 4095, 4096, 20_000])))
            frame = blocks_frame(payload, index)
        else:
            frame = Frame(seal=Seal(key=KEY))
            frame.seal.first_token.logprobs.top_token_ids.extend(range(draw(st.integers(2_000, 6_000))))
        frames.append((frame, payload))
    return frames, b"".join(encode_frame(frame, len(payload)) + payload for frame, payload in frames)


@given(streams(), st.data())
def test_any_cut_of_the_stream_gives_the_same_frames(
    stream: tuple[list[tuple[Frame, bytes]], bytes], data: st.DataObject
) -> None:
    frames, encoded = stream
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=12)))
    parser = FrameParser()
    received = feed(parser, encoded, cuts=cuts)
    assert [(each.frame, bytes(each.payload or b"")) for each in received] == frames
    assert parser.is_between_frames


def test_one_byte_at_a_time_gives_the_same_frames() -> None:
    payload = random.Random(0).randbytes(300)
    encoded = encode_frame(Frame(ping=Ping())) + encode_frame(blocks_frame(payload), len(payload)) + payload
    received = feed(FrameParser(), encoded, cuts=list(range(1, len(encoded))))
    assert [each.payload for each in received] == [None, payload]


@given(st.binary(min_size=1, max_size=200), st.data())
def test_no_flipped_bit_goes_unnoticed(payload: bytes, data: st.DataObject) -> None:
    frame = blocks_frame(payload)
    encoded = bytearray(encode_frame(frame, len(payload)) + payload)
    position = data.draw(st.integers(0, len(encoded) * 8 - 1))
    encoded[position // 8] ^= 1 << position % 8
    try:
        received = feed(FrameParser(), bytes(encoded))
    except TransferProtocolError:
        assert position // 8 < len(encoded) - len(payload), "the payload is not the parser's to refuse"
        return
    [only] = received
    assert only.frame == frame
    assert only.payload is not None
    assert xxh3_64_intdigest(only.payload) != frame.blocks.checksum


def test_payload_lands_where_it_is_directed_and_nowhere_else() -> None:
    payload = random.Random(1).randbytes(50_000)
    slab = bytearray(70_000)
    parser = FrameParser()
    encoded = encode_frame(blocks_frame(payload), len(payload)) + payload
    num_direct_bytes = 0
    while encoded:
        buffer = parser.get_buffer()
        size = min(len(buffer), len(encoded), 9_000)
        buffer[:size] = encoded[:size]
        num_direct_bytes += size if parser.payload_frame is not None else 0
        encoded = encoded[size:]
        for event in parser.buffer_updated(size):
            if isinstance(event, PayloadBegins):
                parser.direct_payload(memoryview(slab)[10_000:60_000])
    assert bytes(slab) == bytes(10_000) + payload + bytes(10_000)
    assert num_direct_bytes >= len(payload) - 4096, "more than the staging buffer was copied"


def test_no_byte_reaches_a_destination_after_it_was_taken_away() -> None:
    payload = b"x" * 10_000
    slab = bytearray(10_000)
    parser = FrameParser()
    encoded = encode_frame(blocks_frame(payload), len(payload)) + payload
    head = encoded[:3_000]
    parser.get_buffer()[: len(head)] = head
    for event in parser.buffer_updated(len(head)):
        assert isinstance(event, PayloadBegins)
        parser.direct_payload(memoryview(slab))
    before = bytes(slab)
    parser.direct_payload(None)
    received = feed(parser, encoded[3_000:] + encode_frame(Frame(ping=Ping())))
    assert bytes(slab) == before
    assert [each.payload for each in received] == [None, None]
    assert received[-1].frame.HasField("ping")


def test_a_claimed_size_allocates_nothing() -> None:
    sizes = struct.pack("<II", MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES)
    prefix = sizes + struct.pack("<IQ", xxh32_intdigest(sizes), 0)
    parser = FrameParser()
    assert feed(parser, prefix + bytes(100)) == []
    assert len(parser.get_buffer()) <= 64 << 10


@pytest.mark.parametrize(
    "sizes",
    [(MAX_HEADER_BYTES + 1, 0), (10, MAX_PAYLOAD_BYTES + 1), (0, 0), (0, 10), (2**32 - 1, 2**32 - 1)],
)
def test_a_size_over_the_limit_is_refused_at_once(sizes: tuple[int, int]) -> None:
    packed = struct.pack("<II", *sizes)
    prefix = packed + struct.pack("<IQ", xxh32_intdigest(packed), 0)
    with pytest.raises(TransferProtocolError, match="over the limit"):
        feed(FrameParser(), prefix)


def test_a_peer_that_has_not_proved_itself_gets_small_headers_only() -> None:
    frame = Frame(seal=Seal(key=KEY))
    frame.seal.first_token.logprobs.top_token_ids.extend(range(10_000))
    with pytest.raises(TransferProtocolError, match="over the limit"):
        feed(FrameParser(max_header_bytes=1024), encode_frame(frame))


def test_a_header_that_is_no_message_is_refused() -> None:
    header = b"\xff\xff\xff"
    sizes = struct.pack("<II", len(header), 0)
    encoded = sizes + struct.pack("<IQ", xxh32_intdigest(sizes), xxh3_64_intdigest(header)) + header
    with pytest.raises(TransferProtocolError, match="cannot be read"):
        feed(FrameParser(), encoded)


def test_bodies_and_fields_of_a_later_version_are_skipped() -> None:
    later_body = b"\xfa\x3f\x03abc"  # field 1023, length-delimited
    later_field = Frame(ping=Ping()).SerializeToString() + b"\xf8\x3f\x01"
    encoded = b""
    for header, payload in ((later_body, b"payload"), (later_field, b"")):
        sizes = struct.pack("<II", len(header), len(payload))
        encoded += sizes + struct.pack("<IQ", xxh32_intdigest(sizes), xxh3_64_intdigest(header)) + header + payload
    received = feed(FrameParser(), encoded, discard=True)
    assert [each.frame.WhichOneof("body") for each in received] == [None, "ping"]


def test_a_frame_that_no_reader_takes_is_not_written() -> None:
    with pytest.raises(TransferProtocolError, match="over the limit"):
        encode_frame(Frame(ping=Ping()), MAX_PAYLOAD_BYTES + 1)


def test_a_destination_of_another_size_is_our_own_fault() -> None:
    parser = FrameParser()
    encoded = encode_frame(blocks_frame(b"abcd"), 4)
    parser.get_buffer()[: len(encoded)] = encoded
    [event] = parser.buffer_updated(len(encoded))
    assert isinstance(event, PayloadBegins)
    with pytest.raises(ValueError, match="destination of 3 bytes for 4"):
        parser.direct_payload(memoryview(bytearray(3)))


def test_the_prefix_is_as_documented() -> None:
    encoded = encode_frame(Frame(ping=Ping()), 5)
    header = Frame(ping=Ping()).SerializeToString()
    sizes = struct.pack("<II", len(header), 5)
    assert encoded == sizes + struct.pack("<IQ", xxh32_intdigest(sizes), xxh3_64_intdigest(header)) + header
    assert len(encoded) == PREFIX_BYTES + len(header)

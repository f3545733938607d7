"""Frames as bytes, without any I/O: `encode_frame` one way, `FrameParser` the other.

    header bytes u32 | payload bytes u32 | checksum of these two u32 | checksum of the header u64 | header | payload

All integers are little-endian; the header is a `Frame` of kv_transfer.proto. A flipped bit in the sizes or the header
is always a `TransferProtocolError`; the payload's own checksum is a field of the header and its reader's affair.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from xxhash import xxh3_64_intdigest, xxh32_intdigest

from protos.kv_transfer_pb2 import Frame
from weir.core.errors import TransferProtocolError

MAX_PAYLOAD_BYTES = 1 << 20
"""Largest payload of one frame; a slab is sent in pieces."""

MAX_HEADER_BYTES = 4 << 20
"""Largest header: a seal with the log-probabilities of a whole vocabulary."""

MAX_HANDSHAKE_HEADER_BYTES = 16 << 10
"""Largest header of a peer that has not proved itself."""

_SIZES = struct.Struct("<II")
_PREFIX = struct.Struct("<IIIQ")
PREFIX_BYTES = _PREFIX.size

_STAGING_BYTES = 4 << 10
"""Small on purpose: what is read behind a header into the staging buffer is payload that must be copied once more."""
_SCRATCH_BYTES = 64 << 10


def encode_frame(frame: Frame, payload_bytes: int = 0) -> bytes:
    """Prefix and header of a frame; the payload follows as it lies in memory.

    Raises:
        TransferProtocolError: header or payload is larger than any reader takes.
    """
    header = frame.SerializeToString()
    if len(header) > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise TransferProtocolError(
            f"a frame of {len(header)} + {payload_bytes} bytes is over the limit of "
            f"{MAX_HEADER_BYTES} + {MAX_PAYLOAD_BYTES}",
            hop="transfer",
        )
    sizes_checksum = xxh32_intdigest(_SIZES.pack(len(header), payload_bytes))
    return _PREFIX.pack(len(header), payload_bytes, sizes_checksum, xxh3_64_intdigest(header)) + header


@dataclass(frozen=True, slots=True)
class PayloadBegins:
    """A header has come whose payload follows: `FrameParser.direct_payload` may say where to, before the next event."""

    frame: Frame
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FrameReceived:
    """A whole frame has come.

    Attributes:
        payload: the destination, filled; None if there is no payload or it was discarded.
    """

    frame: Frame
    payload: memoryview | None


class FrameParser:
    """Reads one direction of a connection.

    The owner of the socket fills (a part of) `get_buffer()` and then reads all events of `buffer_updated`. Payload
    lands where `direct_payload` says, without a copy but for the few KiB that came together with the header. A size
    claimed by the peer allocates nothing: headers grow with what arrives, payload goes to memory that was there before.
    """

    def __init__(self, *, max_header_bytes: int = MAX_HEADER_BYTES) -> None:
        self.max_header_bytes = max_header_bytes
        self._staging = memoryview(bytearray(_STAGING_BYTES))
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._pending = bytearray()  # prefix and header, as far as they came
        self._header_bytes = 0  # 0: the prefix is not read yet
        self._header_checksum = 0
        self._frame: Frame | None = None  # whose payload is being read
        self._destination: memoryview | None = None
        self._payload_bytes = 0
        self._num_read = 0

    @property
    def payload_frame(self) -> Frame | None:
        """The frame whose payload is arriving."""
        return self._frame

    @property
    def is_between_frames(self) -> bool:
        return self._frame is None and not self._pending

    def direct_payload(self, destination: memoryview | None) -> None:
        """Send what is still to come of the current payload there; None discards it.

        Args:
            destination: writable bytes of the payload's size; they are written until its `FrameReceived` or until
                this is called again.
        """
        assert self._frame is not None
        if destination is not None and destination.nbytes != self._payload_bytes:
            raise ValueError(f"destination of {destination.nbytes} bytes for {self._payload_bytes}")
        self._destination = destination

    def get_buffer(self) -> memoryview:
        """Where the next bytes of the stream go; valid until the next call of any method."""
        if self._frame is None:
            return self._staging
        if self._destination is None:
            return self._scratch[: self._payload_bytes - self._num_read]
        return self._destination[self._num_read :]

    def buffer_updated(self, num_bytes: int) -> Iterator[PayloadBegins | FrameReceived]:
        """What the first `num_bytes` of the last `get_buffer` complete.

        Raises:
            TransferProtocolError: bytes that no correct peer sends; the stream cannot be read any further.
        """
        if self._frame is not None:
            self._num_read += num_bytes
            yield from self._end_payload()
            return
        data = self._staging[:num_bytes]
        while data:
            if self._frame is not None:
                size = min(len(data), self._payload_bytes - self._num_read)
                if self._destination is not None:
                    self._destination[self._num_read : self._num_read + size] = data[:size]
                self._num_read += size
                data = data[size:]
                yield from self._end_payload()
                continue
            wanted = (self._header_bytes or PREFIX_BYTES) - len(self._pending)
            self._pending += data[:wanted]
            data = data[wanted:]
            if wanted > 0 and len(self._pending) < (self._header_bytes or PREFIX_BYTES):
                return
            if not self._header_bytes:
                self._read_prefix()
            else:
                yield self._read_header()
                yield from self._end_payload()

    def _read_prefix(self) -> None:
        header_bytes, payload_bytes, sizes_checksum, header_checksum = _PREFIX.unpack(self._pending)
        if xxh32_intdigest(self._pending[: _SIZES.size]) != sizes_checksum:
            raise TransferProtocolError("the sizes of a frame do not match their checksum", hop="transfer")
        if not 0 < header_bytes <= self.max_header_bytes or payload_bytes > MAX_PAYLOAD_BYTES:
            raise TransferProtocolError(
                f"a frame of {header_bytes} + {payload_bytes} bytes is over the limit of "
                f"{self.max_header_bytes} + {MAX_PAYLOAD_BYTES}",
                hop="transfer",
            )
        self._pending.clear()
        self._header_bytes, self._header_checksum = header_bytes, header_checksum
        self._payload_bytes = payload_bytes

    def _read_header(self) -> PayloadBegins | FrameReceived:
        header = bytes(self._pending)
        self._pending.clear()
        self._header_bytes = 0
        if xxh3_64_intdigest(header) != self._header_checksum:
            raise TransferProtocolError("the header of a frame does not match its checksum", hop="transfer")
        try:
            frame = Frame.FromString(header)
        except DecodeError as exc:
            raise TransferProtocolError(f"the header of a frame cannot be read: {exc}", hop="transfer") from exc
        if not self._payload_bytes:
            return FrameReceived(frame, None)
        self._frame, self._destination, self._num_read = frame, None, 0
        return PayloadBegins(frame, self._payload_bytes)

    def _end_payload(self) -> Iterator[FrameReceived]:
        if self._frame is not None and self._num_read == self._payload_bytes:
            received = FrameReceived(self._frame, self._destination)
            self._frame = self._destination = None
            yield received

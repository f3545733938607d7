"""An HTTP/1.1 response as it comes in: bytes in, body out, no I/O.

The client may share the machine with the server it measures: at 32 streams a token costs it 32 us of CPU, with httpx
160, and it is stamped in the loop's own callback.

Source: RFC 9112, sections 4, 6 and 7.1.
"""

from __future__ import annotations

from collections.abc import Iterator

from weir.bench.failure import DISCONNECT, PROTOCOL, ExchangeError

MAX_HEAD_BYTES = 64 * 1024
MAX_CHUNK_LINE_BYTES = 1024


class HttpResponse:
    """Reads one response.

    Attributes:
        status: 0 until the head has been read.
        headers: by lower-case name; of two with one name the last.
        is_complete: the body is whole.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self._is_chunked = False
        self._ends_with_connection = False
        self._missing = 0
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """What `data` adds to the body. Raises ExchangeError for bytes that are no HTTP."""
        data = self._rest + data if self._rest else data
        self._rest = b""
        if self.status == 0:
            data = self._read_head(data)
            if self.status == 0:
                return b""
        if self.is_complete:
            return b""
        if self._is_chunked:
            return b"".join(self._read_chunks(data))
        if self._ends_with_connection:
            return data
        body = data[: self._missing]
        self._missing -= len(body)
        self.is_complete = self._missing == 0
        return body

    def end(self) -> None:
        """The connection has ended. Raises ExchangeError when the response has not."""
        if self._ends_with_connection:
            self.is_complete = True
        if not self.is_complete:
            where = "in the middle of an answer" if self.status else "before an answer"
            raise ExchangeError(DISCONNECT, f"the server closed the connection {where}")

    def _read_head(self, data: bytes) -> bytes:
        """What follows the head; that of an interim response is skipped."""
        head, separator, rest = data.partition(b"\r\n\r\n")
        if not separator:
            if len(data) > MAX_HEAD_BYTES:
                raise ExchangeError(PROTOCOL, f"the head of the answer is over {MAX_HEAD_BYTES} bytes")
            self._rest = data
            return b""
        status_line, *lines = head.decode("latin-1").split("\r\n")
        version, _, words = status_line.partition(" ")
        status = words[:3]
        if not version.startswith("HTTP/1.") or not (status.isascii() and status.isdigit()) or status < "100":
            raise ExchangeError(PROTOCOL, f"the answer is no HTTP/1.1: {status_line!r}")
        if status < "200":
            return self._read_head(rest)
        self.status = int(status)
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self._find_length()
        return rest

    def _find_length(self) -> None:
        self._is_chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        if self._is_chunked:
            return
        length = self.headers.get("content-length")
        if length is None:
            self._ends_with_connection = self.status != 204
            self.is_complete = self.status == 204
        elif length.isascii() and length.isdigit():
            self._missing = int(length)
            self.is_complete = self._missing == 0
        else:
            raise ExchangeError(PROTOCOL, f"content-length: {length!r} is no number")

    def _read_chunks(self, data: bytes) -> Iterator[bytes]:
        """`_missing` counts what is left of a chunk with its line end; the body is all of it but the last two bytes."""
        position = 0
        while not self.is_complete:
            if self._missing:
                piece = data[position : position + self._missing]
                yield piece[: max(0, self._missing - 2)]
                position += len(piece)
                self._missing -= len(piece)
                if self._missing:
                    return
            line_end = data.find(b"\r\n", position)
            if line_end < 0:
                self._rest = data[position:]
                if len(self._rest) > MAX_CHUNK_LINE_BYTES:
                    raise ExchangeError(PROTOCOL, "a chunk of the answer has no size")
                return
            digits = data[position:line_end].partition(b";")[0]
            try:
                size = int(digits, 16)
            except ValueError:
                raise ExchangeError(PROTOCOL, f"a chunk of the answer has the size {digits[:40]!r}") from None
            position = line_end + 2
            if size == 0:
                self.is_complete = True  # trailers say nothing to us
            elif size < 0:
                raise ExchangeError(PROTOCOL, f"a chunk of the answer has the size {size}")
            else:
                self._missing = size + 2

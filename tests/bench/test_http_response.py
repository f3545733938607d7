"""Bytes in, body out: wherever the network cuts them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.bench.failure import DISCONNECT, PROTOCOL, ExchangeError
from weir.bench.http_response import HttpResponse

BODY = b"data: one\n\ndata: two\r\n\r\n" + bytes(range(256))
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"B\r\ndata: one\n\n\r\n"
    + b"%x;ext=1\r\n%b\r\n" % (len(BODY) - 11, BODY[11:])
    + b"0\r\nTrailer: x\r\n\r\n"
)
SIZED = b"HTTP/1.1 404 Not Found\r\ncontent-LENGTH: %d\r\n\r\n%b" % (len(BODY), BODY)
UNTIL_CLOSED = b"HTTP/1.0 200 OK\r\n\r\n" + BODY
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"


def read(raw: bytes, cuts: list[int]) -> HttpResponse:
    response = HttpResponse()
    edges = [0, *sorted(cut % (len(raw) + 1) for cut in cuts), len(raw)]
    body = b"".join(response.feed(raw[start:end]) for start, end in pairwise(edges))
    response.end()
    assert response.is_complete
    assert body == BODY
    return response


@pytest.mark.parametrize(
    ("raw", "status"),
    [(CHUNKED, 200), (SIZED, 404), (UNTIL_CLOSED, 200), (INTERIM + CHUNKED, 200)],
    ids=["chunked", "sized", "until closed", "after interim answers"],
)
@given(cuts=st.lists(st.integers(min_value=0, max_value=10_000), max_size=12))
def test_any_cut_of_the_bytes_gives_the_same_body(raw: bytes, status: int, cuts: list[int]) -> None:
    assert read(raw, cuts).status == status


def test_byte_by_byte() -> None:
    assert read(CHUNKED, list(range(len(CHUNKED)))).headers == {"transfer-encoding": "chunked"}


def test_an_answer_without_a_body_is_complete_at_once() -> None:
    for head in (b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"):
        response = HttpResponse()
        assert response.feed(head) == b""
        assert response.is_complete


@pytest.mark.parametrize("raw", [CHUNKED, SIZED])
def test_an_end_in_the_middle_is_a_disconnect(raw: bytes) -> None:
    for length in (0, 10, len(raw) // 2):
        response = HttpResponse()
        response.feed(raw[:length])
        with pytest.raises(ExchangeError, match="closed the connection") as caught:
            response.end()
        assert caught.value.failure.kind == DISCONNECT


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 2000,
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000,
    ],
)
def test_what_is_no_http_is_said_to_be_none(raw: bytes) -> None:
    with pytest.raises(ExchangeError) as caught:
        HttpResponse().feed(raw)
    assert caught.value.failure.kind == PROTOCOL

from __future__ import annotations

import pytest

from tests.fakes.completion_server import MODEL, CompletionServer
from weir.bench.server_address import ServerAddress, ServerQuestions, refusal_of
from weir.core.errors import ConfigError, UnavailableError


@pytest.mark.parametrize(
    ("given", "root", "api"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://host/v3", "http://host", "http://host/v3"),  # OpenVINO model server
        ("https://host/prefix/v1", "https://host/prefix", "https://host/prefix/v1"),
        ("http://[::1]:8000", "http://[::1]:8000", "http://[::1]:8000/v1"),
    ],
)
def test_an_address_comes_with_or_without_the_version(given: str, root: str, api: str) -> None:
    address = ServerAddress.parse(given)
    assert (address.root, address.api) == (root, api)


@pytest.mark.parametrize(
    "url",
    ["", "host:8000", "ftp://host", "http://", "http://[::1", "http://host?x=1", "http://h:99999", "http://a:b@h"],
)
def test_what_is_no_address_is_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^base_url: "):
        ServerAddress.parse(url)


@pytest.mark.parametrize("key", ["clé", "a\r\nX-Evil: 1"])
def test_a_key_that_fits_into_no_header_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(ConfigError, match=r"^api_key: ") as caught:
        ServerAddress.parse("http://host", key)
    assert key not in caught.value.message
    assert "secret" not in repr(ServerAddress.parse("http://host", "secret"))


async def test_the_first_model_is_taken_where_none_is_named() -> None:
    async with CompletionServer() as server, ServerQuestions(ServerAddress.parse(server.url)) as questions:
        assert await questions.find_model(None) == MODEL
        assert await questions.find_model("other") == "other"
        assert await questions.server_name() == "version 1.2.3"


async def test_a_server_that_names_no_model_is_one_line() -> None:
    async with CompletionServer() as server, ServerQuestions(ServerAddress.parse(f"{server.url}/x")) as questions:
        with pytest.raises(UnavailableError, match=r"names no model: there is no such route \(HTTP 404\)"):
            await questions.find_model(None)


async def test_nobody_there_is_one_line() -> None:
    async with ServerQuestions(ServerAddress.parse("http://127.0.0.1:9")) as questions:
        with pytest.raises(UnavailableError, match=r"^no server answers at http://127\.0\.0\.1:9: "):
            await questions.find_model("any")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"error": "too long"}', "too long"),
        (b'{"detail": "too long"}', '{"detail": "too long"}'),
        (b"<html>\xff</html>", "<html>\ufffd</html>"),
        (b"[1]", "[1]"),
        (b"", "no reason given"),
    ],
)
def test_a_refusal_is_read_in_whatever_form(body: bytes, message: str) -> None:
    assert refusal_of(body) == message

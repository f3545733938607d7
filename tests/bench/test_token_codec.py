from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from tests.fakes.completion_server import CompletionServer
from tests.fakes.tiny_tokenizer import byte_level
from weir.bench.server_address import ServerAddress, ServerQuestions
from weir.bench.token_codec import LocalCodec, ServerCodec
from weir.core.errors import ConfigError


@pytest.mark.parametrize("speaks_llama_cpp", [False, True])
async def test_the_servers_own_tokenizer_is_asked_in_its_own_words(speaks_llama_cpp: bool) -> None:
    text = "Hello there 中国"
    async with CompletionServer(speaks_llama_cpp=speaks_llama_cpp) as server:
        async with ServerQuestions(ServerAddress.parse(server.url)) as questions:
            codec = await ServerCodec.find(questions, "any")
            token_ids = await codec.encode(text, add_special_tokens=False)
            assert list(token_ids) == byte_level().encode(text).ids
            assert await codec.decode(token_ids) == text


async def test_a_server_without_one_is_one_line() -> None:
    async with CompletionServer() as server, ServerQuestions(ServerAddress.parse(f"{server.url}/x")) as questions:
        with pytest.raises(
            ConfigError, match=r"^tokenizer: /tokenize of the server: .*404.*; give --tokenizer DIR or another --model$"
        ):
            await ServerCodec.find(questions, "any")


@pytest.mark.parametrize("tokens", [[], 5, "abc", [{"id": 1, "piece": "a"}]])
async def test_tokens_that_are_none_are_one_line(tokens: object) -> None:
    class Questions:
        async def ask(self, path: str, body: dict[str, Any], field: str) -> Any:
            return tokens

    with pytest.raises(ConfigError, match=r"^tokenizer: /tokenize of the server: its tokens are no list of numbers"):
        await ServerCodec.find(cast(ServerQuestions, Questions()), "any")


@pytest.mark.parametrize("name", [".", "tokenizer.json"])
async def test_a_local_one_is_a_directory_or_its_file(tmp_path: Path, name: str) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    codec = LocalCodec.load(tmp_path / name)
    token_ids = await codec.encode("Hello", add_special_tokens=True)
    assert await codec.decode(token_ids) == "Hello"


def test_a_directory_without_one_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^tokenizer: .* is neither a tokenizer\.json nor a directory with one"):
        LocalCodec.load(tmp_path)

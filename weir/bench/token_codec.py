"""Text to tokens and back, with the model's own tokenizer: a local file of it, or the server's endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from weir.bench.server_address import ServerQuestions
from weir.core.errors import ConfigError, UnavailableError
from weir.text.tokenizer import TOKENIZER_FILE, Tokenizer


class TokenCodec(Protocol):
    """Encodes and decodes."""

    async def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of `text`, with those that the server would put around a prompt, or without."""

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids."""


class LocalCodec:
    """A tokenizer of this machine."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, path: Path) -> LocalCodec:
        """From a directory or its `tokenizer.json`. Raises ConfigError or ModelLoadError naming the file."""
        directory = path.parent if path.name == TOKENIZER_FILE else path
        if not (directory / TOKENIZER_FILE).is_file():
            raise ConfigError(f"tokenizer: {path} is neither a {TOKENIZER_FILE} nor a directory with one")
        return cls(Tokenizer.load(directory))

    async def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


class ServerCodec:
    """The server's `/tokenize` and `/detokenize`, in the words of vLLM and Weir or in those of llama.cpp."""

    def __init__(self, questions: ServerQuestions, model: str, *, speaks_llama_cpp: bool) -> None:
        self._questions = questions
        self._model = model
        self._speaks_llama_cpp = speaks_llama_cpp

    @classmethod
    async def find(cls, questions: ServerQuestions, model: str) -> ServerCodec:
        """Raises ConfigError when the server has no such endpoint, or refuses the model."""
        refusals: list[str] = []
        for speaks_llama_cpp in (False, True):
            codec = cls(questions, model, speaks_llama_cpp=speaks_llama_cpp)
            try:
                await codec.encode("a weir", add_special_tokens=False)
                return codec
            except UnavailableError as exc:
                refusals.append(exc.message)
        raise ConfigError(f"tokenizer: {refusals[0]}; give --tokenizer DIR or another --model", param="tokenizer")

    async def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        if self._speaks_llama_cpp:
            body: dict[str, Any] = {"content": text, "add_special": add_special_tokens}
        else:
            body = {"model": self._model, "prompt": text, "add_special_tokens": add_special_tokens}
        tokens = await self._questions.ask("/tokenize", body, "tokens")
        if not isinstance(tokens, list) or not tokens or any(type(token) is not int for token in tokens):
            raise UnavailableError(f"/tokenize of the server: its tokens are no list of numbers: {str(tokens)[:80]}")
        return tuple(tokens)

    async def decode(self, token_ids: Sequence[int]) -> str:
        body: dict[str, Any] = {"tokens": list(token_ids)}
        if self._speaks_llama_cpp:
            return str(await self._questions.ask("/detokenize", body, "content"))
        return str(await self._questions.ask("/detokenize", {"model": self._model, **body}, "prompt"))

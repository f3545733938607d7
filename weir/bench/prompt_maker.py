"""Prompts of real text with an exact number of tokens, no two of which begin alike.

A prefix that two prompts share by chance, or with an earlier run, would be served from the prefix cache and measure
nothing. So each begins with words drawn at random, and no first token comes twice in a run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

from weir.bench.corpus import Corpus
from weir.bench.token_codec import TokenCodec
from weir.core.errors import ConfigError

CHARS_PER_TOKEN = 8
"""Enough text at the first try for most; else twice as much."""

MAX_DRAWS = 64
MAX_CUTS = 8


class PromptKind(Enum):
    """What the server gets: token ids, or a text that it encodes itself."""

    TOKENS = "tokens"
    TEXT = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Text or token ids, and how many tokens that is for the server."""

    content: str | tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokenized:
    text: str = ""
    token_ids: tuple[int, ...] = ()


_NOTHING = _Tokenized()


class PromptMaker:
    """Makes the prompts of one invocation.

    Args:
        salt: the same salt gives the same prompts, any other one different ones.
        add_special_tokens: whether the server puts special tokens around a text, as completions do and chats, whose
            template has its own, do not. They count.
    """

    def __init__(
        self, codec: TokenCodec, corpus: Corpus, *, salt: str, kind: PromptKind, add_special_tokens: bool
    ) -> None:
        self._codec = codec
        self._corpus = corpus
        self._rng = random.Random(salt)
        self._kind = kind
        self._add_special_tokens = add_special_tokens and kind is PromptKind.TEXT
        self._first_ids: set[int] = set()
        self._prefix = _NOTHING

    async def share_prefix(self, num_tokens: int) -> None:
        """From now on prompts begin with the same `num_tokens` tokens, drawn anew by each call; 0 ends it.

        Raises:
            ConfigError: no text of this length was found.
        """
        self._prefix = _NOTHING
        if not num_tokens:
            return
        for _ in range(MAX_DRAWS):
            drawn = await self._draw(num_tokens)
            if await self._stays_whole(drawn):
                self._prefix = drawn
                return
        raise ConfigError(f"shared_prefix_tokens: no text of {num_tokens} tokens stays the same before another")

    async def make(self, num_tokens: int) -> Prompt:
        """A prompt with `num_tokens` of its own, after the shared prefix if there is one.

        Raises:
            ConfigError: no text of this length was found.
        """
        made = await self._draw(num_tokens)
        content = made.token_ids if self._kind is PromptKind.TOKENS else made.text
        return Prompt(content=content, num_tokens=len(made.token_ids))

    async def _stays_whole(self, prefix: _Tokenized) -> bool:
        """Whether its tokens are the same when more text follows. One that ends in a blank may be other tokens then."""
        if self._kind is PromptKind.TOKENS:
            return True
        encoded = await self._codec.encode(f"{prefix.text} a", add_special_tokens=self._add_special_tokens)
        return encoded[: len(prefix.token_ids)] == prefix.token_ids

    async def _draw(self, num_tokens: int) -> _Tokenized:
        num_shared = len(self._prefix.token_ids)
        for _ in range(MAX_DRAWS):
            token_ids = await self._long_enough(num_tokens)
            made = await self._join(token_ids, num_tokens)
            if made is None:
                continue
            # Without a prefix special tokens come first, which all texts have.
            first_id = made.token_ids[num_shared] if num_shared else token_ids[0]
            if first_id not in self._first_ids:
                self._first_ids.add(first_id)
                return made
        if self._first_ids:  # a long run uses them up; the words after the first still tell prompts apart
            self._first_ids.clear()
            return await self._draw(num_tokens)
        raise ConfigError(f"input_tokens: no text was found that has {num_tokens} tokens for this tokenizer")

    async def _long_enough(self, num_tokens: int) -> tuple[int, ...]:
        """Tokens of a new piece of text, more than `num_tokens`, so that a cut is never its end."""
        num_chars = num_tokens * CHARS_PER_TOKEN
        while True:
            text = self._corpus.draw(self._rng, num_chars)
            token_ids = await self._codec.encode(text, add_special_tokens=False)
            if len(token_ids) > num_tokens:
                return token_ids
            num_chars *= 2

    async def _join(self, token_ids: tuple[int, ...], num_tokens: int) -> _Tokenized | None:
        """The prefix and `num_tokens` of these tokens; None where no cut gives a text of exactly that length."""
        prefix = self._prefix
        if self._kind is PromptKind.TOKENS:
            return _Tokenized(token_ids=prefix.token_ids + token_ids[:num_tokens])
        head = f"{prefix.text} " if prefix.text else ""  # the blank keeps the two from growing together
        wanted = len(prefix.token_ids) + num_tokens
        num_own = num_tokens
        for _ in range(MAX_CUTS):
            text = head + await self._codec.decode(token_ids[:num_own])
            encoded = await self._codec.encode(text, add_special_tokens=self._add_special_tokens)
            if len(encoded) == wanted:
                is_shared = encoded[: len(prefix.token_ids)] == prefix.token_ids
                return _Tokenized(text=text, token_ids=encoded) if is_shared else None
            num_own += wanted - len(encoded)
            if not 0 < num_own <= len(token_ids):
                return None
        return None

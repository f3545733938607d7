"""Text to token ids and back, from the tokenizer files of a prepared model directory.

Needs neither torch nor transformers. Beside whole texts it knows what one token is worth, as bytes: that is what
streaming and log-probabilities are made of, since a character may be spread over several tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _HfTokenizer

from weir.core.errors import InvalidRequestError, ModelLoadError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

THREAD_CHARS = 8192
"""Texts longer than this are encoded in a thread: some 2,000 tokens, 4 to 8 ms of the event loop."""

SPACE_MARK = "\u2581"
"""What sentencepiece vocabularies write for a space."""


class Tokenizer:
    """The tokenizer of one model; immutable, safe to share between threads.

    Attributes:
        vocab_size: ids the tokenizer knows are below this; a model's own (padded) vocabulary may be larger.
        bos_token_id: the id that begins a text, or None.
        add_bos_token: whether `encode` puts it first.
        special_token_ids: ids that `skip_special_tokens` leaves out.
        special_tokens: `bos_token`, `eos_token` and the like by name, as chat templates want them.
        max_token_chars: no token spells more characters than this.
    """

    def __init__(self, backend: _HfTokenizer, config: dict[str, Any] | None = None) -> None:
        """`config` is the content of tokenizer_config.json.

        Raises:
            ModelLoadError: a decoder this version cannot stream.
        """
        config = config or {}
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._is_byte_level = _is_byte_level(backend)
        self._added = backend.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.max_token_chars = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        self.special_token_ids = frozenset(token_id for token_id, token in self._added.items() if token.special)
        self.special_tokens = _special_tokens(config)
        self.bos_token_id = self.token_id(self.special_tokens.get("bos_token", ""))
        self._bos_is_ruled = isinstance(config.get("add_bos_token"), bool)
        self.add_bos_token = self._finds_bos(config)

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Read `tokenizer.json` and, if there is one, `tokenizer_config.json`.

        Raises:
            ModelLoadError: a file is missing or broken; names it.
        """
        path = model_dir / TOKENIZER_FILE
        try:
            backend = _HfTokenizer.from_str(path.read_text(encoding="utf-8"))
        except FileNotFoundError as exc:
            raise ModelLoadError(f"{path}: no tokenizer; prepare the model first") from exc
        except Exception as exc:  # the library raises bare Exception for a broken file
            raise ModelLoadError(f"{path}: not a tokenizer: {exc}") from exc
        return cls(backend, read_tokenizer_config(model_dir))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of `text`. A BOS that the text already spells is never doubled.

        Raises:
            InvalidRequestError: the text holds half a surrogate pair, which no encoding can write.
        """
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise InvalidRequestError(f"text: half a surrogate pair at character {exc.start}") from exc
        if self._bos_is_ruled:
            ids = self._backend.encode(text, add_special_tokens=False).ids
            if add_special_tokens and self.add_bos_token and self.bos_token_id is not None:
                ids = [self.bos_token_id, *ids]
        else:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id:
            ids = ids[1:]
        return tuple(ids)

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """`encode` that leaves the event loop free when the text is long."""
        if len(text) <= THREAD_CHARS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode, text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; bytes that are no character become U+FFFD."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def decode_async(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """`decode` that leaves the event loop free when there are many tokens."""
        if len(token_ids) <= THREAD_CHARS:
            return self.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return await asyncio.to_thread(self.decode, token_ids, skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, or None."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text; empty for an id that the tokenizer does not know."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """The token as log-probabilities show it: its text, or `bytes:\\xe4\\xb8` where it is a part of a character."""
        known = self._texts.get(token_id)
        if known is None:
            raw = self.token_bytes(token_id)
            try:
                known = raw.decode()
            except UnicodeDecodeError:
                known = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            self._texts[token_id] = known
        return known

    def token_piece(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty for an unknown id."""
        return self._backend.id_to_token(token_id) or ""

    def _spell(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added.content.encode()
        piece = self.token_piece(token_id)
        if self._is_byte_level:
            return b"".join(_BYTE_OF_CHAR.get(char) or char.encode() for char in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace(SPACE_MARK, " ").encode()

    def _finds_bos(self, config: dict[str, Any]) -> bool:
        """The configuration's word; where it is silent, what the tokenizer file's own post-processor does."""
        if self._bos_is_ruled:
            return bool(config["add_bos_token"]) and self.bos_token_id is not None
        return self.bos_token_id is not None and self._backend.encode("").ids[:1] == [self.bos_token_id]


def read_tokenizer_config(model_dir: Path) -> dict[str, Any]:
    """The content of `tokenizer_config.json`; empty when there is none.

    Raises:
        ModelLoadError: the file is no JSON object; names it.
    """
    path = model_dir / TOKENIZER_CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as exc:
        raise ModelLoadError(f"{path}: not JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path}: not a JSON object")
    return config


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found


def _is_byte_level(backend: _HfTokenizer) -> bool:
    """Whether pieces are spelled in the GPT-2 byte alphabet (else: sentencepiece, with `<0xE4>` for single bytes)."""
    decoder = backend.decoder
    kinds = list(_decoder_kinds(json.loads(decoder.__getstate__()))) if decoder is not None else []
    if "ByteLevel" in kinds:
        return True
    if "Metaspace" in kinds or "ByteFallback" in kinds or "Replace" in kinds:
        return False
    raise ModelLoadError(
        f"{TOKENIZER_FILE}: decoder {'+'.join(kinds) or 'none'} is neither byte-level nor sentencepiece"
    )


def _decoder_kinds(state: dict[str, Any]) -> Iterable[str]:
    yield state["type"]
    for inner in state.get("decoders", ()):
        yield from _decoder_kinds(inner)


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's printable stand-in for each byte.

    Source: https://github.com/openai/gpt-2/blob/master/src/encoder.py, `bytes_to_unicode`.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + offset): bytes([byte]) for offset, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHAR = _byte_alphabet()

"""Token ids to text while they arrive.

A character may be spread over tokens and a token may hold half of one, so text is assembled from the tokens' bytes: a
character leaves as soon as it is complete and never before.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from weir.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one growing sequence. Cost a token is constant.

    The joined results of `push` and `flush` equal the text of all tokens at once, with the leading space that a
    sentencepiece decoder would strip: the text continues a prompt. U+FFFD stands only for bytes that can't become a
    character any more.
    """

    __slots__ = ("_begun", "_skipped", "_token_bytes")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped: frozenset[int] = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._begun = b""

    def push(self, token_ids: Sequence[int]) -> str:
        """The characters that these tokens complete; often one token's text, sometimes empty."""
        if len(token_ids) == 1:
            return self.push_one(token_ids[0])
        skipped = self._skipped
        token_bytes = self._token_bytes
        return self._decode(b"".join([token_bytes(token_id) for token_id in token_ids if token_id not in skipped]))

    def push_one(self, token_id: int) -> str:
        """`push` of a single token."""
        return "" if token_id in self._skipped else self._decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """At the end: U+FFFD if the last character was never completed, else empty."""
        begun, self._begun = self._begun, b""
        return begun.decode(errors="replace")

    def _decode(self, raw: bytes) -> str:
        """Whole characters; what begins one and does not end it is kept for the next call."""
        if self._begun:
            raw = self._begun + raw
        text, num_used = utf_8_decode(raw, "replace", False)
        self._begun = raw[num_used:]
        return text

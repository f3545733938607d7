"""What an engine answers to whoever brings the KV of a sequence from another worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A claim was taken: this much of the prefix is here, and so many blocks are promised beside it."""

    num_cached_tokens: int
    num_claimed_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Denial:
    """No seat or no blocks now."""

    retry_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportTarget:
    """Where the KV of a claimed sequence goes.

    Attributes:
        num_cached_tokens: leading tokens whose blocks are shared and must not be written; at least what was granted.
        block_ids: blocks of all known tokens, in order.
    """

    num_cached_tokens: int
    block_ids: tuple[int, ...]

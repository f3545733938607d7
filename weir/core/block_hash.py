"""Names for the content of KV blocks, on which router, engine and Redis agree.

The hash of a block covers its tokens and, through its parent's hash, every token before them; so equal hashes mean
equal KV. Only full blocks are hashed. What changes KV beside the tokens (adapter, cache salt) goes into the root of the
chain, typed and length-prefixed, so that no two combinations collide.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

BlockHash = NewType("BlockHash", bytes)

HASH_BYTES = 16


def root_hash(*, adapter: str = "", cache_salt: str = "") -> BlockHash:
    """The parent of every first block under these extra keys."""
    digest = blake2b(b"weir.block_hash.1", digest_size=HASH_BYTES)
    for kind, value in ((b"adapter", adapter), (b"cache_salt", cache_salt)):
        raw = value.encode()
        digest.update(kind + len(raw).to_bytes(8, "little") + raw)
    return BlockHash(digest.digest())


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of one full block that follows `parent`."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":  # pragma: no cover
        packed.byteswap()
    return BlockHash(blake2b(parent + packed.tobytes(), digest_size=HASH_BYTES).digest())


def hash_blocks(token_ids: Sequence[int], block_size: int, *, parent: BlockHash) -> tuple[BlockHash, ...]:
    """Hashes of the full blocks of `token_ids`, in order; a tail shorter than `block_size` has none."""
    hashes: list[BlockHash] = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hash_block(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return tuple(hashes)

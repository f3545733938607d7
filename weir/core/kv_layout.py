"""The shape of a KV cache in memory and what two workers compare before they exchange blocks.

A block holds `block_size` tokens of K and V for all layers as one contiguous slab
`[num_layers, 2, num_kv_heads, block_size, head_dim]`: a transfer is a slice, and one checksum covers one block.
"""

from __future__ import annotations

from dataclasses import dataclass

KV_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}
KV_SCALE_BYTES = {"int8": 4}
"""Behind each head of each token, what its integers are multiplied with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFingerprint:
    """What must be equal for the KV of one worker to mean the same in another; compared in the order of the fields."""

    weights_hash: str
    kv_dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int

    def first_difference(self, other: LayoutFingerprint) -> str | None:
        """The name of the first field in which the two differ, or None."""
        for name in self.__slots__:
            if getattr(self, name) != getattr(other, name):
                return name
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Sizes of one worker's KV blocks."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: str

    @property
    def head_bytes(self) -> int:
        """Bytes of K or V of one head of one token."""
        return self.head_dim * KV_DTYPE_BYTES[self.kv_dtype] + KV_SCALE_BYTES.get(self.kv_dtype, 0)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's slab."""
        return self.token_bytes * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def fingerprint(self, weights_hash: str) -> LayoutFingerprint:
        return LayoutFingerprint(
            weights_hash=weights_hash,
            kv_dtype=self.kv_dtype,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )

"""Two workers of one cluster, as the tests of this folder name them."""

from __future__ import annotations

from kv_transfer.handshake import TransferIdentity
from weir.core.kv_layout import KvLayout
from weir.core.request import FirstToken, HandoffId, HandoffKey
from weir.core.worker import Incarnation, WorkerId

SECRET = b"0123456789abcdef"
LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=16, kv_dtype="float32")
FIRST_TOKEN = FirstToken(choice_index=0, token_id=7)


def make_identity(
    name: str,
    *,
    layout: KvLayout = LAYOUT,
    weights_hash: str = "w",
    secret: bytes = SECRET,
    tp_size: int = 1,
    memory_domain: str = "",
) -> TransferIdentity:
    """A worker in its first incarnation, `<name>-1`."""
    return TransferIdentity(
        worker_id=WorkerId(name),
        incarnation=Incarnation(f"{name}-1"),
        layout=layout,
        fingerprint=layout.fingerprint(weights_hash),
        secret=secret,
        tp_size=tp_size,
        memory_domain=memory_domain,
    )


def with_block_size(block_size: int, layout: KvLayout = LAYOUT) -> KvLayout:
    return KvLayout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=block_size,
        kv_dtype=layout.kv_dtype,
    )


def make_key(name: str = "h", epoch: int = 1) -> HandoffKey:
    return HandoffKey(HandoffId(name), epoch)

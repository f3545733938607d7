"""Frames of kv_transfer.proto made from and read as core values; beside this only the hot path builds frames itself."""

from __future__ import annotations

from kv_transfer.transfer_state import Seal
from protos import common_pb2
from protos.convert import (
    error_from_proto,
    error_to_proto,
    first_token_from_proto,
    first_token_to_proto,
    key_from_proto,
    key_to_proto,
)
from protos.kv_transfer_pb2 import Abort, AbortAck, Fingerprint, Frame, HandoffLost
from protos.kv_transfer_pb2 import Seal as SealFrame
from weir.core.errors import HandoffLostError, HopFailedError, InvalidRequestError, TransferProtocolError, WeirError
from weir.core.kv_layout import LayoutFingerprint
from weir.core.request import HandoffKey

_BODIES_WITHOUT_KEY = frozenset({"hello", "hello_ok", "hello_no", "ping", "renew", "computing", "memory"})


def frame_key(frame: Frame) -> HandoffKey | None:
    """The hand-off that a frame names; None for frames that name none, several, or are of a later version.

    Raises:
        TransferProtocolError: the frame must name one and does not.
    """
    body = frame.WhichOneof("body")
    if body is None or body in _BODIES_WITHOUT_KEY:
        return None
    key: common_pb2.HandoffKey = getattr(frame, body).key
    if not key.handoff_id:
        raise TransferProtocolError(f"{body} names no hand-off", hop="transfer")
    return key_from_proto(key)


def fingerprint_to_proto(fingerprint: LayoutFingerprint) -> Fingerprint:
    return Fingerprint(
        weights_hash=fingerprint.weights_hash,
        kv_dtype=fingerprint.kv_dtype,
        num_layers=fingerprint.num_layers,
        num_kv_heads=fingerprint.num_kv_heads,
        head_dim=fingerprint.head_dim,
    )


def fingerprint_from_proto(message: Fingerprint) -> LayoutFingerprint:
    return LayoutFingerprint(
        weights_hash=message.weights_hash,
        kv_dtype=message.kv_dtype,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
    )


def seal_frame(key: HandoffKey, seal: Seal, *, first_block: int, num_blocks: int, digest: int, age_s: float) -> Frame:
    return Frame(
        seal=SealFrame(
            key=key_to_proto(key),
            first_block=first_block,
            num_blocks=num_blocks,
            num_tokens=seal.num_tokens,
            digest=digest,
            first_token=first_token_to_proto(seal.first_token),
            num_cached_tokens=seal.num_cached_tokens,
            age_us=max(0, int(age_s * 1e6)),
        )
    )


def seal_from_proto(message: SealFrame) -> Seal:
    """Raises TransferProtocolError for a first token that this version cannot read."""
    try:
        first_token = first_token_from_proto(message.first_token)
    except InvalidRequestError as exc:
        raise TransferProtocolError(exc.message, hop="transfer") from exc
    return Seal(num_tokens=message.num_tokens, first_token=first_token, num_cached_tokens=message.num_cached_tokens)


def abort_frame(key: HandoffKey, reason: WeirError) -> Frame:
    return Frame(abort=Abort(key=key_to_proto(key), reason=error_to_proto(reason)))


def abort_ack_frame(key: HandoffKey, *, drained: bool, last_sequence_number: int = 0) -> Frame:
    return Frame(abort_ack=AbortAck(key=key_to_proto(key), drained=drained, last_sequence_number=last_sequence_number))


def handoff_lost_frame(key: HandoffKey, reason: WeirError) -> Frame:
    return Frame(handoff_lost=HandoffLost(key=key_to_proto(key), reason=error_to_proto(reason)))


def failure_from_proto(message: common_pb2.ErrorDetail) -> HopFailedError:
    """The peer's reason as a failure of this hop; a class that speaks of anything else becomes `HandoffLostError`."""
    error = error_from_proto(message)
    if isinstance(error, HopFailedError):
        error.hop = error.hop or "transfer"
        return error
    return HandoffLostError(error.message, hop="transfer")

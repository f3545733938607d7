"""Who the peer is, whether its KV means the same as ours, and whether it knows the secret. Sans-I/O, both sides.

    sink                                        source
    HELLO {fingerprint, versions, nonce} -->
                                         <--    HELLO_OK {its own HELLO, proof}    or HELLO_NO
    HELLO_OK {proof}                     -->                                       or HELLO_NO

A proof is HMAC-SHA256 over the role of its maker, the protocol version, both names and both nonces. The role and the
peer's fresh nonce are in it, so neither a recorded proof nor the other side's own one sent back is ever right.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from kv_transfer.wire import fingerprint_from_proto, fingerprint_to_proto
from protos.kv_transfer_pb2 import (
    REFUSAL_REASON_BUSY,
    REFUSAL_REASON_FINGERPRINT,
    REFUSAL_REASON_MALFORMED,
    REFUSAL_REASON_PROTOCOL_VERSION,
    REFUSAL_REASON_SECRET,
    REFUSAL_REASON_TENSOR_PARALLEL,
    Frame,
    Hello,
    HelloNo,
    HelloOk,
    RefusalReason,
)
from weir.core.errors import (
    FingerprintMismatchError,
    HandoffError,
    HopFailedError,
    TransferProtocolError,
    WorkerLostError,
)
from weir.core.kv_layout import KvLayout, LayoutFingerprint
from weir.core.worker import Incarnation, WorkerId

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1
MAX_BLOCK_SIZE = 1 << 16

_NONCE_BYTES = 32
_MAX_NAME_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferIdentity:
    """What one worker says of itself.

    Attributes:
        secret: shared by all workers of a cluster. An empty one proves nothing: for a closed network only.
        memory_domain: workers of the same one can map each other's KV memory; empty where nobody can.
        tp_size, tp_rank: tensor parallelism; sizes other than 1 are refused by name until they exist.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    layout: KvLayout
    fingerprint: LayoutFingerprint
    secret: bytes = field(repr=False)
    memory_domain: str = ""
    tp_size: int = 1
    tp_rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What the handshake has established.

    Attributes:
        uses_checksums: at least one side wants them.
        lease_s: how long the source keeps an unrenewed hold; 0 on the source's own side.
        shares_memory: the sink may map the source's KV memory; its handle comes next.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    block_size: int
    protocol_version: int
    uses_checksums: bool
    lease_s: float
    shares_memory: bool = False


@dataclass(frozen=True, slots=True)
class HandshakeStep:
    """What to send now, and the peer once the handshake is done on this side."""

    reply: Frame | None
    peer: Peer | None


class HandshakeRefused(Exception):
    """One side refuses.

    Attributes:
        reply: the HELLO_NO to send before closing; None if the peer sent one.
        failure: what to tell this side's own callers.
    """

    def __init__(self, reply: Frame | None, failure: HopFailedError) -> None:
        super().__init__(failure.message)
        self.reply = reply
        self.failure = failure


class _Handshake:
    """What both sides share: comparing the peer's HELLO with our own, and the proofs."""

    def __init__(
        self, identity: TransferIdentity, *, wants_checksums: bool, make_nonce: Callable[[int], bytes] = os.urandom
    ) -> None:
        self._identity = identity
        self._nonce = make_nonce(_NONCE_BYTES)
        self._hello = Hello(
            fingerprint=fingerprint_to_proto(identity.fingerprint),
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            block_size=identity.layout.block_size,
            tp_size=identity.tp_size,
            tp_rank=identity.tp_rank,
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            nonce=self._nonce,
            wants_checksums=wants_checksums,
            memory_domain=identity.memory_domain,
        )

    def _check(self, theirs: Hello) -> int:
        """Compare a peer's HELLO, its fingerprint first; returns the protocol version to speak."""
        ours = self._identity.fingerprint
        fingerprint = fingerprint_from_proto(theirs.fingerprint)
        if name := ours.first_difference(fingerprint):
            raise _refuse(REFUSAL_REASON_FINGERPRINT, name, getattr(fingerprint, name), getattr(ours, name))
        version = min(theirs.protocol_max, PROTOCOL_MAX)
        if version < max(theirs.protocol_min, PROTOCOL_MIN):
            spoken = f"{theirs.protocol_min} to {theirs.protocol_max}"
            raise _refuse(
                REFUSAL_REASON_PROTOCOL_VERSION, "protocol_version", spoken, f"{PROTOCOL_MIN} to {PROTOCOL_MAX}"
            )
        if theirs.tp_size != 1 or self._identity.tp_size != 1:
            raise _refuse(REFUSAL_REASON_TENSOR_PARALLEL, "tp_size", theirs.tp_size, self._identity.tp_size)
        if not 1 <= theirs.block_size <= MAX_BLOCK_SIZE:
            raise _refuse(REFUSAL_REASON_MALFORMED, "block_size", theirs.block_size, f"1 to {MAX_BLOCK_SIZE}")
        if len(theirs.nonce) != _NONCE_BYTES or theirs.nonce == self._nonce:
            raise _refuse(REFUSAL_REASON_MALFORMED, "nonce", f"{len(theirs.nonce)} bytes", f"{_NONCE_BYTES} new bytes")
        for name in ("worker_id", "incarnation"):
            if not 0 < len(getattr(theirs, name).encode()) <= _MAX_NAME_BYTES:
                raise _refuse(REFUSAL_REASON_MALFORMED, name, "empty or too long", f"1 to {_MAX_NAME_BYTES} bytes")
        return version

    def _proof(self, role: bytes, version: int, *, sink: Hello, source: Hello) -> bytes:
        mac = hmac.new(self._identity.secret, b"weir.kv_transfer.1", hashlib.sha256)
        parts = [role, version.to_bytes(4, "little")]
        for hello in (sink, source):
            parts += [hello.worker_id.encode(), hello.incarnation.encode(), hello.nonce]
        for part in parts:
            mac.update(len(part).to_bytes(4, "little") + part)
        return mac.digest()

    def _check_proof(self, theirs: bytes, expected: bytes) -> None:
        if not hmac.compare_digest(theirs, expected):
            raise _refuse(REFUSAL_REASON_SECRET, "secret", "a wrong proof", "the cluster's secret")

    def _peer(self, hello: Hello, version: int, lease_ms: int = 0) -> Peer:
        return Peer(
            worker_id=WorkerId(hello.worker_id),
            incarnation=Incarnation(hello.incarnation),
            block_size=hello.block_size,
            protocol_version=version,
            uses_checksums=hello.wants_checksums or self._hello.wants_checksums,
            lease_s=lease_ms / 1000,
            shares_memory=bool(hello.memory_domain) and hello.memory_domain == self._hello.memory_domain,
        )


class SinkHandshake(_Handshake):
    """The connecting side. `start`, then `receive` until it gives a peer."""

    def start(self) -> Frame:
        return Frame(hello=self._hello)

    def receive(self, frame: Frame) -> HandshakeStep:
        """Raises HandshakeRefused: either side does not go on."""
        if frame.HasField("hello_no"):
            raise HandshakeRefused(None, _failure(frame.hello_no, is_ours=False))
        if not frame.HasField("hello_ok"):
            raise _refuse(REFUSAL_REASON_MALFORMED, "frame", frame.WhichOneof("body"), "hello_ok")
        theirs = frame.hello_ok.hello
        version = self._check(theirs)
        if frame.hello_ok.protocol_version != version:
            raise _refuse(REFUSAL_REASON_PROTOCOL_VERSION, "protocol_version", frame.hello_ok.protocol_version, version)
        self._check_proof(frame.hello_ok.proof, self._proof(b"source", version, sink=self._hello, source=theirs))
        proof = self._proof(b"sink", version, sink=self._hello, source=theirs)
        reply = Frame(hello_ok=HelloOk(protocol_version=version, proof=proof))
        return HandshakeStep(reply, self._peer(theirs, version, frame.hello_ok.lease_ms))


class SourceHandshake(_Handshake):
    """The listening side: HELLO gets HELLO_OK, and the HELLO_OK that comes back gives the peer."""

    def __init__(
        self,
        identity: TransferIdentity,
        *,
        wants_checksums: bool,
        lease_s: float,
        is_busy: bool = False,
        make_nonce: Callable[[int], bytes] = os.urandom,
    ) -> None:
        super().__init__(identity, wants_checksums=wants_checksums, make_nonce=make_nonce)
        self._lease_s = lease_s
        self._is_busy = is_busy
        self._theirs: Hello | None = None
        self._version = 0

    def start(self) -> None:
        """The sink speaks first."""

    def receive(self, frame: Frame) -> HandshakeStep:
        """Raises HandshakeRefused: either side does not go on."""
        if frame.HasField("hello_no"):
            raise HandshakeRefused(None, _failure(frame.hello_no, is_ours=False))
        if self._theirs is None:
            if not frame.HasField("hello"):
                raise _refuse(REFUSAL_REASON_MALFORMED, "frame", frame.WhichOneof("body"), "hello")
            self._version = self._check(frame.hello)
            if self._is_busy:
                raise _refuse(REFUSAL_REASON_BUSY, "connections", "one more", "as many as are allowed")
            self._theirs = frame.hello
            proof = self._proof(b"source", self._version, sink=self._theirs, source=self._hello)
            reply = HelloOk(
                hello=self._hello,
                protocol_version=self._version,
                proof=proof,
                lease_ms=int(self._lease_s * 1000),
            )
            return HandshakeStep(Frame(hello_ok=reply), None)
        if not frame.HasField("hello_ok"):
            raise _refuse(REFUSAL_REASON_MALFORMED, "frame", frame.WhichOneof("body"), "hello_ok")
        self._check_proof(
            frame.hello_ok.proof, self._proof(b"sink", self._version, sink=self._theirs, source=self._hello)
        )
        return HandshakeStep(None, self._peer(self._theirs, self._version))


def _refuse(reason: RefusalReason.ValueType, field: str, theirs: object, ours: object) -> HandshakeRefused:
    refusal = HelloNo(reason=reason, field=field, theirs=str(theirs)[:_MAX_NAME_BYTES], ours=str(ours))
    return HandshakeRefused(Frame(hello_no=refusal), _failure(refusal, is_ours=True))


def _failure(refusal: HelloNo, *, is_ours: bool) -> HopFailedError:
    theirs, ours = (refusal.theirs, refusal.ours) if is_ours else (refusal.ours, refusal.theirs)
    by = "we refuse the peer" if is_ours else "the peer refuses us"
    message = f"{by}: {refusal.field} is {theirs} there and {ours} here"
    match refusal.reason:
        case RefusalReason.REFUSAL_REASON_FINGERPRINT:
            return FingerprintMismatchError(message, param=refusal.field, hop="transfer")
        case RefusalReason.REFUSAL_REASON_TENSOR_PARALLEL:
            return HandoffError(message, param=refusal.field, hop="transfer")
        case RefusalReason.REFUSAL_REASON_BUSY:
            return WorkerLostError(message, param=refusal.field, hop="transfer")
        case _:
            return TransferProtocolError(message, param=refusal.field, hop="transfer")

"""Both sides learn who the other is, or say by name why they do not go on."""

from __future__ import annotations

import pytest

from kv_transfer.handshake import HandshakeRefused, Peer, SinkHandshake, SourceHandshake, TransferIdentity
from protos.kv_transfer_pb2 import (
    REFUSAL_REASON_BUSY,
    REFUSAL_REASON_FINGERPRINT,
    REFUSAL_REASON_MALFORMED,
    REFUSAL_REASON_PROTOCOL_VERSION,
    REFUSAL_REASON_SECRET,
    REFUSAL_REASON_TENSOR_PARALLEL,
    Frame,
    HelloOk,
    Ping,
)
from tests.kv_transfer.identities import LAYOUT, make_identity, with_block_size
from weir.core.errors import FingerprintMismatchError, HandoffError, TransferProtocolError, WorkerLostError
from weir.core.kv_layout import KvLayout


def sink_of(identity: TransferIdentity, wants_checksums: bool = True) -> SinkHandshake:
    return SinkHandshake(identity, wants_checksums=wants_checksums)


def source_of(identity: TransferIdentity, wants_checksums: bool = True, *, is_busy: bool = False) -> SourceHandshake:
    return SourceHandshake(identity, wants_checksums=wants_checksums, lease_s=30.0, is_busy=is_busy)


def shake(sink: SinkHandshake, source: SourceHandshake) -> tuple[Peer, Peer]:
    """The peers as the sink and as the source see them."""
    offer = source.receive(sink.start())
    assert offer.reply is not None
    assert offer.peer is None, "the sink has proved nothing yet"
    answer = sink.receive(offer.reply)
    assert answer.reply is not None
    assert answer.peer is not None
    done = source.receive(answer.reply)
    assert done.reply is None
    assert done.peer is not None
    return answer.peer, done.peer


def test_both_sides_learn_name_incarnation_block_size_and_lease() -> None:
    seen_by_sink, seen_by_source = shake(
        sink_of(make_identity("d", layout=with_block_size(64))), source_of(make_identity("p"))
    )
    assert (seen_by_sink.worker_id, seen_by_sink.incarnation, seen_by_sink.block_size) == ("p", "p-1", 16)
    assert (seen_by_source.worker_id, seen_by_source.incarnation, seen_by_source.block_size) == ("d", "d-1", 64)
    assert seen_by_sink.lease_s == 30.0
    assert seen_by_sink.protocol_version == seen_by_source.protocol_version == 1


@pytest.mark.parametrize(
    ("sink", "source", "is_shared"), [("a", "a", True), ("a", "b", False), ("", "a", False), ("", "", False)]
)
def test_memory_is_shared_where_both_name_the_same_domain(sink: str, source: str, is_shared: bool) -> None:
    peers = shake(sink_of(make_identity("d", memory_domain=sink)), source_of(make_identity("p", memory_domain=source)))
    assert {peer.shares_memory for peer in peers} == {is_shared}


@pytest.mark.parametrize(("sink", "source"), [(True, True), (True, False), (False, True), (False, False)])
def test_one_side_that_wants_checksums_is_enough(sink: bool, source: bool) -> None:
    peers = shake(sink_of(make_identity("d"), sink), source_of(make_identity("p"), source))
    assert {peer.uses_checksums for peer in peers} == {sink or source}


@pytest.mark.parametrize(
    ("theirs", "field"),
    [
        ({"weights_hash": "v"}, "weights_hash"),
        ({"kv_dtype": "float16"}, "kv_dtype"),
        ({"num_layers": 4}, "num_layers"),
        ({"num_kv_heads": 1}, "num_kv_heads"),
        ({"head_dim": 16}, "head_dim"),
    ],
)
def test_another_fingerprint_is_refused_with_the_field_theirs_and_ours(theirs: dict[str, object], field: str) -> None:
    fields = {name: getattr(LAYOUT, name) for name in LAYOUT.__slots__}
    weights_hash = str(theirs.pop("weights_hash", "w"))
    layout = KvLayout(**(fields | theirs))
    with pytest.raises(HandshakeRefused) as refused:
        source_of(make_identity("p")).receive(
            sink_of(make_identity("d", layout=layout, weights_hash=weights_hash, secret=b"other")).start()
        )
    assert refused.value.reply is not None
    refusal = refused.value.reply.hello_no
    assert (refusal.reason, refusal.field) == (REFUSAL_REASON_FINGERPRINT, field)
    assert refusal.theirs != refusal.ours
    with pytest.raises(HandshakeRefused) as heard:
        sink_of(make_identity("d")).receive(refused.value.reply)
    assert heard.value.reply is None
    assert isinstance(heard.value.failure, FingerprintMismatchError)
    assert heard.value.failure.param == field
    assert f"{field} is {refusal.ours} there and {refusal.theirs} here" in heard.value.failure.message


def test_the_fingerprint_is_compared_before_anything_else() -> None:
    hello = sink_of(make_identity("d", weights_hash="v", tp_size=2)).start()
    hello.hello.protocol_min = hello.hello.protocol_max = 99
    hello.hello.nonce = b""
    with pytest.raises(HandshakeRefused) as refused:
        source_of(make_identity("p"), is_busy=True).receive(hello)
    assert refused.value.reply is not None
    assert refused.value.reply.hello_no.reason == REFUSAL_REASON_FINGERPRINT


@pytest.mark.parametrize(
    ("change", "reason", "failure", "field"),
    [
        (
            {"protocol_min": 2, "protocol_max": 3},
            REFUSAL_REASON_PROTOCOL_VERSION,
            TransferProtocolError,
            "protocol_version",
        ),
        ({"tp_size": 2}, REFUSAL_REASON_TENSOR_PARALLEL, HandoffError, "tp_size"),
        ({"block_size": 0}, REFUSAL_REASON_MALFORMED, TransferProtocolError, "block_size"),
        ({"block_size": 1 << 20}, REFUSAL_REASON_MALFORMED, TransferProtocolError, "block_size"),
        ({"nonce": b"short"}, REFUSAL_REASON_MALFORMED, TransferProtocolError, "nonce"),
        ({"worker_id": ""}, REFUSAL_REASON_MALFORMED, TransferProtocolError, "worker_id"),
        ({"incarnation": "x" * 2000}, REFUSAL_REASON_MALFORMED, TransferProtocolError, "incarnation"),
    ],
)
def test_a_hello_that_does_not_fit_is_refused_by_name(
    change: dict[str, object], reason: int, failure: type[HandoffError], field: str
) -> None:
    hello = sink_of(make_identity("d")).start()
    for name, value in change.items():
        setattr(hello.hello, name, value)
    with pytest.raises(HandshakeRefused) as refused:
        source_of(make_identity("p")).receive(hello)
    assert refused.value.reply is not None
    assert (refused.value.reply.hello_no.reason, refused.value.reply.hello_no.field) == (reason, field)
    assert type(refused.value.failure) is failure


def test_a_later_version_that_still_speaks_ours_is_welcome() -> None:
    sink = sink_of(make_identity("d"))
    hello = sink.start()
    hello.hello.protocol_max = 7
    step = source_of(make_identity("p")).receive(hello)
    assert step.reply is not None
    assert step.reply.hello_ok.protocol_version == 1


def test_a_full_listener_says_so_and_the_caller_may_try_again() -> None:
    with pytest.raises(HandshakeRefused) as refused:
        source_of(make_identity("p"), is_busy=True).receive(sink_of(make_identity("d")).start())
    assert refused.value.reply is not None
    assert refused.value.reply.hello_no.reason == REFUSAL_REASON_BUSY
    with pytest.raises(HandshakeRefused) as heard:
        sink_of(make_identity("d")).receive(refused.value.reply)
    assert isinstance(heard.value.failure, WorkerLostError)


def test_a_source_without_the_secret_is_refused_by_the_sink() -> None:
    sink, source = sink_of(make_identity("d")), source_of(make_identity("p", secret=b"wrong"))
    offer = source.receive(sink.start())
    assert offer.reply is not None
    with pytest.raises(HandshakeRefused) as refused:
        sink.receive(offer.reply)
    assert refused.value.reply is not None
    assert refused.value.reply.hello_no.reason == REFUSAL_REASON_SECRET


def test_a_sink_without_the_secret_is_refused_by_the_source() -> None:
    sink, source = sink_of(make_identity("d")), source_of(make_identity("p"))
    assert source.receive(sink.start()).reply is not None
    with pytest.raises(HandshakeRefused) as refused:
        source.receive(Frame(hello_ok=HelloOk(protocol_version=1, proof=bytes(32))))
    assert refused.value.reply is not None
    assert refused.value.reply.hello_no.reason == REFUSAL_REASON_SECRET


def test_the_source_s_own_proof_sent_back_proves_nothing() -> None:
    sink, source = sink_of(make_identity("d")), source_of(make_identity("p"))
    offer = source.receive(sink.start())
    assert offer.reply is not None
    with pytest.raises(HandshakeRefused):
        source.receive(Frame(hello_ok=HelloOk(protocol_version=1, proof=offer.reply.hello_ok.proof)))


def test_the_source_s_own_hello_sent_back_is_refused() -> None:
    source = source_of(make_identity("p"))
    offer = source.receive(sink_of(make_identity("d")).start())
    assert offer.reply is not None
    again = SourceHandshake(
        make_identity("p"),
        wants_checksums=True,
        lease_s=1.0,
        make_nonce=lambda _: offer.reply.hello_ok.hello.nonce,  # type: ignore[union-attr]
    )
    with pytest.raises(HandshakeRefused) as refused:
        again.receive(Frame(hello=offer.reply.hello_ok.hello))
    assert refused.value.failure.param == "nonce"


def test_a_proof_of_another_connection_proves_nothing() -> None:
    sink, source = sink_of(make_identity("d")), source_of(make_identity("p"))
    offer = source.receive(sink.start())
    assert offer.reply is not None
    recorded = sink.receive(offer.reply).reply
    assert recorded is not None
    victim = source_of(make_identity("p"))
    victim.receive(sink.start())
    with pytest.raises(HandshakeRefused):
        victim.receive(recorded)


def test_a_proof_for_one_worker_is_none_for_another() -> None:
    sink, source = sink_of(make_identity("d")), source_of(make_identity("p"))
    hello = sink.start()
    offer = source.receive(hello)
    assert offer.reply is not None
    offer.reply.hello_ok.hello.worker_id = "q"
    with pytest.raises(HandshakeRefused):
        sink.receive(offer.reply)


@pytest.mark.parametrize("frame", [Frame(ping=Ping()), Frame(), Frame(hello_ok=HelloOk())])
def test_any_other_frame_first_is_refused(frame: Frame) -> None:
    with pytest.raises(HandshakeRefused):
        source_of(make_identity("p")).receive(frame)
    with pytest.raises(HandshakeRefused):
        sink_of(make_identity("d")).receive(frame)


def test_a_second_hello_is_refused() -> None:
    source = source_of(make_identity("p"))
    hello = sink_of(make_identity("d")).start()
    source.receive(hello)
    with pytest.raises(HandshakeRefused):
        source.receive(hello)


def test_the_secret_is_in_no_message_and_no_repr() -> None:
    secret = b"correct horse battery"
    identity = make_identity("d", secret=secret)
    assert secret not in sink_of(identity).start().SerializeToString()
    assert "horse" not in repr(identity)

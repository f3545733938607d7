"""A real grpc.aio server and client over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from weir.core import errors
from weir.core.deadline import Deadline
from weir.core.errors import WeirError, all_error_classes
from weir.runtime.grpc_client import call_metadata, call_timeout_s, open_channel, translate
from weir.runtime.grpc_server import GrpcServer
from weir.runtime.grpc_status import ERROR_KEY, STATUS_BY_CLASS, error_from_metadata, status_of
from weir.runtime.logs import request_id

Behavior = Callable[[bytes, grpc.aio.ServicerContext], Any]


def _service(**methods: grpc.RpcMethodHandler) -> Callable[[grpc.aio.Server], None]:
    def add(server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", methods),))

    return add


def _serve(**methods: grpc.RpcMethodHandler) -> GrpcServer:
    return GrpcServer("127.0.0.1", 0, add_services=[_service(**methods)], service_names=["test.Test"])


async def _failure(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def test_every_class_has_a_status() -> None:
    assert set(STATUS_BY_CLASS) == set(all_error_classes())


@pytest.mark.parametrize("cls", all_error_classes())
def test_status_of_a_subclass_is_its_own(cls: type[WeirError]) -> None:
    assert status_of(cls("x")) is STATUS_BY_CLASS[cls]


async def test_every_error_comes_back_whole_from_every_kind_of_call() -> None:
    async def unary(name: bytes, context: grpc.aio.ServicerContext) -> bytes:
        cls = getattr(errors, name.decode())
        raise cls("größe: 5 > 4", param="size", hop="transfer", retry_after_s=1.5)

    async def generator(name: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        yield b"first"
        await unary(name, context)

    async def writer(name: bytes, context: grpc.aio.ServicerContext) -> None:
        await context.write(b"first")
        async with asyncio.TaskGroup() as group:
            group.create_task(unary(name, context))  # type: ignore[arg-type]

    server = _serve(
        unary=grpc.unary_unary_rpc_method_handler(unary),
        generator=grpc.unary_stream_rpc_method_handler(generator),
        writer=grpc.unary_stream_rpc_method_handler(writer),
    )
    async with server, open_channel(server.address) as channel:
        for cls in all_error_classes():
            for method in ("unary", "generator", "writer"):
                received: list[bytes] = []

                async def call(method: str = method, name: str = cls.__name__, received: Any = received) -> None:
                    if method == "unary":
                        await channel.unary_unary("/test.Test/unary")(name.encode())
                    async for message in channel.unary_stream(f"/test.Test/{method}")(name.encode()):
                        received.append(message)

                failure = await _failure(call())
                error = translate(failure, hop="decode")
                assert type(error) is cls
                assert error.to_dict() == cls("größe: 5 > 4", param="size", hop="transfer", retry_after_s=1.5).to_dict()
                assert failure.code() is STATUS_BY_CLASS[cls]
                assert received == ([] if method == "unary" else [b"first"])


async def test_an_error_without_a_hop_gets_the_callers_name_for_it() -> None:
    async def lost(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        raise errors.HandoffLostError("expired")

    server = _serve(lost=grpc.unary_unary_rpc_method_handler(lost))
    async with server, open_channel(server.address) as channel:
        error = translate(await _failure(channel.unary_unary("/test.Test/lost")(b"")), hop="prefill")
    assert (type(error), error.hop) == (errors.HandoffLostError, "prefill")


async def test_a_message_of_any_length_passes() -> None:
    async def verbose(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        raise errors.OverloadedError("語" * 100_000, retry_after_s=2)

    server = _serve(verbose=grpc.unary_unary_rpc_method_handler(verbose))
    async with server, open_channel(server.address) as channel:
        error = translate(await _failure(channel.unary_unary("/test.Test/verbose")(b"")), hop="decode")
    assert isinstance(error, errors.OverloadedError)
    assert error.retry_after_s == 2
    assert error.message.startswith("語語語")


async def test_a_surprise_is_logged_and_says_nothing_to_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        raise KeyError("secret detail")

    server = _serve(broken=grpc.unary_unary_rpc_method_handler(broken))
    async with server, open_channel(server.address) as channel:
        with caplog.at_level(logging.ERROR):
            failure = await _failure(channel.unary_unary("/test.Test/broken")(b""))
    assert failure.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(failure.details())
    assert "secret detail" in caplog.text


async def test_an_explicit_abort_of_the_servicer_is_left_alone() -> None:
    async def refuse(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "beyond")
        raise AssertionError

    server = _serve(refuse=grpc.unary_unary_rpc_method_handler(refuse))
    async with server, open_channel(server.address) as channel:
        failure = await _failure(channel.unary_unary("/test.Test/refuse")(b""))
    assert (failure.code(), failure.details()) == (grpc.StatusCode.OUT_OF_RANGE, "beyond")
    assert isinstance(translate(failure, hop="decode"), errors.InvalidRequestError)


async def test_cancelling_a_stream_closes_the_servicers_generator() -> None:
    closed = asyncio.Event()

    async def endless(request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"more"
                await asyncio.Event().wait()
        finally:
            closed.set()

    server = _serve(endless=grpc.unary_stream_rpc_method_handler(endless))
    async with server, open_channel(server.address) as channel:
        call = channel.unary_stream("/test.Test/endless")(b"")
        assert await call.read() == b"more"
        call.cancel()
        async with asyncio.timeout(5):
            await closed.wait()


async def test_request_id_and_trace_context_reach_the_servicer() -> None:
    seen: dict[str, str] = {}

    async def look(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        seen["request_id"] = request_id.get()
        seen.update(call_metadata())
        return b""

    server = _serve(look=grpc.unary_unary_rpc_method_handler(look))
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with server, open_channel(server.address) as channel:
        await channel.unary_unary("/test.Test/look")(
            b"", metadata=(*call_metadata("req-7"), ("traceparent", traceparent))
        )
    assert seen == {"request_id": "req-7", "x-request-id": "req-7", "traceparent": traceparent}
    assert request_id.get() == ""


async def test_a_deadline_reaches_the_servicer_as_time_that_remains() -> None:
    remaining: list[float | None] = []

    async def look(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        remaining.append(context.time_remaining())
        return b""

    server = _serve(look=grpc.unary_unary_rpc_method_handler(look))
    async with server, open_channel(server.address) as channel:
        call = channel.unary_unary("/test.Test/look")
        await call(b"", timeout=call_timeout_s(Deadline.after(60)))
        await call(b"", timeout=call_timeout_s(Deadline.never()))
    assert remaining[0] is not None
    assert 50 < remaining[0] <= 60.1  # gRPC carries tenths of a second and rounds them up.
    assert remaining[1] is None


async def test_too_large_a_message_is_payload_too_large_in_both_directions() -> None:
    async def echo(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return request * 4

    small = 64 * 1024
    server = GrpcServer(
        "127.0.0.1",
        0,
        add_services=[_service(echo=grpc.unary_unary_rpc_method_handler(echo))],
        max_message_bytes=small,
    )
    async with server:
        async with open_channel(server.address) as channel:
            call = channel.unary_unary("/test.Test/echo")
            beyond_server = await _failure(call(b"x" * (small + 1)))
        async with open_channel(server.address, max_message_bytes=small // 2) as channel:
            beyond_client = await _failure(channel.unary_unary("/test.Test/echo")(b"x" * (small // 4)))
    for failure in (beyond_server, beyond_client):
        assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert isinstance(translate(failure, hop="decode"), errors.PayloadTooLargeError)


async def test_messages_above_the_default_4_mib_pass() -> None:
    async def echo(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return request

    server = _serve(echo=grpc.unary_unary_rpc_method_handler(echo))
    async with server, open_channel(server.address) as channel:
        payload = bytes(6 * 2**20)
        assert await channel.unary_unary("/test.Test/echo")(payload) == payload


async def test_a_peer_that_is_not_there_is_a_lost_worker() -> None:
    async with _serve() as server:
        address = server.address
    async with open_channel(address) as channel:
        failure = await _failure(channel.unary_unary("/test.Test/any")(b"", timeout=5))
    error = translate(failure, hop="prefill")
    assert isinstance(error, errors.WorkerLostError)
    assert error.hop == "prefill"


async def test_a_server_that_stops_in_mid_call_is_a_lost_worker() -> None:
    started = asyncio.Event()

    async def hang(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        started.set()
        await asyncio.Event().wait()
        return b""

    server = GrpcServer(
        "127.0.0.1", 0, add_services=[_service(hang=grpc.unary_unary_rpc_method_handler(hang))], grace_s=0.01
    )
    async with contextlib.AsyncExitStack() as stack:
        async with server:
            channel = await stack.enter_async_context(open_channel(server.address))
            call = channel.unary_unary("/test.Test/hang")(b"")
            await started.wait()
        error = translate(await _failure(call), hop="decode")
    assert isinstance(error, errors.WorkerLostError)


async def test_a_passed_deadline_is_a_deadline_error() -> None:
    async def hang(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await asyncio.Event().wait()
        return b""

    server = _serve(hang=grpc.unary_unary_rpc_method_handler(hang))
    async with server, open_channel(server.address) as channel:
        failure = await _failure(channel.unary_unary("/test.Test/hang")(b"", timeout=0.05))
    assert isinstance(translate(failure, hop="decode"), errors.DeadlineExceededError)


async def test_a_taken_port_is_refused_by_name() -> None:
    async with _serve() as server:
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(errors.ConfigError, match=f"127.0.0.1:{port}"):
            await GrpcServer("127.0.0.1", port, add_services=[]).__aenter__()


async def test_health_is_red_until_it_is_set() -> None:
    async with _serve() as server, open_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="test.Test")
        before = await stub.Check(request)
        await server.set_serving(True)
        during = await stub.Check(request)
        whole = await stub.Check(health_pb2.HealthCheckRequest())
        await server.set_serving(False)
        after = await stub.Check(request)
    status = health_pb2.HealthCheckResponse
    assert [answer.status for answer in (before, during, whole, after)] == [
        *(status.NOT_SERVING, status.SERVING, status.SERVING, status.NOT_SERVING)
    ]


async def test_reflection_lists_the_services() -> None:
    async with _serve() as server, open_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)

        async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
            yield reflection_pb2.ServerReflectionRequest(list_services="")

        answers = [answer async for answer in stub.ServerReflectionInfo(ask())]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {"test.Test", "grpc.health.v1.Health"} <= names


async def _pinged(interval_ms: int, silent_s: float) -> bytes:
    """The answer to a call that stays silent for `silent_s`, while its client pings every `interval_ms`."""

    async def slow(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await asyncio.sleep(silent_s)  # the silence is the case itself
        return b"done"

    server = _serve(slow=grpc.unary_unary_rpc_method_handler(slow))
    options = (
        ("grpc.keepalive_time_ms", interval_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
    async with server, grpc.aio.insecure_channel(server.address, options=options) as channel:
        answer = await channel.unary_unary("/test.Test/slow")(b"")
        assert isinstance(answer, bytes)
        return answer


@pytest.mark.full
@pytest.mark.parametrize("interval_ms", [10_000, 30_000])
async def test_a_client_that_pings_during_a_silent_minute_gets_no_goaway(interval_ms: int) -> None:
    assert await _pinged(interval_ms, 65) == b"done"


def test_metadata_that_is_no_error_of_ours_is_none() -> None:
    assert error_from_metadata(None) is None
    assert error_from_metadata([("other", "x")]) is None
    assert error_from_metadata([(ERROR_KEY, b"{broken")]) is None
    assert error_from_metadata([(ERROR_KEY, b"[]")]) is None

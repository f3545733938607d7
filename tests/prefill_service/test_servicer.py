from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import grpc
import pytest

from prefill_service.servicer import SERVICE_NAME, PrefillServicer
from protos import convert, prefill_pb2, prefill_pb2_grpc
from tests.fakes.async_engine import CountingPair, counting_pair, expected_tokens
from tests.fakes.worker_pair import DECODE, PREFILL, until, within
from weir.core.errors import (
    CapacityExceededError,
    HandoffLostError,
    InvalidRequestError,
    WeirError,
    WrongIncarnationError,
)
from weir.core.request import HandoffKey, SequenceRequest
from weir.runtime.grpc_client import open_channel, translate
from weir.runtime.grpc_server import GrpcServer

PROMPT = tuple(range(5, 40))


@asynccontextmanager
async def served(**options: object) -> AsyncIterator[tuple[CountingPair, prefill_pb2_grpc.PrefillStub]]:
    """A prefill worker behind a real server on a free port."""
    async with counting_pair(**options) as pair:  # type: ignore[arg-type]
        add_service = partial(prefill_pb2_grpc.add_PrefillServicer_to_server, PrefillServicer(pair.prefill))
        async with GrpcServer("127.0.0.1", 0, add_services=[add_service], service_names=[SERVICE_NAME]) as server:
            async with open_channel(server.address) as channel:
                yield pair, prefill_pb2_grpc.PrefillStub(channel)


def prefill_of(request: SequenceRequest, *keys: HandoffKey) -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(
        sequence=convert.sequence_to_proto(request),
        choices=[
            prefill_pb2.PrefillChoice(choice_index=index, key=convert.key_to_proto(key), decode_incarnation=DECODE)
            for index, key in enumerate(keys)
        ],
        incarnation=PREFILL,
    )


async def error_of(call: grpc.aio.UnaryUnaryCall) -> WeirError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await within(call)
    return translate(caught.value, hop="gateway")


async def test_a_prompt_comes_back_as_first_tokens_and_is_held_until_it_is_released() -> None:
    async with served() as (pair, stub):
        request, key = pair.request(PROMPT)
        response = await within(stub.Prefill(prefill_of(request, key)))
        (first_token,) = response.first_tokens
        assert convert.first_token_from_proto(first_token).token_id == expected_tokens(PROMPT, 1)[0]
        assert response.prefill_us > 0
        keys = [convert.key_to_proto(key)]
        assert not (await stub.Renew(prefill_pb2.RenewRequest(keys=keys))).lost
        assert (await stub.Release(prefill_pb2.ReleaseRequest(keys=keys, reason="done"))).num_released == 1
        assert list((await stub.Renew(prefill_pb2.RenewRequest(keys=keys))).lost) == keys
        await pair.assert_at_rest()


async def test_errors_keep_their_class_and_name_the_hop() -> None:
    async with served(max_held_blocks=4) as (pair, stub):
        request, key = pair.request(PROMPT)
        other_start = prefill_of(request, key)
        other_start.incarnation = "prefill-0"
        no_prompt = prefill_of(request, key)
        del no_prompt.sequence.prompt_token_ids[:]
        rebind = prefill_pb2.RebindRequest(key=convert.key_to_proto(key), decode_incarnation=DECODE)
        for call, cls, hop in (
            (stub.Prefill(prefill_of(request, key)), CapacityExceededError, "prefill"),
            (stub.Prefill(other_start), WrongIncarnationError, "prefill"),
            (stub.Prefill(prefill_of(request)), InvalidRequestError, "prefill"),
            (stub.Prefill(no_prompt), InvalidRequestError, "gateway"),
            (stub.Rebind(rebind), HandoffLostError, "transfer"),
        ):
            error = await error_of(call)
            assert (type(error), error.hop) == (cls, hop)
        await pair.assert_at_rest()


async def test_cancelling_the_call_stops_the_computation() -> None:
    async with served() as (pair, stub):
        runner = pair.prefill_engine.runner
        runner.hold()
        request, key = pair.request(PROMPT)
        call = stub.Prefill(prefill_of(request, key))
        await until(lambda: runner.num_steps_begun == 1)
        call.cancel()
        await until(lambda: pair.prefill.num_held == 0)
        runner.run_freely()
        await pair.assert_at_rest()
        assert runner.num_steps_begun <= 2


async def test_an_abort_by_id_ends_the_call_of_another_gateway() -> None:
    async with served() as (pair, stub):
        runner = pair.prefill_engine.runner
        runner.hold()
        request, key = pair.request(PROMPT)
        async with asyncio.TaskGroup() as group:
            failing = group.create_task(error_of(stub.Prefill(prefill_of(request, key))))
            await until(lambda: runner.num_steps_begun == 1)
            response = await stub.Abort(prefill_pb2.AbortRequest(request_id=request.request_id))
            assert response.num_aborted == 1
        assert failing.result().code == "cancelled"
        runner.run_freely()
        await pair.assert_at_rest()


async def test_the_prefix_cache_is_not_reset_under_a_hold() -> None:
    async with served() as (pair, stub):
        request, key = pair.request(PROMPT)
        await within(stub.Prefill(prefill_of(request, key)))
        assert not (await stub.ResetPrefixCache(prefill_pb2.ResetPrefixCacheRequest())).is_reset
        pair.prefill.release([key])
        await pair.assert_at_rest()
        assert (await stub.ResetPrefixCache(prefill_pb2.ResetPrefixCacheRequest())).is_reset

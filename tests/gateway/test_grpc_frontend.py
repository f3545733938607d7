"""`weir.v1.Inference` over a real channel, in front of a pipeline that plays what the test wrote down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gateway.grpc_frontend import SERVICE_NAME, InferenceServicer
from gateway.http_settings import HttpSettings
from gateway.model_store import ModelStore
from gateway.prompt_request import PromptRequest
from protos import inference_pb2, inference_pb2_grpc
from tests.fakes.http_server import make_services
from tests.fakes.pipeline import FakePipeline, Step, play
from tests.fakes.tiny_tokenizer import served_model
from weir.core.errors import HopFailedError, NoWorkerError
from weir.runtime.grpc_server import GrpcServer

Scripted = Callable[[PromptRequest], Sequence[Step]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> ModelStore:
    return ModelStore([served_model(Path(tmp_path_factory.mktemp("models")) / "tiny")])


@asynccontextmanager
async def serving(
    models: ModelStore, script: Scripted, *, api_keys: tuple[str, ...] = ()
) -> AsyncIterator[tuple[inference_pb2_grpc.InferenceStub, FakePipeline, grpc.aio.Channel]]:
    pipeline = FakePipeline(script)
    services = make_services(pipeline, models, http=HttpSettings(api_keys=api_keys))
    add = partial(inference_pb2_grpc.add_InferenceServicer_to_server, InferenceServicer(services))
    async with (
        asyncio.timeout(20),
        GrpcServer("127.0.0.1", 0, add_services=[add], service_names=[SERVICE_NAME], grace_s=0.0) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        await server.set_serving(True)
        yield inference_pb2_grpc.InferenceStub(channel), pipeline, channel  # type: ignore[no-untyped-call]


def says(models: ModelStore, text: str, **how: Any) -> Scripted:
    """A script whose every choice is `text`."""
    token_ids = models.get(None).tokenizer.encode(text)
    return lambda prompt: play(token_ids, prompt, **how)


async def collect(call: Any) -> list[Any]:
    return [message async for message in call]


def text_of(messages: list[inference_pb2.GenerateResponse], index: int = 0) -> str:
    return "".join(m.delta.text for m in messages if m.HasField("delta") and m.delta.index == index)


def request(**fields: Any) -> inference_pb2.GenerateRequest:
    sampling = {"max_tokens": 30, **fields.pop("sampling", {})}
    base: dict[str, Any] = {"text": "Hello", "sampling": inference_pb2.SamplingParams(**sampling)}
    return inference_pb2.GenerateRequest(**{**base, **fields})


async def test_deltas_come_first_then_one_complete_with_the_usage(models: ModelStore) -> None:
    script = says(models, "DEFGH there", stop_token_id=2, num_cached_tokens=1)
    async with serving(models, script) as (stub, pipeline, _):
        messages = await collect(stub.Generate(request()))
    assert text_of(messages) == "DEFGH there"
    (complete,) = [message.complete for message in messages if message.HasField("complete")]
    assert messages[-1].HasField("complete")
    assert complete.finish_reason == "stop"
    assert complete.usage.completion_tokens == 4
    assert complete.usage.prompt_tokens == len(pipeline.prompts[0].prompt_token_ids)
    assert complete.usage.cached_tokens == 1


async def test_n_choices_each_have_their_complete_and_the_last_has_the_usage(models: ModelStore) -> None:
    async with serving(models, says(models, "DEFGH")) as (stub, _, _):
        messages = await collect(stub.Generate(request(sampling={"n": 2})))
    completes = [message.complete for message in messages if message.HasField("complete")]
    assert sorted(complete.index for complete in completes) == [0, 1]
    assert [complete.HasField("usage") for complete in completes] == [False, True]
    assert text_of(messages, 0) == text_of(messages, 1) == "DEFGH"


async def test_a_stop_string_ends_the_choice_and_names_itself(models: ModelStore) -> None:
    async with serving(models, says(models, "DEFGHLM")) as (stub, pipeline, _):
        messages = await collect(stub.Generate(request(sampling={"stop": ["FGH"]})))
    assert text_of(messages) == "DE"
    assert messages[-1].complete.stop_string == "FGH"
    assert [index for _, index in pipeline.finished_choices] == [0]


async def test_sampling_reaches_the_pipeline_as_over_http(models: ModelStore) -> None:
    sampling = {
        "temperature": 0.1,
        "top_p": 0.3,
        "top_k": 7,
        "seed": 2**63 + 1,
        "min_tokens": 2,
        "logit_bias": {5: -1.5},
        "stop_token_ids": [9],
        "ignore_eos": True,
        "repetition_penalty": 1.1,
        "logprobs": 2,
    }
    async with serving(models, says(models, "DEF")) as (stub, pipeline, _):
        await collect(stub.Generate(request(sampling=sampling, priority=-3, cache_salt="s", request_id="mine")))
    (prompt,) = pipeline.prompts
    got = prompt.sampling
    assert (got.temperature, got.top_p, got.top_k, got.seed) == (0.1, 0.3, 7, 2**63 + 1)
    assert (got.min_tokens, got.logit_bias, got.stop_token_ids) == (2, ((5, -1.5),), (9,))
    assert (got.ignore_eos, got.repetition_penalty, got.logprobs, got.max_tokens) == (True, 1.1, 2, 30)
    assert (prompt.priority, prompt.cache_salt, prompt.label) == (-3, "s", "mine")
    assert prompt.request_id != "mine"


async def test_token_ids_and_chat_are_inputs_too(models: ModelStore) -> None:
    chat = inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    async with serving(models, says(models, "DEF")) as (stub, pipeline, _):
        await collect(stub.Generate(request(text=None, token_ids=inference_pb2.TokenIds(ids=[5, 6]))))
        await collect(stub.Generate(request(text=None, chat=chat, sampling={"logprobs": 1})))
    assert pipeline.prompts[0].prompt_token_ids == (5, 6)
    rendered = models.get(None).tokenizer.decode(pipeline.prompts[1].prompt_token_ids, skip_special_tokens=False)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_ids_and_logprobs_come_with_the_deltas_when_asked_for(models: ModelStore) -> None:
    async with serving(models, says(models, "DEFGH")) as (stub, _, _):
        asked = request(return_token_ids=True, sampling={"logprobs": 2})
        messages = await collect(stub.Generate(asked))
    deltas = [message.delta for message in messages if message.HasField("delta")]
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    assert tuple(token_ids) == models.get(None).tokenizer.encode("DEFGH")
    first = deltas[0].logprobs[0]
    assert (first.token_id, first.token, first.logprob) == (token_ids[0], "DEF", -0.25)
    assert [top.logprob for top in first.top] == [-0.25, -0.5]


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        (request(text=None), grpc.StatusCode.INVALID_ARGUMENT, "input"),
        (request(model="nobody"), grpc.StatusCode.NOT_FOUND, "nobody"),
        (request(sampling={"temperature": -1.0}), grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
        (request(sampling={"temperature": float("nan")}), grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
        (request(sampling={"max_tokens": 999}), grpc.StatusCode.INVALID_ARGUMENT, "256"),
        (
            request(sampling={"constraint": inference_pb2.Constraint(json_object=True)}),
            grpc.StatusCode.INVALID_ARGUMENT,
            "structured_outputs",
        ),
    ],
)
async def test_bad_input_is_refused_as_over_http(
    models: ModelStore, asked: inference_pb2.GenerateRequest, status: grpc.StatusCode, said: str
) -> None:
    async with serving(models, says(models, "DEF")) as (stub, pipeline, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub.Generate(asked))
        assert pipeline.prompts == []
    assert caught.value.code() is status
    assert said in (caught.value.details() or "")


async def test_a_refusal_and_a_failure_in_mid_stream_end_the_call_with_their_status(models: ModelStore) -> None:
    def breaks(prompt: PromptRequest) -> Sequence[Step]:
        return [*play((40, 41, 42), prompt)[:1], HopFailedError("broken", hop="decode")]

    async with serving(models, breaks) as (stub, pipeline, _):
        call = stub.Generate(request(sampling={"max_tokens": 3}))
        assert (await call.read()).HasField("delta")
        with pytest.raises(grpc.aio.AioRpcError) as broken:
            await call.read()
        pipeline.refusal = NoWorkerError("nobody", hop="decode")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await collect(stub.Generate(request()))
    assert broken.value.code() is grpc.StatusCode.ABORTED
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_cancelling_the_call_leaves_the_pipeline(models: ModelStore) -> None:
    async with serving(models, lambda prompt: [*play((40, 41), prompt)[:1], asyncio.Event()]) as (stub, pipeline, _):
        call = stub.Generate(request(sampling={"max_tokens": 2}))
        assert (await call.read()).HasField("delta")
        call.cancel()
        await pipeline.left.wait()
    assert pipeline.num_inside == 0


async def test_the_callers_deadline_is_the_requests(models: ModelStore) -> None:
    async with serving(models, says(models, "DEF")) as (stub, pipeline, _):
        await collect(stub.Generate(request(), timeout=15))
    assert 10 < pipeline.prompts[0].deadline.remaining_s() <= 15.1  # gRPC rounds tenths of a second up


@pytest.mark.parametrize(
    "metadata", [(), (("authorization", "Bearer wrong"),), (("authorization", "Bearer key"),) * 2, (("x", "key"),)]
)
async def test_every_method_is_closed_without_the_key(models: ModelStore, metadata: Any) -> None:
    async with serving(models, says(models, "DEF"), api_keys=("key",)) as (stub, pipeline, _):
        calls = [
            stub.Abort(inference_pb2.AbortRequest(), metadata=metadata),
            stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata),
            stub.GetModel(inference_pb2.GetModelRequest(), metadata=metadata),
            stub.Tokenize(inference_pb2.TokenizeRequest(), metadata=metadata),
            stub.Detokenize(inference_pb2.DetokenizeRequest(), metadata=metadata),
            stub.GetServerInfo(inference_pb2.GetServerInfoRequest(), metadata=metadata),
            collect(stub.Generate(request(), metadata=metadata)),
        ]
        assert len(calls) == len(inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods)
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        right = (("authorization", "bearer key"),)
        assert (await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=right)).models
        assert pipeline.prompts == []


async def test_models_text_and_server_are_told(models: ModelStore) -> None:
    chat = inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    async with serving(models, says(models, "DEF")) as (stub, pipeline, _):
        pipeline.gateway_id = "g"  # type: ignore[attr-defined]
        (listed,) = (await stub.ListModels(inference_pb2.ListModelsRequest())).models
        assert listed == await stub.GetModel(inference_pb2.GetModelRequest(model="tiny"))
        assert (listed.id, listed.max_model_len) == ("tiny", 256)
        tokens = await stub.Tokenize(inference_pb2.TokenizeRequest(text="DEFGH"))
        assert tokens.max_model_len == 256
        back = await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=tokens.token_ids))
        assert back.text == "DEFGH"
        rendered = await stub.Tokenize(inference_pb2.TokenizeRequest(chat=chat))
        assert rendered.token_ids[0] == 1
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[10**6]))
        info = await stub.GetServerInfo(inference_pb2.GetServerInfoRequest())
        assert (info.gateway_id, info.num_prefill_workers, info.num_decode_workers) == ("g", 0, 0)


async def test_health_and_reflection_stand_beside(models: ModelStore) -> None:
    async with serving(models, says(models, "DEF")) as (_, _, channel):
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]))
        (listed,) = await collect(call)
    assert SERVICE_NAME in [service.name for service in listed.list_services_response.service]

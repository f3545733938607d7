"""Row S33 of cases over a real socket, and the routes that do not generate."""

import asyncio
from dataclasses import replace

import pytest

from gateway.http_settings import HttpSettings
from gateway.model_store import ModelStore, ServedModel
from tests.fakes.http_server import running_gateway
from tests.fakes.pipeline import FakePipeline, play
from weir import __version__
from weir.core.errors import ConfigError, ModelLoadError
from weir.core.kv_layout import KvLayout, LayoutFingerprint
from weir.core.worker import Incarnation, Role, WorkerId, WorkerInfo, WorkerLoad, WorkerState

JSON = {"content-type": "application/json"}


@pytest.fixture
def pipeline(model) -> FakePipeline:
    ids = model.tokenizer.encode("Hello there")
    return FakePipeline(lambda prompt: play(ids, prompt, stop_token_id=2))


def worker(role: Role, *, model: str = "tiny", state: WorkerState = WorkerState.READY) -> WorkerInfo:
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, kv_dtype="float32")
    return WorkerInfo(
        worker_id=WorkerId(f"{role.value}-{state.value}"),
        incarnation=Incarnation("1"),
        role=role,
        state=state,
        model=model,
        control_address="127.0.0.1:1",
        transfer_address="",
        layout=layout,
        fingerprint=LayoutFingerprint(weights_hash="0", kv_dtype="float32", num_layers=1, num_kv_heads=1, head_dim=8),
        max_model_len=256,
        load=WorkerLoad(),
    )


async def test_s33_bad_requests_get_4xx_in_one_shape_and_disturb_nobody(pipeline, models):
    gate = asyncio.Event()
    quick = pipeline.script
    pipeline.script = lambda prompt: [gate, *quick(prompt)] if prompt.priority else quick(prompt)
    good = b'{"prompt": "hi"}'
    cases = [
        ("/v1/completions", b"", JSON, 400),
        ("/v1/completions", b"[]", JSON, 400),
        ("/v1/completions", b'{"prompt":', JSON, 400),
        ("/v1/completions", b"\xef\xbb\xbf" + good, JSON, 400),
        ("/v1/completions", b'{"prompt": "a", "prompt": "b"}', JSON, 400),
        ("/v1/completions", b'{"prompt": "hi", "temperature": NaN}', JSON, 400),
        ("/v1/completions", b'{"prompt": "hi", "n": 1.5}', JSON, 400),
        ("/v1/completions", b'{"prompt": "hi", "model": "other"}', JSON, 404),
        ("/v1/completions", good, {"content-type": "text/plain"}, 415),
        ("/v1/completions", good, {"content-type": "application/x-www-form-urlencoded"}, 415),
        ("/v1/completions", b'{"prompt": "' + b"x" * 5000 + b'"}', JSON, 413),
        ("/v1/chat/completions", b'{"messages": "hi"}', JSON, 400),
        ("/v1/chat/completions", b'{"messages": [{"role": "bot", "content": "x"}]}', JSON, 400),
        ("/v1/chat/completions", b'{"messages": []}', JSON, 400),
        ("/tokenize", b"{}", JSON, 400),
        ("/detokenize", b'{"tokens": [99999999]}', JSON, 400),
    ]
    async with running_gateway(pipeline, models, http=HttpSettings(max_body_bytes=4096)) as gateway:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(gateway.client.post("/v1/completions", json={"prompt": "hi", "priority": 1}))
            await pipeline.entered.wait()
            for path, body, headers, status in cases:
                answer = await gateway.client.post(path, content=body, headers=headers)
                assert answer.status_code == status, (body[:80], answer.text)
                error = answer.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert "Traceback" not in answer.text
            gate.set()
        assert (await running).json()["choices"][0]["text"] == "Hello there"
        assert (await gateway.client.post("/v1/completions", content=good, headers=JSON)).status_code == 200


async def test_a_json_content_type_has_many_spellings(pipeline, models):
    async with running_gateway(pipeline, models) as gateway:
        for kind in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.x+json", None):
            headers = {} if kind is None else {"content-type": kind}
            answer = await gateway.client.post("/v1/completions", content=b'{"prompt": "hi"}', headers=headers)
            assert answer.status_code == 200, kind


async def test_a_body_of_unknown_length_is_measured_as_it_comes(pipeline, models):
    async def pieces():
        for _ in range(20):
            yield b"x" * 100_000

    async with running_gateway(pipeline, models, http=HttpSettings(max_body_bytes=4096)) as gateway:
        for content in (pieces(), b"x" * 2_000_000):
            answer = await gateway.client.post("/v1/completions", content=content, headers=JSON)
            assert answer.status_code == 413
            assert "4096" in answer.json()["error"]["message"]
            assert answer.headers["connection"] == "close"


async def test_a_client_that_asks_before_it_sends_too_much_is_told_at_once(pipeline, models):
    async with running_gateway(pipeline, models, http=HttpSettings(max_body_bytes=4096)) as gateway:
        reader, writer = await gateway.connect()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\nexpect: 100-continue\r\n\r\n"
        )
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
        writer.close()


async def test_a_body_that_does_not_come_is_not_waited_for(pipeline, models):
    async with running_gateway(pipeline, models, http=HttpSettings(body_timeout_s=0.05)) as gateway:
        reader, writer = await gateway.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "route_not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/other/name", 404, "model_not_found"),
    ],
)
async def test_what_no_route_answers_has_the_same_shape(pipeline, models, method, path, status, code):
    async with running_gateway(pipeline, models) as gateway:
        answer = await gateway.client.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    if status == 405:
        assert answer.headers["allow"]


async def test_models_are_listed_and_found_by_name(pipeline, model):
    other = replace(model, card=replace(model.card, name="org/other"))
    async with running_gateway(pipeline, ModelStore([model, other])) as gateway:
        listed = (await gateway.client.get("/v1/models")).json()
        assert [entry["id"] for entry in listed["data"]] == ["tiny", "org/other"]
        found = (await gateway.client.get("/v1/models/org/other")).json()
        assert found == listed["data"][1]
        assert found["max_model_len"] == 256
        answer = await gateway.client.post("/v1/completions", json={"prompt": "hi", "model": "org/other"})
        assert answer.json()["model"] == "org/other"


def test_a_store_needs_models_of_different_names(model, tmp_path):
    with pytest.raises(ConfigError):
        ModelStore([])
    with pytest.raises(ConfigError, match="tiny, tiny"):
        ModelStore([model, model])
    with pytest.raises(ModelLoadError, match="tokenizer"):
        ServedModel.load(tmp_path)


async def test_tokenize_and_detokenize_are_each_others_inverse(pipeline, models):
    async with running_gateway(pipeline, models) as gateway:
        text = "Hello<|im_end|> there 中国"
        found = (await gateway.client.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
        assert found["max_model_len"] == 256
        back = (await gateway.client.post("/detokenize", json={"tokens": found["tokens"]})).json()
        assert back == {"prompt": text}
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        counted = (await gateway.client.post("/tokenize", json=chat)).json()
        answer = (await gateway.client.post("/v1/chat/completions", json=chat)).json()
        assert counted["count"] == answer["usage"]["prompt_tokens"]
        assert counted["token_strs"] is None


async def test_health_is_about_the_process_and_ready_about_its_workers(pipeline, models):
    async with running_gateway(pipeline, models) as gateway:
        for workers, status in (
            ((), 503),
            ((worker(Role.PREFILL),), 503),
            ((worker(Role.DECODE, state=WorkerState.DRAINING),), 503),
            ((worker(Role.DECODE, model="other"),), 503),
            ((worker(Role.DECODE),), 200),
            ((worker(Role.DECODE), worker(Role.PREFILL)), 200),
        ):
            pipeline.clients.workers = workers
            assert (await gateway.client.get("/ready")).status_code == status, workers
            assert (await gateway.client.get("/health")).status_code == 200
        assert (await gateway.client.get("/ready")).json()["models"] == {"tiny": {"prefill": 1, "decode": 1}}
        gateway.admission.refuse_new()
        assert (await gateway.client.get("/ready")).status_code == 503


async def test_version_metrics_and_docs_answer(pipeline, models):
    async with running_gateway(pipeline, models) as gateway:
        assert (await gateway.client.get("/version")).json() == {"version": __version__}
        metrics = await gateway.client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        assert "vllm:time_to_first_token_seconds" in metrics.text
        assert (await gateway.client.get("/docs")).status_code == 200


async def test_the_description_names_every_body_and_every_reference_in_it_exists(pipeline, models):
    async with running_gateway(pipeline, models) as gateway:
        answer = await gateway.client.get("/openapi.json")
    description = answer.json()
    schemas = description["components"]["schemas"]
    references = set(answer.text.split('"$ref":"#/components/schemas/')[1:])
    assert {reference.partition('"')[0] for reference in references} <= set(schemas)
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        assert description["paths"][path]["post"]["requestBody"]["required"]
    assert "temperature" in schemas["ChatCompletionRequest"]["properties"]


async def test_an_id_of_the_client_is_repeated_unless_no_header_can_hold_it(pipeline, models):
    async with running_gateway(pipeline, models) as gateway:
        for label, is_kept in (("mine-1", True), ("x" * 257, False), ("caf\xe9", False)):
            answer = await gateway.client.get("/health", headers=[(b"x-request-id", label.encode("latin-1"))])
            assert (answer.headers["x-request-id"] == label) is is_kept
        first = await gateway.client.get("/health")
        second = await gateway.client.get("/health")
        assert first.headers["x-request-id"] != second.headers["x-request-id"]
        for is_stream in (False, True):
            answer = await gateway.client.post("/v1/completions", json={"prompt": "hi", "stream": is_stream})
            assert answer.headers["x-request-id"] == pipeline.prompts[-1].request_id
            assert pipeline.prompts[-1].request_id in answer.text


async def test_a_trace_of_the_client_is_continued(pipeline, models):
    from opentelemetry import trace

    seen = []
    play_on = pipeline.script

    def script(prompt):
        seen.append(trace.get_current_span().get_span_context().trace_id)
        return play_on(prompt)

    pipeline.script = script
    header = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    async with running_gateway(pipeline, models) as gateway:
        await gateway.client.post("/v1/completions", json={"prompt": "hi"}, headers=header)
        await gateway.client.post("/v1/completions", json={"prompt": "hi"})
    assert seen == [0x0AF7651916CD43DD8448EB211C80319C, 0]

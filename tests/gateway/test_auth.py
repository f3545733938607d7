"""Rows S34 and S35 of cases: keys on every route but one, and browsers."""

import httpx
import pytest

from gateway.app import create_app
from gateway.auth import AuthMiddleware
from gateway.http_settings import HttpSettings
from tests.fakes.http_server import make_services, running_gateway
from tests.fakes.pipeline import FakePipeline, play

KEYS = ("first-key", "second-key")
ORIGIN = "https://chat.example"
SETTINGS = HttpSettings(api_keys=KEYS, cors_origins=(ORIGIN,))


@pytest.fixture
def pipeline() -> FakePipeline:
    return FakePipeline(lambda prompt: play([5, 6], prompt))


async def test_every_route_is_closed_but_health(pipeline, models):
    app = create_app(make_services(pipeline, models, http=SETTINGS))
    described = {path.replace("{model_id}", "m").replace("{request_id}", "r") for path in app.openapi()["paths"]}
    assert {"/v1/completions", "/metrics", "/tokenize", "/v1/models/m", "/health"} <= described
    paths = {*described, "/docs", "/openapi.json"}
    odd = {
        "//v1/models",
        "/v1/../v1/models",
        "/V1/models",
        "/health/",
        "/HEALTH",
        "//health",
        "/health/../metrics",
        "/no",
    }
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        for path in sorted(paths | odd):
            for method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
                request = client.build_request(method, "http://x/")
                request.url = request.url.copy_with(raw_path=path.encode())
                answer = await client.send(request)
                if path == "/health":
                    assert answer.status_code in (200, 405), (method, path)
                else:
                    assert answer.status_code == 401, (method, path)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 401),
        ([("authorization", "Bearer wrong")], 401),
        ([("authorization", "Bearer")], 401),
        ([("authorization", "first-key")], 401),
        ([("authorization", "Basic first-key")], 401),
        ([("authorization", "Bearer first-key"), ("authorization", "Bearer first-key")], 401),
        ([("authorization", "Bearer first-key, Bearer first-key")], 401),
        ([("x-api-key", "first-key")], 401),
        ([("authorization", "Bearer first-key")], 200),
        ([("Authorization", "bearer second-key")], 200),
        ([("authorization", "BEARER   second-key")], 200),
    ],
)
async def test_only_one_right_key_opens(pipeline, models, headers, status):
    async with running_gateway(pipeline, models, http=SETTINGS) as gateway:
        answer = await gateway.client.get("/v1/models", headers=headers)
        assert answer.status_code == status
        if status == 401:
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert not any(key in answer.text for key in KEYS)


async def test_without_configured_keys_nobody_is_asked(pipeline, models):
    async with running_gateway(pipeline, models) as gateway:
        assert (await gateway.client.get("/v1/models")).status_code == 200
        assert (await gateway.client.get("/v1/models", headers={"authorization": "Bearer x"})).status_code == 200


async def test_a_websocket_is_closed_too():
    sent = []

    async def app(scope, receive, send):
        raise AssertionError("reached")

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "websocket.connect"}

    await AuthMiddleware(app, KEYS)({"type": "websocket", "path": "/health/x", "headers": []}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_preflight_is_answered_without_a_key_for_configured_origins_only(pipeline, models):
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    async with running_gateway(pipeline, models, http=SETTINGS) as gateway:
        answer = await gateway.client.options("/v1/chat/completions", headers={"origin": ORIGIN, **ask})
        assert answer.status_code in (200, 204)
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert {"authorization", "content-type"} <= set(
            answer.headers["access-control-allow-headers"].lower().replace(" ", "").split(",")
        )
        other = await gateway.client.options("/v1/chat/completions", headers={"origin": "https://evil.example", **ask})
        assert "access-control-allow-origin" not in other.headers


async def test_refusals_and_failures_carry_cors_headers(pipeline, models):
    async with running_gateway(pipeline, models, http=SETTINGS) as gateway:
        refused = await gateway.client.post("/v1/chat/completions", json={}, headers={"origin": ORIGIN})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == ORIGIN
        key = {"authorization": "Bearer first-key", "origin": ORIGIN}
        wrong = await gateway.client.post("/v1/chat/completions", json={}, headers=key)
        assert wrong.status_code == 400
        assert wrong.headers["access-control-allow-origin"] == ORIGIN
        assert "x-request-id" in wrong.headers["access-control-expose-headers"].lower()

        def broken(prompt):
            raise RuntimeError("a fault of ours")

        pipeline.script = broken
        failed = await gateway.client.post("/v1/completions", json={"prompt": "hi"}, headers=key)
        assert failed.status_code == 500
        assert failed.headers["access-control-allow-origin"] == ORIGIN
        assert "fault of ours" not in failed.text
        assert "Traceback" not in failed.text

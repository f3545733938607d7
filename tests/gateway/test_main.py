"""The gateway as a process of its own, before a real Redis and a decode worker that the test plays."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from gateway.__main__ import drain, open_http, open_services
from gateway.config import GatewayConfig
from gateway.services import GatewayServices
from gateway.worker_clients import probe_worker
from protos import common_pb2, decode_pb2, decode_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.fakes.redis_server import RedisServer, redis_server
from tests.fakes.tiny_tokenizer import served_model
from tests.fakes.worker_clients import worker_info
from weir.cli.probes import free_ports
from weir.cluster.connection import RedisConnection
from weir.cluster.worker_registry import Registration
from weir.core.errors import ConfigError
from weir.core.worker import Role
from weir.runtime.grpc_server import GrpcServer

__all__ = ["redis_server"]

ROOT = Path(__file__).parents[2]
PROMPT = {"model": "tiny", "prompt": "Hello there", "max_tokens": 5, "temperature": 0}


class CountingDecode(decode_pb2_grpc.DecodeServicer):
    """Grants everything and answers with the token ids 40, 41 and so on: the first, and once `go` is set the rest."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def Session(
        self, request_iterator: AsyncIterator[decode_pb2.SessionUp], context: grpc.aio.ServicerContext
    ) -> None:
        async with asyncio.TaskGroup() as tasks:
            async for message in request_iterator:
                if message.HasField("open"):
                    tasks.create_task(self._answer(message.open, context))
                elif message.HasField("cancel"):
                    self.cancelled.set()

    async def _answer(self, opened: decode_pb2.Open, context: grpc.aio.ServicerContext) -> None:
        async def say(**news: object) -> None:
            event = decode_pb2.Event(stream_id=opened.stream_id, **news)  # type: ignore[arg-type]
            await context.write(decode_pb2.SessionDown(events=[event]))

        await say(granted=decode_pb2.Granted())
        await say(delta=decode_pb2.Delta(first_index=0, token_ids=[40]))
        self.started.set()
        await self.go.wait()
        rest = range(41, 40 + opened.sequence.sampling.max_tokens)
        reason = common_pb2.FINISH_REASON_LENGTH
        await say(delta=decode_pb2.Delta(first_index=1, token_ids=rest, finish_reason=reason))


@asynccontextmanager
async def decode_worker(redis: RedisServer) -> AsyncIterator[CountingDecode]:
    """A decode worker that is registered and answers."""
    player = CountingDecode()
    async with GrpcServer(
        "127.0.0.1", 0, add_services=[lambda server: decode_pb2_grpc.add_DecodeServicer_to_server(player, server)]
    ) as server:
        info = worker_info("d0", Role.DECODE, control_address=server.address)
        assert await probe_worker(info)
        async with (
            RedisConnection.from_url(redis.url) as connection,
            Registration(connection, lambda: info, ttl_s=6.0),
        ):
            yield player


def config_of(tmp_path: Path, redis_url: str, **settings: Any) -> GatewayConfig:
    served_model(tmp_path / "model")
    return GatewayConfig(
        **{"model_dirs": (str(tmp_path / "model"),), "redis_url": redis_url, "port": 0, "grpc_port": None, **settings}
    )


@asynccontextmanager
async def gateway(config: GatewayConfig) -> AsyncIterator[tuple[httpx.AsyncClient, GatewayServices]]:
    """All of the process but its signals."""
    async with (
        open_services(config) as services,
        open_http(config, services) as address,
        httpx.AsyncClient(base_url=f"http://{address}", timeout=15) as client,
    ):
        yield client, services


async def until_status(client: httpx.AsyncClient, path: str, status: int) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                if (await client.get(path)).status_code == status:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.02)


def events(lines: list[str]) -> list[str]:
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


@pytest.mark.parametrize("is_asked", [False, True])
async def test_metrics_have_their_former_names_too_if_asked(
    redis_server: RedisServer, tmp_path: Path, is_asked: bool
) -> None:
    async with gateway(config_of(tmp_path, redis_server.url, legacy_aliases=is_asked)) as (client, _):
        metrics = (await client.get("/metrics")).text
        assert ("vllm:time_per_output_token_seconds" in metrics) == is_asked


async def test_a_request_goes_through_and_can_be_looked_up(redis_server: RedisServer, tmp_path: Path) -> None:
    async with decode_worker(redis_server), gateway(config_of(tmp_path, redis_server.url)) as (client, _):
        await until_status(client, "/ready", 200)
        answer = (await client.post("/v1/completions", json={**PROMPT, "return_token_ids": True})).json()
        assert answer["choices"][0]["token_ids"] == [40, 41, 42, 43, 44]
        path = f"/v1/requests/{answer['id']}"
        await until_status(client, path, 200)
        async with asyncio.timeout(10):
            while (record := (await client.get(path)).json())["state"] != "done":
                pass
        assert (record["decode_worker"], record["num_output_tokens"]) == ("d0", 5)
        assert record["finish_reasons"] == ["length"]
        (worker,) = (await client.get("/v1/workers")).json()["data"]
        assert (worker["id"], worker["is_connected"]) == ("d0", True)
        metrics = (await client.get("/metrics")).text
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 1.0' in metrics
    assert "weir_redis_up 1.0" in metrics


async def test_redis_may_die_under_a_running_stream_and_new_requests(redis_server: RedisServer, tmp_path: Path) -> None:
    config = config_of(tmp_path, redis_server.url)
    async with decode_worker(redis_server) as player, gateway(config) as (client, _):
        await until_status(client, "/ready", 200)
        player.go.clear()
        async with client.stream("POST", "/v1/completions", json={**PROMPT, "stream": True}) as response:
            await player.started.wait()
            redis_server.kill()
            await until_status(client, "/v1/requests/any", 503)
            player.go.set()
            lines = [line async for line in response.aiter_lines()]
        assert events(lines)[-1] == "[DONE]"
        assert (await client.post("/v1/completions", json=PROMPT)).status_code == 200


async def test_what_outlasts_the_drain_time_ends_with_an_error_event(redis_server: RedisServer, tmp_path: Path) -> None:
    config = config_of(tmp_path, redis_server.url)
    async with decode_worker(redis_server) as player, gateway(config) as (client, services):
        await until_status(client, "/ready", 200)
        player.go.clear()
        async with client.stream("POST", "/v1/completions", json={**PROMPT, "stream": True}) as response:
            await player.started.wait()
            async with asyncio.timeout(10):
                await drain(services, 0.05)
            lines = [line async for line in response.aiter_lines()]
        await player.cancelled.wait()
        player.go.set()
    assert json.loads(events(lines)[-1])["error"]["message"] == "the gateway shuts down"


async def test_without_redis_it_answers_that_nobody_serves(tmp_path: Path) -> None:
    async with gateway(config_of(tmp_path, f"redis://127.0.0.1:{free_ports(1)[0]}/0")) as (client, _):
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
        refused = await client.post("/v1/completions", json=PROMPT)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "no_worker"
        assert (await client.get("/v1/requests/x")).status_code == 503


async def test_a_port_in_use_is_a_setting_at_fault(tmp_path: Path) -> None:
    redis_url = f"redis://127.0.0.1:{free_ports(1)[0]}/0"
    async with gateway(config_of(tmp_path, redis_url)) as (client, services):
        config = config_of(tmp_path, redis_url, port=client.base_url.port)
        with pytest.raises(ConfigError, match=f"port: cannot listen on 127.0.0.1:{config.port}"):
            await open_http(config, services).__aenter__()


async def test_sigterm_lets_a_stream_finish_and_refuses_new_ones(redis_server: RedisServer, tmp_path: Path) -> None:
    served_model(tmp_path / "model")
    port, grpc_port = free_ports(2)
    async with (
        decode_worker(redis_server) as player,
        process_of(
            *("--model-dirs", str(tmp_path / "model"), "--redis-url", redis_server.url),
            *("--port", str(port), "--grpc-port", str(grpc_port)),
        ) as process,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=15) as client,
    ):
        await until_status(client, "/ready", 200)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            models = await stub.ListModels(inference_pb2.ListModelsRequest())
            assert [model.id for model in models.models] == ["tiny"]
        player.go.clear()
        async with client.stream("POST", "/v1/completions", json={**PROMPT, "stream": True}) as response:
            await player.started.wait()
            process.send_signal(signal.SIGTERM)
            stranger = {**PROMPT, "model": "nobody"}  # admitted, then refused
            async with asyncio.timeout(10):
                while (refused := await client.post("/v1/completions", json=stranger)).status_code == 404:
                    pass
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            player.go.set()
            lines = [line async for line in response.aiter_lines()]
        async with asyncio.timeout(15):
            _, log = await process.communicate()
    assert events(lines)[-1] == "[DONE]"
    assert json.loads(events(lines)[-2])["choices"][0]["finish_reason"] == "length"
    assert process.returncode == 0, log.decode()


@asynccontextmanager
async def process_of(*flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", *flags),
        cwd=ROOT,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

"""The gateway as a process of its own, before a real Redis and a decode worker that the test plays."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx

from gateway.worker_clients import probe_worker
from protos import common_pb2, decode_pb2, decode_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.fakes.redis_server import RedisServer, free_port, redis_server
from tests.fakes.tiny_tokenizer import served_model
from tests.fakes.worker_clients import worker_info
from weir.cluster.connection import RedisConnection
from weir.cluster.worker_registry import Registration
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


@dataclass
class GatewayProcess:
    process: asyncio.subprocess.Process
    client: httpx.AsyncClient
    grpc_port: int

    async def has_state(self, path: str, status: int) -> None:
        """Until a GET answers with `status`."""
        async with asyncio.timeout(15):
            while True:
                try:
                    if (await self.client.get(path)).status_code == status:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.02)

    async def ends(self) -> tuple[int, str]:
        """Exit code and log."""
        async with asyncio.timeout(15):
            _, log = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, log.decode()


@asynccontextmanager
async def started(*flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
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


@asynccontextmanager
async def house(
    redis: RedisServer, model_dir: Path, *flags: str
) -> AsyncIterator[tuple[GatewayProcess, CountingDecode]]:
    """A gateway process that is ready, and its decode worker."""
    served_model(model_dir)
    player, port, grpc_port = CountingDecode(), free_port(), free_port()
    async with GrpcServer(
        "127.0.0.1", 0, add_services=[lambda server: decode_pb2_grpc.add_DecodeServicer_to_server(player, server)]
    ) as server:
        info = worker_info("d0", Role.DECODE, control_address=server.address)
        assert await probe_worker(info)
        async with (
            RedisConnection.from_url(redis.url) as connection,
            Registration(connection, lambda: info, ttl_s=6.0),
            started(
                *("--model-dirs", str(model_dir), "--redis-url", redis.url, "--port", str(port)),
                *("--grpc-port", str(grpc_port), *flags),
            ) as process,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=15) as client,
        ):
            gateway = GatewayProcess(process=process, client=client, grpc_port=grpc_port)
            await gateway.has_state("/ready", 200)
            yield gateway, player


async def test_a_request_goes_through_and_can_be_looked_up(redis_server: RedisServer, tmp_path: Path) -> None:
    async with house(redis_server, tmp_path / "model") as (gateway, _):
        answer = (await gateway.client.post("/v1/completions", json={**PROMPT, "return_token_ids": True})).json()
        assert answer["choices"][0]["token_ids"] == [40, 41, 42, 43, 44]
        path = f"/v1/requests/{answer['id']}"
        await gateway.has_state(path, 200)
        async with asyncio.timeout(10):
            while (record := (await gateway.client.get(path)).json())["state"] != "done":
                pass
        assert record["decode_worker"] == "d0"
        assert record["num_output_tokens"] == 5
        assert record["finish_reasons"] == ["length"]
        (worker,) = (await gateway.client.get("/v1/workers")).json()["data"]
        assert (worker["id"], worker["is_connected"]) == ("d0", True)
        metrics = (await gateway.client.get("/metrics")).text
        assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 1.0' in metrics
        assert "weir_redis_up 1.0" in metrics
        async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            models = await stub.ListModels(inference_pb2.ListModelsRequest())
            assert [model.id for model in models.models] == ["tiny"]
        gateway.process.send_signal(signal.SIGTERM)
        code, log = await gateway.ends()
    assert code == 0, log


async def test_sigterm_lets_a_stream_finish_and_refuses_new_ones(redis_server: RedisServer, tmp_path: Path) -> None:
    async with house(redis_server, tmp_path / "model") as (gateway, player):
        player.go.clear()
        async with gateway.client.stream("POST", "/v1/completions", json={**PROMPT, "stream": True}) as response:
            await player.started.wait()
            gateway.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(10):
                while (refused := await gateway.client.post("/v1/completions", json=PROMPT)).status_code == 200:
                    pass
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            player.go.set()
            lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
        code, log = await gateway.ends()
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert code == 0, log


async def test_what_outlasts_the_drain_time_ends_with_an_error_event(redis_server: RedisServer, tmp_path: Path) -> None:
    async with house(redis_server, tmp_path / "model", "--drain-s", "0.2") as (gateway, player):
        player.go.clear()
        async with gateway.client.stream("POST", "/v1/completions", json={**PROMPT, "stream": True}) as response:
            await player.started.wait()
            gateway.process.send_signal(signal.SIGTERM)
            lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
        await player.cancelled.wait()
        player.go.set()
        code, log = await gateway.ends()
    assert json.loads(lines[-1][6:])["error"]["message"] == "the gateway shuts down"
    assert code == 0, log


async def test_a_gateway_without_redis_answers_that_nobody_serves(tmp_path: Path) -> None:
    served_model(tmp_path / "model")
    port = free_port()
    async with (
        started(
            *("--model-dirs", str(tmp_path / "model"), "--redis-url", f"redis://127.0.0.1:{free_port()}/0"),
            *("--port", str(port), "--grpc-port", "none"),
        ) as process,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=15) as client,
    ):
        gateway = GatewayProcess(process=process, client=client, grpc_port=0)
        await gateway.has_state("/health", 200)
        assert (await client.get("/ready")).status_code == 503
        refused = await client.post("/v1/completions", json=PROMPT)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "no_worker"
        assert (await client.get("/v1/requests/x")).status_code == 503
        process.send_signal(signal.SIGTERM)
        code, log = await gateway.ends()
    assert code == 0, log


async def test_a_port_in_use_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    served_model(tmp_path / "model")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = str(taken.getsockname()[1])
        flags = ("--model-dirs", str(tmp_path / "model"), "--port", busy, "--redis-url", "redis://127.0.0.1:1/0")
        async with started(*flags, "--log-level", "error") as process, asyncio.timeout(15):
            _, log = await process.communicate()
    assert process.returncode == 2
    assert log.decode().splitlines() == [f"gateway: port: cannot listen on 127.0.0.1:{busy}: Address already in use"]

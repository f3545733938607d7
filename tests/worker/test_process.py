from __future__ import annotations

import asyncio
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from decode_service.config import DecodeConfig
from decode_service.servicer import SERVICE_NAME, DecodeServicer
from protos.decode_pb2_grpc import add_DecodeServicer_to_server
from tests.fakes.async_engine import CountingPair, counting_pair
from tests.fakes.redis_server import RedisServer, redis_server
from tests.fakes.worker_pair import until, within
from weir.cli.probes import free_ports
from weir.cluster.block_ownership import OwnershipRecorder
from weir.cluster.connection import RedisConnection
from weir.cluster.worker_registry import WorkerDirectory
from weir.core.errors import HopFailedError, WeirError, find_error
from weir.core.worker import Incarnation, Role, WorkerId, WorkerInfo, WorkerState
from weir.runtime.grpc_client import open_channel
from weir.runtime.metrics import WorkerMetrics
from weir.runtime.service import ServiceContext
from weir.worker.identity import WorkerIdentity
from weir.worker.parts import WorkerParts
from weir.worker.process import serve_worker

__all__ = ["redis_server"]

ROOT = Path(__file__).resolve().parents[2]
ME = WorkerIdentity(worker_id=WorkerId("d"), incarnation=Incarnation("decode-1"), role=Role.DECODE)


@dataclass(frozen=True, kw_only=True)
class Served:
    pair: CountingPair
    context: ServiceContext
    task: asyncio.Task[None]
    directory: WorkerDirectory
    metrics_port: int

    def info(self) -> WorkerInfo | None:
        return self.directory.find_worker(ME.worker_id)

    async def get(self, path: str) -> tuple[int, str]:
        return await asyncio.to_thread(self._get, path)

    def _get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}{path}", timeout=5) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


async def never_asked(worker: WorkerInfo) -> bool:
    raise AssertionError("a worker with a heartbeat was probed")


@asynccontextmanager
async def served(redis_server: RedisServer, model_dir: Path) -> AsyncIterator[Served]:
    """A decode worker as its process runs it, with the signal to stop in the test's hands."""
    (metrics_port,) = free_ports(1)
    config = DecodeConfig(
        model_dir=model_dir, redis_url=redis_server.url, metrics_port=metrics_port, registration_ttl_s=6.0, drain_s=5.0
    )
    registry = CollectorRegistry()
    context = ServiceContext(name="decode")
    async with (
        counting_pair() as pair,
        RedisConnection.from_url(redis_server.url) as redis,
        OwnershipRecorder(redis, ME.worker_id, ME.incarnation) as ownership,
        WorkerDirectory(redis, probe=never_asked, ttl_s=6.0) as directory,
    ):
        parts = WorkerParts(
            config=config,
            identity=ME,
            engine=pair.decode_engine,
            redis=redis,
            ownership=ownership,
            registry=registry,
            metrics=WorkerMetrics(registry, model_name="tiny", role=ME.role, max_num_batched_tokens=16),
        )

        async def run() -> None:
            await serve_worker(
                context,
                pair.decode,
                parts=parts,
                transfer=pair.client,
                transfer_address="",
                add_service=partial(add_DecodeServicer_to_server, DecodeServicer(pair.decode)),
                service_name=SERVICE_NAME,
            )

        loop = asyncio.get_running_loop()
        task = loop.create_task(run())
        one = Served(pair=pair, context=context, task=task, directory=directory, metrics_port=metrics_port)
        try:
            await until(lambda: task.done() or one.info() is not None)
            yield one
        finally:
            context.stopping.set()
            await asyncio.wait([task])


async def test_a_worker_registers_what_it_is_and_where_it_is_reached(redis_server: RedisServer, tmp_path: Path) -> None:
    async with served(redis_server, tmp_path) as worker:
        info = worker.info()
        assert info is not None
        assert (info.role, info.state, info.incarnation) == (Role.DECODE, WorkerState.READY, ME.incarnation)
        assert info.model == "counting"
        assert (info.load.total_blocks, info.load.free_blocks) == (64, 64)
        assert info.layout == worker.pair.decode_engine.layout
        async with open_channel(info.control_address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_its_metrics_and_health_are_on_plain_http(redis_server: RedisServer, tmp_path: Path) -> None:
    async with served(redis_server, tmp_path) as worker:
        assert (await worker.get("/ready"))[0] == (await worker.get("/health"))[0] == 200
        status, body = await worker.get("/metrics")
        assert status == 200
        assert 'vllm:num_requests_running{engine="0",model_name="tiny",role="decode"} 0.0' in body


async def test_told_to_stop_it_says_so_finishes_and_leaves(redis_server: RedisServer, tmp_path: Path) -> None:
    async with served(redis_server, tmp_path) as worker:
        runner = worker.pair.decode_engine.runner
        runner.hold()
        stream = worker.pair.gateway.open(*worker.pair.request((1, 2, 3)), None)
        await within(stream.answered.wait())
        worker.context.stopping.set()
        await until(lambda: (info := worker.info()) is not None and info.state is WorkerState.DRAINING)
        assert await worker.get("/ready") == (503, "draining\n")
        assert (await worker.get("/health"))[0] == 200
        runner.run_freely()
        await within(worker.task)
        assert stream.finish_reason is not None
        await until(lambda: worker.info() is None)


async def test_a_dead_engine_ends_the_process_with_an_error_and_its_streams_too(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    async with served(redis_server, tmp_path) as worker:
        worker.pair.decode_engine.runner.is_broken = True
        streams = [worker.pair.gateway.open(*worker.pair.request((seed, 2, 3)), None) for seed in range(1, 5)]
        for stream in streams:
            await within(stream.ended.wait())
            assert isinstance(stream.error, WeirError)
        for seed in range(5, 8):
            stream = worker.pair.gateway.open(*worker.pair.request((seed, 2, 3)), None)
            await within(stream.ended.wait())
        await within(asyncio.wait([worker.task]))
        error = worker.task.exception()
        assert error is not None
        assert isinstance(find_error(error, HopFailedError), HopFailedError)


async def test_a_worker_that_stalls_turns_red_for_gateways_too(redis_server: RedisServer, tmp_path: Path) -> None:
    async with served(redis_server, tmp_path) as worker:
        info = worker.info()
        assert info is not None
        worker.pair.decode_engine.runner.hold()
        worker.pair.gateway.open(*worker.pair.request((1, 2, 3)), None)
        async with open_channel(info.control_address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            status = None
            async for answer in stub.Watch(health_pb2.HealthCheckRequest()):
                status = answer.status
                if status == health_pb2.HealthCheckResponse.NOT_SERVING:
                    break
            assert status == health_pb2.HealthCheckResponse.NOT_SERVING
        code, detail = await worker.get("/ready")
        assert code == 503
        assert "ended no step" in detail
        worker.pair.decode_engine.runner.run_freely()


async def test_a_busy_port_is_refused_before_anything_loads(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "decode_service", "--model-dir", str(tmp_path), "--metrics-port", str(port)),
            cwd=ROOT,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(20):
            _, err = await process.communicate()
    assert process.returncode == 2
    expected = f"decode: metrics_port: {port} is in use on 127.0.0.1; choose another with --metrics-port"
    assert err.decode().splitlines() == [expected]  # an empty model directory would be the next complaint

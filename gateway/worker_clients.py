"""A client for each worker of the directory: made when one joins, closed when one has left and its last work is done.

Only workers that are registered and connected are offered for routes, so that a dead one is avoided from the moment
its connection breaks, long before its registration lapses.
"""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import Protocol, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.decode_client import GrpcDecodeClient
from gateway.fleet import Fleet
from gateway.prefill_client import GrpcPrefillClient
from weir.cluster.owned_tasks import OwnedTasks
from weir.core.errors import WorkerLostError
from weir.core.worker import Incarnation, Role, WorkerInfo
from weir.runtime.grpc_client import open_channel

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 1.0


class Directory(Protocol):
    """The part of `weir.cluster.worker_registry.WorkerDirectory` that clients follow."""

    def workers(self) -> tuple[WorkerInfo, ...]: ...

    @property
    def revision(self) -> int: ...

    async def wait_for_change(self, seen_revision: int | None = None) -> int: ...


class GrpcWorkerClients:
    """See `gateway.worker_protocols.WorkerClients`; an async context manager."""

    def __init__(self, directory: Directory, *, gateway_id: str) -> None:
        self._directory = directory
        self._gateway_id = gateway_id
        self._prefill: dict[Incarnation, GrpcPrefillClient] = {}
        self._decode: dict[Incarnation, GrpcDecodeClient] = {}
        self._runs: dict[Incarnation, asyncio.Task[None]] = {}
        self._tasks = OwnedTasks()
        self._changed = asyncio.Event()
        self._fleet = Fleet(())
        self._fleet_source: tuple[WorkerInfo, ...] | None = None

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._tasks.start(self._follow())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._tasks.__aexit__(kind, error, traceback)

    @property
    def fleet(self) -> Fleet:
        workers = self._directory.workers()
        if workers is not self._fleet_source:
            self._fleet = Fleet([worker for worker in workers if self._is_connected(worker)])
            self._fleet_source = workers
        return self._fleet

    def get_prefill(self, worker: WorkerInfo) -> GrpcPrefillClient:
        try:
            return self._prefill[worker.incarnation]
        except KeyError as exc:
            raise WorkerLostError(f"prefill worker {worker.worker_id} has left", hop="prefill") from exc

    def get_decode(self, worker: WorkerInfo) -> GrpcDecodeClient:
        try:
            return self._decode[worker.incarnation]
        except KeyError as exc:
            raise WorkerLostError(f"decode worker {worker.worker_id} has left", hop="decode") from exc

    async def wait_for_change(self) -> None:
        await self._changed.wait()

    def _is_connected(self, worker: WorkerInfo) -> bool:
        client = self._prefill.get(worker.incarnation) or self._decode.get(worker.incarnation)
        return client is not None and client.is_connected

    async def _follow(self) -> None:
        revision = self._directory.revision
        while True:
            self._sync()
            revision = await self._directory.wait_for_change(revision)

    def _sync(self) -> None:
        """A client for every worker that is registered; none for one that has left and is idle."""
        registered = {worker.incarnation: worker for worker in self._directory.workers()}
        for incarnation, worker in registered.items():
            if incarnation not in self._runs:
                self._runs[incarnation] = self._tasks.start(self._make_client(worker).run())
        for incarnation in self._runs.keys() - registered.keys():
            client = self._prefill.get(incarnation) or self._decode[incarnation]
            client.retire()
            if client.is_idle or not client.is_connected:
                self._prefill.pop(incarnation, None)
                self._decode.pop(incarnation, None)
                self._runs.pop(incarnation).cancel()
        self._fleet_source = None
        self._changed.set()
        self._changed = asyncio.Event()

    def _make_client(self, worker: WorkerInfo) -> GrpcPrefillClient | GrpcDecodeClient:
        if worker.role is Role.PREFILL:
            prefill = GrpcPrefillClient(worker, on_change=self._sync)
            self._prefill[worker.incarnation] = prefill
            return prefill
        decode = GrpcDecodeClient(worker, gateway_id=self._gateway_id, on_change=self._sync)
        self._decode[worker.incarnation] = decode
        return decode


async def probe_worker(worker: WorkerInfo) -> bool:
    """Whether a worker answers a direct health call, whatever it says: the second half of rule 13."""
    channel = open_channel(worker.control_address)
    try:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
        return True
    except grpc.aio.AioRpcError:
        return False
    finally:
        await channel.close()

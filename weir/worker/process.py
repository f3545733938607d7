"""What is around a worker: its process' settings, its servers, its place in the cluster, and its end."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import NoReturn, Protocol

import grpc

from kv_transfer.stats import TransferStats
from weir.cluster.kv_publisher import KvIndexPublisher
from weir.cluster.worker_registry import Registration
from weir.core.errors import HopFailedError
from weir.core.worker import WorkerInfo
from weir.runtime.config import describe_config
from weir.runtime.grpc_server import GrpcServer
from weir.runtime.logs import setup_logging
from weir.runtime.metrics_server import Health, start_metrics_server
from weir.runtime.ports import check_port_free
from weir.runtime.service import ServiceContext
from weir.runtime.tracing import setup_tracing
from weir.worker.address import reachable_host, with_host
from weir.worker.config import WorkerConfig
from weir.worker.engine_metrics import WorkerMetricsMirror
from weir.worker.identity import WorkerDescription
from weir.worker.parts import WorkerParts
from weir.worker.readiness import Readiness

logger = logging.getLogger(__name__)

REFRESH_S = 0.25


class Worker(Protocol):
    """What a process asks of the worker in it, whichever its role."""

    @property
    def is_draining(self) -> bool: ...

    @property
    def num_waiting(self) -> int:
        """Requests that wait before the engine."""
        ...

    @property
    def queued_tokens(self) -> int:
        """Their prompts' tokens."""
        ...

    def refuse_new(self) -> None:
        """Start to drain."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Finish what runs; False if `timeout_s` passed before, and what still ran was ended."""
        ...


class Transfer(Protocol):
    """Either end of the KV transfer."""

    @property
    def stats(self) -> TransferStats: ...

    @property
    def num_in_flight(self) -> int: ...

    @property
    def oldest_progress_age_s(self) -> float: ...


def prepare_process(config: WorkerConfig, name: str) -> None:
    """Logs, traces, niceness and how compute threads wait; before torch is imported, which reads that once.

    Raises:
        ConfigError: a port is in use.
    """
    setup_logging(config.log_level, config.log_format)
    setup_tracing(f"weir-{name}", config.otlp_endpoint)
    if config.nice:
        os.nice(config.nice)
    # Threads that spin between two operations take a neighbour's cores: with two workers on two cores, the slowest
    # decode steps take 265 ms instead of 72 ms.
    os.putenv("OMP_WAIT_POLICY", "passive")
    check_port_free(config.host, config.port, "port")
    check_port_free(config.host, config.metrics_port, "metrics_port")
    logger.info("starting", extra=describe_config(config))


async def serve_worker(
    context: ServiceContext,
    worker: Worker,
    *,
    parts: WorkerParts,
    transfer: Transfer,
    transfer_address: str,
    add_service: Callable[[grpc.aio.Server], None],
    service_name: str,
) -> None:
    """Be reachable, registered and watched until the process is told to stop; then drain.

    Raises:
        ConfigError: an address cannot be listened on.
        HopFailedError: the engine is dead. The process must end then: a worker that answers and computes nothing is
            worse than none.
    """
    config, identity, engine, redis = parts.config, parts.identity, parts.engine, parts.redis
    host = config.advertise_address or reachable_host(config.host, config.redis_url)
    mirror = WorkerMetricsMirror(parts.metrics, identity.role)
    readiness = Readiness(
        engine.stats,
        transfer_age_s=lambda: transfer.oldest_progress_age_s,
        is_draining=lambda: worker.is_draining,
    )

    def refresh() -> None:
        mirror.refresh(
            engine.stats(),
            transfer.stats,
            iteration_tokens=engine.take_iteration_tokens(),
            num_handoffs_in_flight=transfer.num_in_flight,
            is_redis_up=redis.is_up,
            num_waiting=worker.num_waiting,
            queued_tokens=worker.queued_tokens,
        )

    def info() -> WorkerInfo:
        return description.info(
            engine.stats(),
            is_draining=worker.is_draining,
            num_waiting=worker.num_waiting,
            queued_tokens=worker.queued_tokens,
        )

    async with (
        GrpcServer(config.host, config.port, add_services=[add_service], service_names=[service_name]) as server,
        start_metrics_server(parts.registry, config.host, config.metrics_port, readiness.health) as metrics_port,
        KvIndexPublisher(
            redis,
            identity.worker_id,
            identity.incarnation,
            events=engine.kv_events,
            snapshot=engine.kv_snapshot,
        ),
    ):
        description = WorkerDescription(
            identity=identity,
            model=engine.card.name,
            control_address=with_host(server.address, host),
            transfer_address=with_host(transfer_address, host) if transfer_address else "",
            layout=engine.layout,
            fingerprint=engine.fingerprint,
            max_model_len=engine.max_model_len,
        )
        async with Registration(redis, info, ttl_s=config.registration_ttl_s) as registration:
            logger.info(
                "ready",
                extra={
                    "worker_id": identity.worker_id,
                    "address": description.control_address,
                    "metrics_port": metrics_port,
                    "blocks": engine.num_blocks,
                },
            )
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(_supervise(refresh, readiness.health, server))
                await context.stopping.wait()
                worker.refuse_new()
                registration.announce()
                is_complete = await worker.drain(config.drain_s)
                logger.info("drained" if is_complete else "the drain time has passed; what still ran was ended")
                watch.cancel()


async def _supervise(refresh: Callable[[], None], health: Callable[[], Health], server: GrpcServer) -> NoReturn:
    """Every quarter of a second: bring the metrics up to date and tell the gRPC health service what is so."""
    was_ready: bool | None = None
    while True:
        refresh()
        now = health()
        if now.is_ready != was_ready:
            await server.set_serving(now.is_ready)
            if was_ready is not None:
                logger.warning("ready again" if now.is_ready else f"not ready: {now.detail}")
            was_ready = now.is_ready
        if not now.is_live:
            raise HopFailedError(now.detail)
        await asyncio.sleep(REFRESH_S)

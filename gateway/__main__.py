"""The gateway's process: reads its settings, then enters one thing after the other and leaves them backwards."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from prometheus_client import CollectorRegistry

from gateway.admission import AdmissionController
from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.grpc_frontend import SERVICE_NAME, InferenceServicer
from gateway.http_server import serve_http
from gateway.listener import open_listener
from gateway.metrics import RequestMetrics
from gateway.model_store import ModelStore, ServedModel
from gateway.pipeline import GenerationPipeline
from gateway.router import Router
from gateway.services import GatewayServices
from gateway.worker_clients import GrpcWorkerClients, probe_worker
from protos.inference_pb2_grpc import add_InferenceServicer_to_server
from weir.cluster.block_ownership import BlockOwnership
from weir.cluster.connection import RedisConnection
from weir.cluster.kv_index import KvIndex
from weir.cluster.request_journal import RequestJournal
from weir.cluster.worker_registry import WorkerDirectory
from weir.core.errors import UnavailableError
from weir.runtime.config import describe_config, load_config
from weir.runtime.grpc_server import GrpcServer
from weir.runtime.logs import setup_logging
from weir.runtime.ports import cannot_listen
from weir.runtime.service import ServiceContext, run_service
from weir.runtime.tracing import setup_tracing

logger = logging.getLogger(__name__)

LAST_WORDS_S = 2.0
"""How long requests that the end of the drain time has failed may take to say so."""


async def serve(context: ServiceContext) -> None:
    """Serve until the process is told to stop, then drain."""
    config = load_config(GatewayConfig, prog="python -m gateway")
    setup_logging(config.log_level, config.log_format)
    setup_tracing("weir-gateway", config.otlp_endpoint)
    logger.info("starting", extra=describe_config(config))
    async with open_services(config) as services, AsyncExitStack() as servers:
        address = await servers.enter_async_context(open_http(config, services))
        grpc_server: GrpcServer | None = None
        if config.grpc_port is not None:
            grpc_server = await servers.enter_async_context(
                GrpcServer(
                    config.host,
                    config.grpc_port,
                    add_services=[partial(add_InferenceServicer_to_server, InferenceServicer(services))],
                    service_names=[SERVICE_NAME],
                )
            )
            await grpc_server.set_serving(True)
        logger.info(
            "ready",
            extra={"address": address, "grpc_address": grpc_server.address if grpc_server is not None else "none"},
        )
        await context.stopping.wait()
        if grpc_server is not None:
            await grpc_server.set_serving(False)
        await drain(services, config.drain_s)


@asynccontextmanager
async def open_services(config: GatewayConfig) -> AsyncIterator[GatewayServices]:
    """Everything that routes work with, for as long as the body runs.

    Raises:
        ConfigError, ModelLoadError: a setting or a model directory is at fault.
    """
    models = [ServedModel.load(path) for path in config.model_paths]
    gateway_id = config.gateway_id or f"gateway-{uuid.uuid4().hex[:12]}"
    metrics = RequestMetrics(
        CollectorRegistry(),
        max_model_len=max(model.card.max_model_len for model in models),
        legacy_aliases=config.legacy_aliases,
    )
    async with (
        RedisConnection.from_url(config.redis_url) as redis,
        WorkerDirectory(redis, probe=probe_worker, ttl_s=config.registration_ttl_s) as directory,
        KvIndex(redis, directory) as prefix_index,
        RequestJournal(redis) as journal,
        GrpcWorkerClients(directory, gateway_id=gateway_id) as clients,
    ):
        metrics.watch_redis(lambda: redis.is_up)
        pipeline = GenerationPipeline(
            gateway_id=gateway_id,
            clients=clients,
            router=Router(config.router_settings()),
            prefix_index=prefix_index,
            journal=journal,
            metrics=metrics,
            is_redis_up=lambda: redis.is_up,
            settings=config.pipeline_settings(),
        )
        admission = AdmissionController(
            max_running=config.max_running_prompts,
            max_waiting=config.max_waiting_requests,
            max_wait_s=config.max_admission_wait_s,
            on_rejected=metrics.count_rejection,
        )
        yield GatewayServices(
            config=config,
            http=config.http_settings(),
            models=ModelStore(models, workers_limit=lambda name: clients.fleet.of_model(name).max_model_len),
            pipeline=pipeline,
            admission=admission,
            metrics=metrics,
            directory=directory,
            journal=journal,
            ownership=BlockOwnership(redis),
        )


@asynccontextmanager
async def open_http(config: GatewayConfig, services: GatewayServices) -> AsyncIterator[str]:
    """The HTTP server, for as long as the body runs; gives host:port. Raises ConfigError when the address is taken."""
    try:
        listener = open_listener(config.host, config.port, stall_timeout_s=config.stall_timeout_s)
    except OSError as exc:
        raise cannot_listen("port", f"{config.host}:{config.port}", exc) from exc
    host, port = listener.getsockname()[:2]
    async with serve_http(create_app(services), listener):
        yield f"{host}:{port}"


async def drain(services: GatewayServices, drain_s: float) -> None:
    """Take nothing new and let what is here finish; what has not after `drain_s` ends with an error it can read."""
    services.admission.refuse_new()
    try:
        async with asyncio.timeout(drain_s):
            await services.admission.wait_until_idle()
        logger.info("drained")
        return
    except TimeoutError:
        num_failed = services.pipeline.fail_all(
            UnavailableError("the gateway shuts down", hop="gateway", retry_after_s=1.0)
        )
        logger.warning("the drain time has passed; %d prompts were ended", num_failed)
    try:
        async with asyncio.timeout(LAST_WORDS_S):
            await services.admission.wait_until_idle()
    except TimeoutError:
        logger.warning("some clients took no last words")


if __name__ == "__main__":
    run_service(serve, name="gateway")

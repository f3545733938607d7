"""The decode worker's process: reads its settings, then enters one thing after the other and leaves them backwards."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry

from decode_service.config import DecodeConfig
from decode_service.handoff import HandoffImporter
from decode_service.servicer import SERVICE_NAME, DecodeServicer
from decode_service.worker import DecodeWorker
from kv_transfer.handshake import TransferIdentity
from kv_transfer.receiver import TransferClient
from protos.decode_pb2_grpc import add_DecodeServicer_to_server
from weir.cluster.block_ownership import OwnershipRecorder
from weir.cluster.connection import RedisConnection
from weir.core.worker import Role
from weir.runtime.config import load_config
from weir.runtime.metrics import WorkerMetrics
from weir.runtime.service import ServiceContext, loading, run_service
from weir.worker.identity import WorkerIdentity
from weir.worker.process import prepare_process, serve_worker


async def serve(context: ServiceContext) -> None:
    """Serve until the process is told to stop."""
    config = load_config(DecodeConfig, prog="python -m decode_service")
    prepare_process(config, context.name)
    # Imports torch, which takes seconds: not before the settings are known to be right.
    with loading():
        from weir.engine.async_engine import AsyncEngine

    engine_config = config.engine_config()
    me = WorkerIdentity.draw(config.worker_id, Role.DECODE)
    async with AsyncEngine(engine_config) as engine, RedisConnection.from_url(config.redis_url) as redis:
        transfer_identity = TransferIdentity(
            worker_id=me.worker_id,
            incarnation=me.incarnation,
            layout=engine.layout,
            fingerprint=engine.fingerprint,
            secret=config.transfer_secret.encode(),
        )
        async with (
            TransferClient(transfer_identity) as transfer,
            OwnershipRecorder(redis, me.worker_id, me.incarnation) as ownership,
        ):
            registry = CollectorRegistry()
            metrics = WorkerMetrics(
                registry,
                model_name=engine.card.name,
                role=me.role,
                max_num_batched_tokens=engine_config.token_budget(),
                legacy_aliases=config.legacy_aliases,
            )
            worker = DecodeWorker(
                engine,
                HandoffImporter(engine, transfer, ownership, metrics=metrics, timeout_s=config.handoff_timeout_s),
                ownership,
                incarnation=me.incarnation,
                max_waiting=config.max_queued_requests,
            )
            await serve_worker(
                context,
                worker,
                config=config,
                identity=me,
                engine=engine,
                transfer=transfer,
                transfer_address="",
                redis=redis,
                registry=registry,
                metrics=metrics,
                add_service=partial(add_DecodeServicer_to_server, DecodeServicer(worker)),
                service_name=SERVICE_NAME,
            )


if __name__ == "__main__":
    run_service(serve, name="decode")

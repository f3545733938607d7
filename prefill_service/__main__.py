"""The prefill worker's process: reads its settings, then enters one thing after the other and leaves them backwards."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry

from kv_transfer.handshake import TransferIdentity
from kv_transfer.sender import TransferServer
from kv_transfer.settings import SenderConfig
from prefill_service.config import PrefillConfig
from prefill_service.held_blocks import HeldBlockBudget
from prefill_service.servicer import SERVICE_NAME, PrefillServicer
from prefill_service.worker import PrefillWorker
from protos.prefill_pb2_grpc import add_PrefillServicer_to_server
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
    config = load_config(PrefillConfig, prog="python -m prefill_service")
    prepare_process(config, context.name)
    # Imports torch, which takes seconds: not before the settings are known to be right.
    with loading():
        from weir.engine.async_engine import AsyncEngine

    engine_config = config.engine_config()
    me = WorkerIdentity.draw(config.worker_id, Role.PREFILL)
    async with AsyncEngine(engine_config) as engine, RedisConnection.from_url(config.redis_url) as redis:
        transfer_identity = TransferIdentity(
            worker_id=me.worker_id,
            incarnation=me.incarnation,
            layout=engine.layout,
            fingerprint=engine.fingerprint,
            secret=config.transfer_secret.encode(),
        )
        sender_config = SenderConfig(lease_s=config.lease_s)
        async with (
            TransferServer(transfer_identity, [config.transfer_address], sender_config) as transfer,
            OwnershipRecorder(redis, me.worker_id, me.incarnation) as ownership,
        ):
            registry = CollectorRegistry()
            worker = PrefillWorker(
                engine,
                transfer,
                ownership,
                incarnation=me.incarnation,
                budget=HeldBlockBudget(
                    config.max_held_blocks or engine.num_blocks, max_waiting=config.max_queued_requests
                ),
                max_queue_s=config.max_queue_s,
                lease_s=config.lease_s,
            )
            await serve_worker(
                context,
                worker,
                config=config,
                identity=me,
                engine=engine,
                transfer=transfer,
                transfer_address=transfer.addresses[0],
                redis=redis,
                registry=registry,
                metrics=WorkerMetrics(
                    registry,
                    model_name=engine.card.name,
                    role=me.role,
                    max_num_batched_tokens=engine_config.token_budget(),
                    legacy_aliases=config.legacy_aliases,
                ),
                add_service=partial(add_PrefillServicer_to_server, PrefillServicer(worker)),
                service_name=SERVICE_NAME,
            )


if __name__ == "__main__":
    run_service(serve, name="prefill")

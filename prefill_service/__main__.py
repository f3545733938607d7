"""The prefill worker's process: reads its settings, then enters one thing after the other and leaves them backwards."""

from __future__ import annotations

from functools import partial

from kv_transfer.sender import TransferServer
from kv_transfer.settings import SenderConfig
from prefill_service.config import PrefillConfig
from prefill_service.held_blocks import HeldBlockBudget
from prefill_service.servicer import SERVICE_NAME, PrefillServicer
from prefill_service.worker import PrefillWorker
from protos.prefill_pb2_grpc import add_PrefillServicer_to_server
from weir.core.worker import Role
from weir.runtime.config import load_config
from weir.runtime.service import ServiceContext, run_service
from weir.worker.parts import open_parts
from weir.worker.process import prepare_process, serve_worker


async def serve(context: ServiceContext) -> None:
    """Serve until the process is told to stop."""
    config = load_config(PrefillConfig, prog="python -m prefill_service")
    prepare_process(config, context.name)
    async with (
        open_parts(config, Role.PREFILL) as parts,
        TransferServer(
            parts.transfer_identity,
            [config.transfer_address],
            SenderConfig(lease_s=config.lease_s),
            export_memory=parts.engine.shared.export if parts.engine.shared is not None else None,
        ) as transfer,
    ):
        worker = PrefillWorker(
            parts.engine,
            transfer,
            parts.ownership,
            incarnation=parts.identity.incarnation,
            budget=HeldBlockBudget(
                config.max_held_blocks or parts.engine.num_blocks, max_waiting=config.max_queued_requests
            ),
            max_queue_s=config.max_queue_s,
            lease_s=config.lease_s,
        )
        await serve_worker(
            context,
            worker,
            parts=parts,
            transfer=transfer,
            transfer_address=transfer.addresses[0],
            add_service=partial(add_PrefillServicer_to_server, PrefillServicer(worker)),
            service_name=SERVICE_NAME,
        )


if __name__ == "__main__":
    run_service(serve, name="prefill")

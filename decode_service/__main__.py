"""The decode worker's process: reads its settings, then enters one thing after the other and leaves them backwards."""

from __future__ import annotations

from functools import partial

from decode_service.config import DecodeConfig
from decode_service.handoff import HandoffImporter
from decode_service.servicer import SERVICE_NAME, DecodeServicer
from decode_service.worker import DecodeWorker
from kv_transfer.receiver import TransferClient
from protos.decode_pb2_grpc import add_DecodeServicer_to_server
from weir.core.worker import Role
from weir.runtime.config import load_config
from weir.runtime.service import ServiceContext, run_service
from weir.worker.parts import open_parts
from weir.worker.process import prepare_process, serve_worker


async def serve(context: ServiceContext) -> None:
    """Serve until the process is told to stop."""
    config = load_config(DecodeConfig, prog="python -m decode_service")
    prepare_process(config, context.name)
    async with (
        open_parts(config, Role.DECODE) as parts,
        TransferClient(
            parts.transfer_identity, map_memory=parts.engine.shared.map if parts.engine.shared is not None else None
        ) as transfer,
    ):
        worker = DecodeWorker(
            parts.engine,
            HandoffImporter(parts.engine, transfer, parts.ownership, metrics=parts.metrics),
            parts.ownership,
            incarnation=parts.identity.incarnation,
            max_waiting=config.max_queued_requests,
        )
        await serve_worker(
            context,
            worker,
            parts=parts,
            transfer=transfer,
            transfer_address="",
            add_service=partial(add_DecodeServicer_to_server, DecodeServicer(worker)),
            service_name=SERVICE_NAME,
        )


if __name__ == "__main__":
    run_service(serve, name="decode")

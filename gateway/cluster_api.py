"""Routes that show the cluster: where a request is, who holds which blocks, which workers there are."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import APIRouter, Request

from gateway.services import GatewayServices, services_of
from gateway.worker_protocols import DecodeClient, PrefillClient
from weir.cluster.block_ownership import Holding
from weir.core.errors import InvalidRequestError, RequestNotFoundError, WeirError
from weir.core.request import RequestId
from weir.core.worker import Role, WorkerId

router = APIRouter(tags=["cluster"])


@router.get("/v1/requests/{request_id}")
async def get_request(request_id: str, request: Request) -> dict[str, Any]:
    """The state of a request and the timing of its hops, whichever gateway owns it."""
    record = await services_of(request).journal.get(RequestId(request_id))
    if record is None:
        raise RequestNotFoundError(f"no request {request_id[:100]!r} is known; records are kept for a while only")
    remaining_ms = record.deadline.remaining_ms()
    fields: dict[str, Any] = json.loads(record.to_json())
    return {
        "id": fields.pop("request_id"),
        "object": "weir.request",
        **fields,
        "remaining_s": remaining_ms / 1000 if remaining_ms else None,
    }


@router.get("/v1/kv/blocks")
async def list_kv_blocks(http_request: Request, request: str = "", worker: str = "") -> dict[str, Any]:
    """Who holds which KV blocks, of one request or on one worker."""
    ownership = services_of(http_request).ownership
    if bool(request) == bool(worker):
        raise InvalidRequestError("give either request or worker", param="request")
    if request:
        holdings = await ownership.by_request(RequestId(request))
    else:
        holdings = await ownership.by_worker(WorkerId(worker))
    return {"object": "list", "data": [_holding(holding) for holding in holdings]}


@router.get("/v1/workers")
async def list_workers(request: Request) -> dict[str, Any]:
    """The workers that this gateway knows, with their load at their last heartbeat."""
    services = services_of(request)
    connected = {worker.incarnation for worker in services.pipeline.clients.fleet.workers}
    workers = []
    for worker in services.directory.workers():
        fields = json.loads(worker.to_json())
        workers.append(
            {
                "id": fields.pop("worker_id"),
                "object": "weir.worker",
                **fields,
                "is_connected": worker.incarnation in connected,
            }
        )
    return {"object": "list", "data": workers}


@router.get("/load")
async def load(request: Request) -> dict[str, int]:
    """Requests in this gateway: `server_load` counts those that run, as vLLM's does."""
    admission = services_of(request).admission
    return {"server_load": admission.num_running, "num_waiting": admission.num_waiting}


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> dict[str, Any]:
    """Make every worker forget its prefix cache; false for one that has blocks of it in use or does not answer."""
    services = services_of(request)
    results: dict[str, bool] = {}

    async def reset(worker_id: WorkerId, client: PrefillClient | DecodeClient) -> None:
        try:
            results[worker_id] = await client.reset_prefix_cache()
        except WeirError:
            results[worker_id] = False

    async with asyncio.TaskGroup() as tasks:
        for worker_id, client in _clients(services):
            tasks.create_task(reset(worker_id, client))
    return {"is_reset": all(results.values()), "workers": results}


def _clients(services: GatewayServices) -> list[tuple[WorkerId, PrefillClient | DecodeClient]]:
    clients = services.pipeline.clients
    return [
        (
            worker.worker_id,
            clients.get_prefill(worker) if worker.role is Role.PREFILL else clients.get_decode(worker),
        )
        for worker in clients.fleet.workers
    ]


def _holding(holding: Holding) -> dict[str, Any]:
    remaining_ms = holding.until.remaining_ms()
    return {
        "object": "weir.holding",
        "request_id": holding.request_id,
        "handoff_id": holding.key.handoff_id,
        "epoch": holding.key.epoch,
        "kind": holding.kind.value,
        "worker_id": holding.worker_id,
        "incarnation": holding.incarnation,
        "groups": [{"first_block": group.first_block, "num_blocks": group.num_blocks} for group in holding.groups],
        "remaining_s": remaining_ms / 1000 if remaining_ms else None,
    }

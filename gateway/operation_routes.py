"""Routes for those who run the gateway: /health, /ready, /version, /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client.exposition import choose_encoder
from starlette.responses import JSONResponse, Response

from gateway.services import GatewayServices, services_of
from weir import __version__
from weir.core.worker import Role

router = APIRouter(tags=["operation"])


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health() -> dict[str, str]:
    """The process lives; the only route that needs no key."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Whether requests are taken: each model has a decode worker, which can compute prompts too, and nothing drains."""
    services = services_of(request)
    workers = _ready_workers(services)
    is_ready = not services.admission.is_draining and all(counts[Role.DECODE.value] for counts in workers.values())
    body = {"status": "ready" if is_ready else "not_ready", "models": workers}
    return JSONResponse(body, status_code=200 if is_ready else 503)


@router.get("/version")
async def version() -> dict[str, str]:
    """Weir's version."""
    return {"version": __version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus metrics of this gateway."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(services_of(request).metrics.registry), headers={"content-type": content_type})


def _ready_workers(services: GatewayServices) -> dict[str, dict[str, int]]:
    """How many workers of each role this gateway would give a request, by model."""
    fleet = services.pipeline.clients.fleet
    counts: dict[str, dict[str, int]] = {}
    for model in services.models.models:
        members = fleet.of_model(model.card.name)
        num_decode = len(members.decode)
        counts[model.card.name] = {
            Role.PREFILL.value: len(members.by_id) - num_decode,
            Role.DECODE.value: num_decode,
        }
    return counts

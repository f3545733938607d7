"""What the routes of the gateway work with, made once at the start and handed down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import Request

from gateway.http_settings import HttpSettings

if TYPE_CHECKING:
    from gateway.admission import AdmissionController
    from gateway.config import GatewayConfig
    from gateway.metrics import RequestMetrics
    from gateway.model_store import ModelStore
    from gateway.pipeline import GenerationPipeline
    from weir.cluster.block_ownership import BlockOwnership
    from weir.cluster.request_journal import RequestJournal
    from weir.cluster.worker_registry import WorkerDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayServices:
    """Every component that a route may use; `app.state.services` holds it."""

    config: GatewayConfig
    http: HttpSettings
    models: ModelStore
    pipeline: GenerationPipeline
    admission: AdmissionController
    metrics: RequestMetrics
    directory: WorkerDirectory
    journal: RequestJournal
    ownership: BlockOwnership


def services_of(request: Request) -> GatewayServices:
    """The services of the application that a request came to."""
    services = request.app.state.services
    assert isinstance(services, GatewayServices)
    return services

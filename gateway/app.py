"""The HTTP application of the gateway: routes, and what stands around them.

From outside to inside: CORS (so that refusals carry its headers too), API keys, ids and the last net under faults,
then the routes. All of it is pure ASGI, so a stream leaves as it comes and a disconnect is seen at once.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from gateway import cluster_api, generation_routes, model_routes, operation_routes, token_routes
from gateway.auth import AuthMiddleware
from gateway.error_responses import install_error_handlers
from gateway.openapi import install_openapi
from gateway.request_scope import RequestScopeMiddleware
from gateway.services import GatewayServices
from weir import __version__


def create_app(services: GatewayServices) -> FastAPI:
    """The application over services that live as long as it does."""
    app = FastAPI(
        title="Weir",
        summary="OpenAI-compatible serving of language models, prefill and decode apart.",
        version=__version__,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.services = services
    for module in (generation_routes, model_routes, token_routes, operation_routes, cluster_api):
        app.include_router(module.router)
    install_error_handlers(app)
    install_openapi(app)
    app.add_middleware(RequestScopeMiddleware)
    app.add_middleware(AuthMiddleware, api_keys=services.http.api_keys)
    if services.http.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=services.http.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app

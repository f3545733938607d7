"""Routes about models: /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from gateway.model_store import ServedModel
from gateway.services import services_of

router = APIRouter(prefix="/v1", tags=["models"])


@router.get("/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The models served here."""
    return {"object": "list", "data": [_model(model) for model in services_of(request).models.models]}


@router.get("/models/{model_id:path}")
async def get_model(request: Request, model_id: str) -> dict[str, Any]:
    """One model by name."""
    return _model(services_of(request).models.get(model_id))


def _model(model: ServedModel) -> dict[str, Any]:
    card = model.card
    return {
        "id": card.name,
        "object": "model",
        "created": card.created_s,
        "owned_by": "weir",
        "root": card.name,
        "parent": None,
        "max_model_len": model.max_model_len,
    }

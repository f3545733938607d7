"""Routes that generate: /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway import completions
from gateway.caller import caller_of
from gateway.openai_api import ChatCompletionRequest, CompletionRequest
from gateway.openapi import body_schema
from gateway.request_body import read_request
from gateway.services import services_of

router = APIRouter(prefix="/v1", tags=["generation"])


@router.post("/completions", openapi_extra=body_schema(CompletionRequest))
async def create_completion(request: Request) -> Response:
    """Continue one or more prompts."""
    services = services_of(request)
    body = await read_request(request, CompletionRequest, services.http)
    return completions.create_completion(body, services, caller_of(request.scope))


@router.post("/chat/completions", openapi_extra=body_schema(ChatCompletionRequest))
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    services = services_of(request)
    body = await read_request(request, ChatCompletionRequest, services.http)
    return completions.create_chat_completion(body, services, caller_of(request.scope))

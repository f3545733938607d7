"""Routes between text and token ids: /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request

from gateway.model_store import ServedModel
from gateway.openai_api import DetokenizeRequest, TokenizeChatRequest, TokenizePromptRequest
from gateway.openapi import body_schema
from gateway.prompts import chat_ids, check_vocabulary, encode_text
from gateway.request_body import check_fields, read_fields
from gateway.services import services_of

router = APIRouter(tags=["tokens"])


@router.post("/tokenize", openapi_extra=body_schema(TokenizePromptRequest, TokenizeChatRequest))
async def tokenize(request: Request) -> dict[str, Any]:
    """Token ids of a text, or of messages through the chat template."""
    services = services_of(request)
    fields = await read_fields(request, services.http)
    if fields.get("messages") is not None:
        chat = check_fields(fields, TokenizeChatRequest)
        model = services.models.get(chat.model)
        token_ids = await chat_ids(chat, model, services.http)
        return _tokens(token_ids, model, with_pieces=chat.return_token_strs)
    text = check_fields(fields, TokenizePromptRequest)
    model = services.models.get(text.model)
    token_ids = await encode_text(text.prompt, model, param="prompt", add_special_tokens=text.add_special_tokens)
    return _tokens(token_ids, model, with_pieces=text.return_token_strs)


@router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
async def detokenize(request: Request) -> dict[str, Any]:
    """The text of token ids."""
    services = services_of(request)
    body = check_fields(await read_fields(request, services.http), DetokenizeRequest)
    model = services.models.get(body.model)
    check_vocabulary(body.tokens, model, "tokens")
    return {"prompt": await model.tokenizer.decode_async(body.tokens, skip_special_tokens=body.skip_special_tokens)}


def _tokens(token_ids: Sequence[int], model: ServedModel, *, with_pieces: bool) -> dict[str, Any]:
    return {
        "count": len(token_ids),
        "max_model_len": model.max_model_len,
        "tokens": token_ids,
        "token_strs": [model.tokenizer.token_piece(token_id) for token_id in token_ids] if with_pieces else None,
    }

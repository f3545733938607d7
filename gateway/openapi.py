"""The description of the interface at /openapi.json.

Bodies are read and checked by `request_body` and not by the framework, so their models are put in here.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.openai_api import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizePromptRequest,
)

_REF = "#/components/schemas/{model}"
_MODELS: tuple[type[BaseModel], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizePromptRequest,
)


def body_schema(*models: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is one of `models`."""
    refs = [{"$ref": _REF.format(model=model.__name__)} for model in models]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install_openapi(app: FastAPI) -> None:
    """Make the description hold the models that `body_schema` names; built once, when first asked for."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
            _, definitions = models_json_schema([(model, "validation") for model in _MODELS], ref_template=_REF)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]
